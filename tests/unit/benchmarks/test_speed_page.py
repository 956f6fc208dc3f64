# SPDX-License-Identifier: Apache-2.0
"""The tables of the page on benchmarks are those of the kept results."""

from __future__ import annotations

import json
import re

from tests.benchmarks.speed.page import FIGURE, PAGE, PANELS, RESULTS, tables, time, with_tables


def test_the_page_has_the_tables_of_the_kept_results() -> None:
    assert PAGE.read_text() == with_tables(PAGE.read_text()), "run python -m tests.benchmarks.speed.page"


def test_every_result_of_a_speed_benchmark_is_on_the_page() -> None:
    kept = {path.stem for path in RESULTS.glob("*.json") if "targets" in json.loads(path.read_text())}
    assert set(re.findall(r"<!-- tables of (\w+) -->", PAGE.read_text())) == kept


def test_the_figure_shows_works_and_contenders_of_the_results() -> None:
    assert FIGURE.exists()
    for name, work, contenders in PANELS.values():
        assert set(contenders.values()) <= set(json.loads((RESULTS / f"{name}.json").read_text())["us"][work])


def test_works_with_other_contenders_have_a_table_of_their_own() -> None:
    targets = [{"target": "T9: ours over the limit", "value": 2.534, "at most": 2.5, "met": False}]
    page = tables(
        {
            "us": {"a": {"ours": 12.4, "peer": 4.06}, "b": {"ours": 2e5}, "c": {"ours": 9.0, "peer": 1.0}},
            "targets": targets,
        }
    )
    assert page.split("\n\n") == [
        "|  | ours | peer |\n| --- | ---: | ---: |\n| a | 12 µs | 4.1 µs |\n| c | 9.0 µs | 1.0 µs |",
        "|  | ours |\n| --- | ---: |\n| b | 200 ms |",
        "| target | measured | limit | met |\n| --- | --- | --- | --- |\n"
        "| ours over the limit | 2.53 | at most 2.5 | no |",
    ]
    assert time(99_999.0) == "99,999 µs"
