# SPDX-License-Identifier: Apache-2.0
"""Every notebook runs with fewer steps, and its stored outputs are those of its code: pictures, and nothing else."""

from __future__ import annotations

import base64
import importlib.util
import io
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
SHORTER = {  # expressions for the cell tagged "parameters"
    "levels": {"UPDATES": "20", "SEEDS": "range(2)"},
    "lightning": {"WARMUP_STEPS": "1_000", "ENV_STEPS": "1_200", "EVERY": "50"},
    "rllib": {"ITERATIONS": "2", "STEPS": "100"},
    "torchrl": {"STEPS": "1_000", "BATCHES": "30", "SEEDS": "range(1)"},
}
MOST_BYTES = 100_000  # of a picture
OF_A_MACHINE = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|Users|usr|opt|private|var)/|\x1b|\d{4}-\d\d-\d\d[ T]\d\d:")


def _load_runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "docs/run_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUNNER = _load_runner()


def _stored(path: Path) -> list[int]:
    """How many pictures each cell has."""
    return [len(_pictures(cell)) for cell in nbformat.read(path, as_version=4).cells]


def _pictures(cell: nbformat.NotebookNode) -> list[bytes]:
    return [
        base64.b64decode(output.data["image/png"])
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]


@pytest.mark.slow
def test_the_command_stores_pictures_and_lines_with_other_parameters(tmp_path: Path) -> None:
    given = nbformat.v4.new_code_cell("COUNT = 5\nOTHER = 1", metadata={"tags": ["parameters"]})
    code = "import sys\nfrom matplotlib import pyplot\nprint('left out', file=sys.stderr)\nprint(COUNT, OTHER)\n"
    drawing = nbformat.v4.new_code_cell(code + "for _ in range(COUNT):\n    pyplot.subplots()")
    nbformat.write(nbformat.v4.new_notebook(cells=[given, drawing]), tmp_path / "tiny.ipynb")
    ran = RUNNER.execute(tmp_path / "tiny.ipynb", {"COUNT": "2"})
    assert ran.metadata["outputs_of"] == RUNNER.code_of(nbformat.read(tmp_path / "tiny.ipynb", as_version=4))
    assert ran.cells[0].source == "COUNT = 2\nOTHER = 1" and len(_pictures(ran.cells[1])) == 2
    assert [output.text for output in ran.cells[1].outputs if output.output_type == "stream"] == ["2 1\n"]


def _run(path: Path) -> None:
    notebook = RUNNER.with_parameters(path, SHORTER[path.stem])
    namespace: dict[str, Any] = {"__name__": "__main__"}
    drawn = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            exec(compile(cell.source, f"{path.stem}[{number}]", "exec"), namespace)
            for figure in map(pyplot.figure, pyplot.get_fignums()):
                figure.savefig(io.BytesIO())
        drawn.append(len(pyplot.get_fignums()))
        pyplot.close("all")
    assert drawn == _stored(path) and sum(drawn) >= 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of matplotlib, which a kernel does not make errors
@pytest.mark.parametrize("name", ["levels", "lightning", "torchrl"])
def test_a_notebook_runs_and_draws_the_pictures_that_are_stored(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: a kernel would take seconds to import the libraries."""
    monkeypatch.chdir(tmp_path)
    _run(ROOT / f"docs/notebooks/{name}.ipynb")


@pytest.mark.slow
@pytest.mark.usefixtures("starts_shared_ray")
def test_so_does_the_one_of_rllib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _run(ROOT / "docs/notebooks/rllib.ipynb")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_of_this_code_and_small(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata["outputs_of"] == RUNNER.code_of(notebook), f"make notebooks NOTEBOOKS={path}"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all("execution" not in cell.metadata for cell in cells)  # times
    pictures = [picture for cell in cells for picture in _pictures(cell)]
    assert len(pictures) >= 2 and max(map(len, pictures)) <= MOST_BYTES
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.get("name", "stdout") == "stdout" for output in outputs)
    texts = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs]
    assert [text for text in texts if OF_A_MACHINE.search(text)] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_in_the_contents_and_its_links_lead_somewhere(path: Path) -> None:
    assert f"<notebooks/{path.stem}>" in (ROOT / "docs/index.md").read_text()
    assert f"(notebooks/{path.name})" in (ROOT / "docs/examples.md").read_text()
    assert f"(docs/notebooks/{path.name})" in (ROOT / "README.md").read_text()
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert targets and [target for target in targets if not (path.parent / target).exists()] == []


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(KeyError, match=r"levels.ipynb has no parameters \['STEPS'\], only \['SEEDS', 'UPDATES'\]"):
        RUNNER.execute(ROOT / "docs/notebooks/levels.ipynb", {"STEPS": "1"})
