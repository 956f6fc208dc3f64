# SPDX-License-Identifier: Apache-2.0
"""The tables of the page on benchmarks are those of the kept results."""

from __future__ import annotations

import json
import re

from tests.benchmarks.speed.page import (
    FIGURE,
    PAGE,
    PANELS,
    RESULTS,
    WHOLE,
    overview,
    tables,
    time,
    times_of,
    with_tables,
)


def test_the_page_has_the_tables_of_the_kept_results() -> None:
    assert PAGE.read_text() == with_tables(PAGE.read_text()), "run python -m tests.benchmarks.speed.page"


def test_every_result_of_a_speed_benchmark_is_on_the_page() -> None:
    kept = {path.stem for path in RESULTS.glob("*.json") if "targets" in json.loads(path.read_text())}
    assert set(re.findall(r"<!--(?:tables|targets):(\w+)-->", PAGE.read_text())) == kept


def test_the_figure_shows_works_and_contenders_of_the_results() -> None:
    assert FIGURE.exists()
    for name, work, contenders in {**WHOLE, **PANELS}.values():
        assert set(contenders.values()) <= set(times_of(json.loads((RESULTS / f"{name}.json").read_text()))[work])


def test_the_table_at_the_top_names_the_fastest_of_the_others() -> None:
    rows = {row.split(" | ")[0].strip("| "): row for row in overview().splitlines()}
    assert len(rows) == 2 + len(WHOLE) + len(PANELS)
    inserts = json.loads((RESULTS / "insert.json").read_text())["us"]["insert 1"]  # of ours as columns fewer than cpprb
    ours, cpprb, torchrl = (time(inserts[name]) for name in ("prioritized", "cpprb", "torchrl"))
    assert rows["insert 1 with priority"] == f"| insert 1 with priority | {ours} | {cpprb}, cpprb | {torchrl} |"


def test_the_figures_of_speed_in_the_readme_are_on_the_page() -> None:
    speed = (PAGE.parents[1] / "README.md").read_text().split("\n## Speed\n")[1].split("\n## ")[0]
    figures = re.findall(r"\d[\d,.]*\d|\d", "".join(line for line in speed.splitlines() if line.startswith("|")))
    assert len(figures) > 10
    assert set(figures) <= set(re.findall(r"\d[\d,.]*\d|\d", PAGE.read_text()))


def test_works_share_a_table_where_the_first_one_has_their_contenders() -> None:
    targets = [
        {"target": "T9: ours over the limit", "value": 2.534, "at most": 2.5, "met": False},
        {"target": "T9: ours faster than the peer", "value": 7.1, "at least": 7.0, "met": True},
    ]
    page = tables(
        {
            "us": {
                "a": {"ours": 12.4, "peer": 4.06},
                "b": {"new": 2e5, "old": 9_949.0},
                "c": {"ours": 9.0, "peer": 1.0},
                "d": {"peer": 7.0},
                "e": {"another": 3.0},
            },
            "targets": targets,
        },
        "nine",
    )
    assert page.split("\n\n") == [
        "| µs | ours | peer |\n|---|---:|---:|\n| a | 12 | 4.1 |\n| c | 9.0 | 1.0 |\n| d |  | 7.0 |",
        "| ms | b |\n|---|---:|\n| new | 200 |\n| old | 9.9 |",
        "e, another: 3.0 µs.",
        "[1 of 2 targets met](../tests/benchmarks/results/nine.json). Missed:",
        "* ours over the limit: 2.53 (≤2.5)",
    ]
    all_met = tables({"us": {}, "targets": targets[1:]}, "nine")
    assert all_met == "[1 of 1 targets met](../tests/benchmarks/results/nine.json)."
    assert time(99_999.0) == "99,999"
