# SPDX-License-Identifier: Apache-2.0
"""The documentation site builds without a warning, and has every public name, example, configuration and error."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
from sphinx.cmd import build

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


def built(folder: Path, *options: str) -> tuple[int, str]:
    """Builds the site in a fork, which has imported the libraries; returns its status and what it printed.

    Sphinx sets up loggers, signals and directives of its process.
    """
    shown = folder / "shown.txt"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with shown.open("w") as file:
                sys.stdout = sys.stderr = file
                warnings.simplefilter("default")
                status = build.main(["--quiet", f"--conf-dir={DOCS}", *options, str(ROOT), str(folder / "site")])
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1], shown.read_text()


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """All but its HTML, which takes 15 seconds more: pages, docstrings, links into them and other libraries."""
    status, shown = built(tmp_path, "--fail-on-warning", "--keep-going", "--builder=dummy")
    assert status == 0, shown


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The first page and that of curricula, in HTML, without the other pages that they link to."""
    out = tmp_path_factory.mktemp("pages")
    only = "include_patterns=docs/index.md,docs/curriculum.md,docs/which-method.md"
    status, shown = built(out, f"--define={only}")
    assert status == 0, shown
    return {page.stem: page.read_text() for page in (out / "site/docs").glob("*.html")}


@pytest.mark.slow
def test_pages_have_a_description_and_a_card(pages: dict[str, str]) -> None:
    for page, title in (("index", "lightning-replay"), ("curriculum", "Curriculum")):
        tags = dict(re.findall(r'<meta (?:name|property)="([\w:]+)" content="([^"]*)"', pages[page]))
        first = re.search(r"^(?!#|Version)\w.*$", (DOCS / f"{page}.md").read_text(), re.MULTILINE).group()
        assert tags["og:title"] == title and tags["og:image"].endswith("/main/docs/images/card.png")
        assert tags["description"] == tags["og:description"] and 60 <= len(tags["description"]) <= 200
        assert first.startswith(tags["description"].removesuffix(" …")[:60])


def test_the_first_page_has_version_licence_and_repository(pages: dict[str, str]) -> None:
    about = re.search(r'<p class="about">(.*?)</p>', pages["index"]).group(1)
    assert f"Version {version('lightning-replay')}, licence Apache-2.0" in about
    assert 'href="https://github.com/lightning-replay/lightning-replay">Source<' in about
    assert 'class="about"' not in pages["curriculum"]


def test_narrow_screens_get_narrow_figures_and_tables_as_lists(pages: dict[str, str]) -> None:
    forms = re.findall(
        r'<img .*?class="(wide|narrow)".*?src="\.\./_images/([\w-]+)\.png" style="width: (\d+)px', pages["curriculum"]
    )
    assert forms == [("wide", "half-field", "672"), ("narrow", "half-field-narrow", "422")]
    table = re.search(r'<table class="[^"]*prose.*?</table>', pages["which-method"], re.DOTALL).group()
    heads, rows = re.findall(r'<th class="head"><p>(.*?)</p>', table), table.split("<tr")[2:]
    assert re.findall(r'<p class="column">(.*?)</p>', rows[0]) == heads[1:]


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


@pytest.mark.slow
def test_the_errors_in_troubleshooting_are_those_of_the_code() -> None:
    files = [file for package in ("lightning_replay", "rllib_ext") for file in (ROOT / package).rglob("*.py")]
    constants = [
        node.value for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)
    ]
    code = "\n".join(text for text in constants if isinstance(text, str))
    first_columns = re.findall(r"^\| (.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [each.strip() for column in first_columns for each in re.findall(r"`([^`]+)`", column)]
    assert [each for each in quoted if each not in code and each not in TRANSLATED] == []
