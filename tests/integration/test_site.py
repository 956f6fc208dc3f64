# SPDX-License-Identifier: Apache-2.0
"""The documentation site builds without a warning, and has every public name, example, configuration and error."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PUBLIC = [  # modules whose __all__ is for users
    *("lightning_replay", "lightning_replay.agents", "lightning_replay.collecting", "lightning_replay.divided_draws"),
    "lightning_replay.events",
    *("lightning_replay.levels", "lightning_replay.levels.scores", "lightning_replay.lit", "lightning_replay.parts"),
    *("lightning_replay.lit.callbacks", "lightning_replay.neighbors", "lightning_replay.priority_tree"),
    *("lightning_replay.recipes", "lightning_replay.samplers", "lightning_replay.saving", "lightning_replay.sb3"),
    *(
        "lightning_replay.schedulers",
        "lightning_replay.sharded",
        "lightning_replay.storage",
        "lightning_replay.storage.frames",
    ),
    *("lightning_replay.transforms", "lightning_replay.writers", "rllib_ext", "rllib_ext.apex"),
]
NOT_DESCRIBED = {"__version__", "recipes", "scores"}  # a string, and modules of which each name is described
TRANSLATED = (  # errors of other libraries in the tables, which are not in our code
    *("Failed to import torchrl C++ binaries", "Multiple dispatch failed for 'torch.Tensor.__getitem__'"),
    *("was not set", "Option 'alhpa' is not accepted", "argument of type 'ABCMeta' is not iterable", "doesn't exist"),
)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """All but its HTML, which takes 15 seconds more: pages, docstrings, links into them and other libraries."""
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "--builder", "dummy"]
    built = subprocess.run(
        [*command, "--conf-dir", DOCS, ROOT, tmp_path / "site"], capture_output=True, text=True, env=os.environ
    )
    assert built.returncode == 0, built.stderr


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_describes_every_public_name(module: str) -> None:
    described = set(
        re.findall(r"^\.\. auto\w+:: (\w+)$", "".join(map(Path.read_text, DOCS.glob("api/*.md"))), re.MULTILINE)
    )
    assert not set(importlib.import_module(module).__all__) - described - NOT_DESCRIBED


def test_every_example_and_configuration_is_on_its_page_and_every_page_in_the_contents() -> None:
    page = (DOCS / "examples.md").read_text()
    files = [*ROOT.glob("examples/*.py"), *ROOT.glob("configs/*/*.yaml")]
    assert [str(file) for file in files if f"(../{file.relative_to(ROOT)})" not in page] == []
    contents = re.findall(r"```\{toctree\}(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    listed = {line.rpartition("<")[2].strip("> ") for block in contents for line in block.splitlines()}
    assert {page.stem for page in DOCS.glob("*.md")} - listed == {"index"}


def test_the_errors_in_troubleshooting_are_those_of_the_code() -> None:
    files = [file for package in ("lightning_replay", "rllib_ext") for file in (ROOT / package).rglob("*.py")]
    constants = [
        node.value for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)
    ]
    code = "\n".join(text for text in constants if isinstance(text, str))
    first_columns = re.findall(r"^\| (.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [each.strip() for column in first_columns for each in re.findall(r"`([^`]+)`", column)]
    assert [each for each in quoted if each not in code and each not in TRANSLATED] == []
