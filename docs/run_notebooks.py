# SPDX-License-Identifier: Apache-2.0
"""Executes the notebooks of the site, whose outputs are stored in them: ``make notebooks``.

python docs/run_notebooks.py [docs/notebooks/torchrl.ipynb ...]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent / "notebooks"
_SECONDS = 600  # most of one cell
_ENVIRONMENT = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "OMP_NUM_THREADS": "1",
    "RL_LOGGING_LEVEL": "WARNING",
}


def execute(path: Path, parameters: Mapping[str, object] | None = None) -> nbformat.NotebookNode:
    """Returns a notebook with the outputs of its cells, executed in an empty folder by a kernel of its own.

    Outputs are as they are stored: without log lines and warnings, which name paths and devices of the machine.

    Args:
        path: of the notebook, which stays as it is.
        parameters: expressions by name that replace those of the cell tagged ``parameters``, for a shorter run.

    Raises:
        KeyError: a parameter that the tagged cell does not assign.
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = with_parameters(path, parameters)
    code = code_of(nbformat.read(path, as_version=4))
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=_SECONDS,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=os.environ | _ENVIRONMENT)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "outputs_of": code,
    }
    return notebook


def with_parameters(path: Path, parameters: Mapping[str, object] | None = None) -> nbformat.NotebookNode:
    """Returns a notebook with other expressions in the cell tagged ``parameters``."""
    notebook = nbformat.read(path, as_version=4)
    if parameters:
        (tagged,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
        lines = dict(line.split(" = ", 1) for line in tagged.source.splitlines())
        if unknown := set(parameters) - set(lines):
            raise KeyError(f"{path.name} has no parameters {sorted(unknown)}, only {sorted(lines)}")
        tagged.source = "\n".join(f"{name} = {value}" for name, value in (lines | dict(parameters)).items())
    return notebook


def code_of(notebook: nbformat.NotebookNode) -> str:
    """Returns a digest of the code cells, which a notebook stores beside the outputs of this code."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> None:
    """Executes notebooks, all if none is named, and writes them back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path)
    for path in parser.parse_args(arguments).notebooks or sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = execute(path)
        nbformat.write(notebook, path)
        print(path.name, flush=True)


if __name__ == "__main__":
    main()
