# SPDX-License-Identifier: Apache-2.0
"""The map of CONTRIBUTING.md: each module with the first sentence of its docstring, and its tests.

``python -m tests.module_map`` writes the map into the page; ``tests/unit/test_contributing.py`` compares the two.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN = "<!-- The map begins here; python -m tests.module_map writes it. -->\n"
END = "<!-- The map ends here. -->\n"
PACKAGES = ("lightning_replay", "rllib_ext")


def purpose_of(module: Path) -> str:
    """Returns the first sentence of the docstring of a module, without its roles."""
    docstring = ast.get_docstring(ast.parse(module.read_text()))
    assert docstring, f"{module} has no docstring"
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    for role in (":func:", ":class:", ":meth:", ":mod:"):
        paragraph = paragraph.replace(role, "")
    return paragraph.replace("``", "`").replace("`~lightning_replay.", "`").rstrip(".")


def tests_of(module: Path) -> str:
    """Returns the tests that carry the name of the module; without such tests, the folder of its unit tests."""
    package, *folders = module.relative_to(ROOT).parent.parts
    unit = Path("tests", "unit", *(folders if package == "lightning_replay" else (package, *folders)))
    candidates = [unit, Path("tests", "property"), Path("tests", "statistical")]
    found = [folder / f"test_{module.stem}.py" for folder in candidates]
    named = [path for path in found if (ROOT / path).is_file()]
    if module.stem in {"buffer", "episodes", "sequences", "checkpoint"} and package == "rllib_ext":
        named = [path for path in named if path.is_relative_to(unit)]
    return ", ".join(f"`{path.as_posix()}`" for path in named or [unit] if (ROOT / path).exists())


def rows(folder: Path) -> Iterator[str]:
    yield f"\n**`{folder.relative_to(ROOT).as_posix()}/`**\n\n"
    yield "| file | purpose | tests |\n|---|---|---|\n"
    for module in sorted(folder.glob("*.py")):
        if module.name != "__init__.py":
            name = module.relative_to(ROOT).as_posix()
            yield f"| `{name}` | {purpose_of(module)} | {tests_of(module)} |\n"


def module_map() -> str:
    folders = sorted({path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")})
    return "".join(line for folder in folders for line in rows(folder)) + "\n"


def map_on_the_page() -> str:
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(page.replace(BEGIN + map_on_the_page() + END, BEGIN + module_map() + END))
