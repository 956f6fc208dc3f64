# SPDX-License-Identifier: Apache-2.0
"""The table of the page on evidence is that of the kept results, and the README quotes its figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.benchmarks.learning.evidence import BEGIN, END, METHODS, PAGE, REPLACED, rows, table, write_table
from tests.benchmarks.learning.runner import RESULTS, all_experiments

README = PAGE.parents[1] / "README.md"
FIGURE = re.compile(r"[-+]?[\d.,]*\d \[[^\]]+\]")  # a number with its interval


def test_the_page_has_the_table_of_the_kept_results() -> None:
    kept = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()
    assert kept == table(all_experiments(), RESULTS), "run `make experiments FLAGS=--redraw`"


def test_the_effects_in_the_readme_are_figures_of_the_page() -> None:
    effects = [line for line in README.read_text().splitlines() if re.match(r"\| .*(recipes|levels)\.", line)]
    figures = [figure for line in effects for figure in FIGURE.findall(line)]
    assert len(figures) >= len(METHODS) - 1
    assert [figure for figure in figures if figure not in PAGE.read_text()] == []


def test_rows_name_what_is_compared_and_what_is_unfinished(tmp_path: Path) -> None:
    experiments = all_experiments()
    content = {"measure": "success", "verdicts": ["a is better than b: +1 [+0, +2], 8 of 8 seeds"], "missing": {}}
    (tmp_path / "locks.json").write_text(json.dumps(content))
    (tmp_path / "rooms.json").write_text(json.dumps(content | {"missing": {"a": [1]}}))
    found = {name: row for row in rows(experiments, tmp_path) for name in [row[3].split("=")[1].rstrip("`")]}
    assert list(found) == [name for _, runs in METHODS.values() for name in runs]
    assert found["locks"][2] == "success:<br>a is better than b: +1 [+0, +2], 8 of 8 seeds"
    assert found["rooms"][2].startswith("unfinished, so no verdict; success")
    assert found["multi-room"][2] == "not finished, no verdict yet"
    assert "seeds 200 to 207" in found["locks"][1] and "6,400 episodes" in found["locks"][1]


def test_an_experiment_without_a_place_is_refused(tmp_path: Path) -> None:
    experiments = all_experiments()
    with pytest.raises(ValueError, match="give each experiment a place"):
        list(rows({**experiments, "new": experiments["locks"]}, tmp_path))


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_experiments_keep_their_results_and_their_place_on_the_page(name: str) -> None:
    assert name not in all_experiments()
    assert json.loads((RESULTS / f"{name}.json").read_text())["units"]
    assert f"../tests/benchmarks/results/{name}.md" in PAGE.read_text()


def test_text_around_the_table_stays(tmp_path: Path) -> None:
    page = tmp_path / "evidence.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    write_table(all_experiments(), RESULTS, page)
    assert page.read_text().startswith("before\n") and page.read_text().endswith(f"{END}after\n")
    assert "old" not in page.read_text().split("|")[0] and "`make experiments ONLY=locks`" in page.read_text()
