# SPDX-License-Identifier: Apache-2.0
"""The map of CONTRIBUTING.md names every module, and says of each what its docstring says."""

from __future__ import annotations

from tests.module_map import PACKAGES, ROOT, map_on_the_page, module_map


def test_the_map_names_every_module_with_its_purpose() -> None:
    assert map_on_the_page() == module_map(), "run python -m tests.module_map"
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            assert path.name == "__init__.py" or map_on_the_page().count(f"| `{name}` |") == 1
