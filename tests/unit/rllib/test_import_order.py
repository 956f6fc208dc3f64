# SPDX-License-Identifier: Apache-2.0
"""The direction of imports in ``rllib_ext``, lazy ones and those for type checkers included."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rllib_ext

PACKAGE = Path(rllib_ext.__file__).parent
# Lowest first: a module imports from its own row, without a cycle, and from those above it in this table.
ORDER = (
    ("rllib_compat", "class_paths", "search_spaces", "clocks", "interruption"),
    ("environments",),
    ("episodes",),
    ("learner",),
    ("buffer",),
    ("checkpoint",),
    ("checks",),
    ("levels",),
    ("hooks",),
    ("preparation",),
    ("api",),
    ("from_yaml",),
    ("__init__", "__main__"),
)
HEIGHTS = {name: height for height, names in enumerate(ORDER) for name in names}
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere, relative to the package."""
    names = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in MODULES}
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "rllib_ext":
            origin = node.module.removeprefix("rllib_ext").strip(".")
            for alias in node.names:
                inner = f"{origin}.{alias.name}".strip(".")
                found.add(inner if inner in names else origin)
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("rllib_ext.") for alias in node.names if "rllib_ext." in alias.name}
    return found & names.keys()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    height = HEIGHTS[name_of(path).split(".")[0]]
    for name in imported(path):
        other = HEIGHTS[name.split(".")[0]]
        assert other <= height, f"{name_of(path)} imports {name}"
        assert other < height or name.split(".")[0] == name_of(path).split(".")[0], f"{name_of(path)} imports {name}"


def test_no_module_imports_itself_through_others() -> None:
    graph = {name_of(path): imported(path) for path in MODULES}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_file_is_longer_than_300_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300
