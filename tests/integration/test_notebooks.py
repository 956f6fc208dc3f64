# SPDX-License-Identifier: Apache-2.0
"""Every notebook runs with fewer steps, and its stored outputs are those of its code: pictures, and nothing else."""

from __future__ import annotations

import base64
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

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


def _pictures(cell: nbformat.NotebookNode) -> list[bytes]:
    return [
        base64.b64decode(output.data["image/png"])
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws_the_pictures_that_are_stored(path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    ran = RUNNER.execute(path, SHORTER[path.stem])
    drawn = [len(_pictures(cell)) for cell in ran.cells]
    assert sum(drawn) >= 2 and drawn == [len(_pictures(cell)) for cell in stored.cells]


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
