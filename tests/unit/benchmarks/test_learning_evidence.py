# SPDX-License-Identifier: Apache-2.0
"""The lists of the page on evidence are those of the kept results, and all pages quote their figures."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.benchmarks.learning.command import RESULTS
from tests.benchmarks.learning.evidence import (
    BEGIN,
    END,
    METHODS,
    PAGE,
    REPLACED,
    items,
    listed,
    usual_measure,
    write_lists,
)
from tests.benchmarks.learning.experiment import Experiment, Pairs
from tests.benchmarks.learning.runner import all_experiments

ROOT = PAGE.parents[1]
README = ROOT / "README.md"
WHICH_METHOD = ROOT / "docs" / "which-method.md"
FIGURE = re.compile(r"[-+]?[\d.,]*\d \[[-+]?[\d.,]*\d, [-+]?[\d.,]*\d\]")  # a number with its interval
# By method of the page of evidence: how the rows with its figures begin, in "Which method".
QUOTED = {
    WHICH_METHOD: {
        "| [prioritized](": "Event tables",
        "| [recent rows](": "Draws by age",
        "| [neighborhood mixup](": "Neighborhood mixup",
        "| [event tables](": "Event tables",
        "| [parallel curriculum](": "Parallel curriculum",
        "| [retention](": "Retention by surprise and on-policyness",
        "| [hindsight](": "Hindsight",
        "| [half from demonstrations](": "Demonstrations in half of each batch",
        "| [sequences](": "Recurrent agents on sequences",
        "| [level replay](": "Prioritized level replay",
        "| [learnability](": "Learnability of prompts",
        "| [replayed groups](": "Replayed groups",
        "| [mixreg, UCB-DrAC](": "mixreg and UCB-DrAC",
    },
}
ROWS = [(page, begins, method) for page, quoted in QUOTED.items() for begins, method in quoted.items()]


def of_method(method: str) -> str:
    """The section of a method, with its list."""
    sections = {section.split("\n")[0]: section for section in PAGE.read_text().split("\n## ")}
    return sections[method]


@pytest.mark.parametrize("method", METHODS)
def test_the_page_has_the_lists_of_the_kept_results(method: str) -> None:
    kept = of_method(method).split(BEGIN)[1].split(END)[0].strip()
    assert kept == listed(method, all_experiments(), RESULTS), "run `make experiments FLAGS=--redraw`"


def test_the_table_at_the_top_leads_to_the_section_of_each_method() -> None:
    top = PAGE.read_text().split("\n## ")[0]
    links = re.findall(r"^\| \[.*?\]\(#(.*?)\) \|", top, re.MULTILINE)
    assert links == [re.sub(r"\W+", "-", method.lower()) for method in METHODS]


@pytest.mark.parametrize(("page", "begins", "method"), ROWS)
def test_effects_in_the_tables_of_methods_are_figures_of_the_same_method(page: Path, begins: str, method: str) -> None:
    (line,) = (line for line in page.read_text().splitlines() if line.startswith(begins) and FIGURE.search(line))
    assert [figure for figure in FIGURE.findall(line) if figure not in of_method(method)] == []


def test_the_readme_groups_the_methods_by_the_verdicts_of_which_method() -> None:
    row = re.compile(r"^\| \[[^\]]*\]\((?:docs/)?([^)]*)\) .*", re.MULTILINE)
    verdicts = re.compile(r"\*\*(better|mixed|no difference found)\*\*", re.IGNORECASE)
    table = README.read_text().partition("\n## Which method helps\n")[2].partition("\n## ")[0]
    grouped = {}
    for line in table.splitlines():
        if heading := verdicts.search(line):
            group = heading[1].lower()
        elif found := row.match(line):
            grouped[found[1]] = group
    text = WHICH_METHOD.read_text().partition("\n## What was measured\n")[2]
    assert grouped == {found[1]: verdicts.search(found[0])[1] for found in row.finditer(text)}


@pytest.mark.parametrize("page", QUOTED)
def test_every_interval_in_the_tables_of_methods_is_of_a_method(page: Path) -> None:
    quoting = [line for line in page.read_text().splitlines() if FIGURE.search(line)]
    assert [line for line in quoting if not line.startswith(tuple(QUOTED[page]))] == []


def test_every_interval_in_a_text_is_of_a_kept_result() -> None:
    kept = {figure for page in RESULTS.glob("*.md") for figure in FIGURE.findall(page.read_text())}
    texts = [README, ROOT / "CHANGELOG.md"]
    for folder, pattern in (("docs", "*.md"), ("docs", "*.ipynb"), ("configs", "*.yaml"), ("examples", "*.py")):
        texts += (ROOT / folder).rglob(pattern)
    texts += [*(ROOT / "lightning_replay").rglob("*.py"), *(ROOT / "rllib_ext").rglob("*.py")]
    quoted = {(str(text.relative_to(ROOT)), figure) for text in texts for figure in FIGURE.findall(text.read_text())}
    assert len(quoted) > 200
    assert {(text, figure) for text, figure in quoted if figure not in kept} == set()


def test_items_name_what_is_compared_and_what_is_unfinished(tmp_path: Path) -> None:
    experiments = all_experiments()
    write(tmp_path / "locks.json", experiments["locks"].pairs[:1])
    write(tmp_path / "rooms.json", experiments["rooms"].pairs[:1], missing={"uniform": [1]})
    write(tmp_path / "nmer-full.json", experiments["nmer-full"].pairs[:1], cut_at=60_000)
    found = verdicts(experiments, tmp_path)
    assert list(found) == [name for names in METHODS.values() for name in names]
    compared = {
        name: "  * against {1}:\n    * {0}: **better**, 0".format(*experiments[name].pairs[0]) for name in found
    }
    assert found["locks"] == f"  * success\n{compared['locks']}"
    assert found["rooms"] == f"  * unfinished, success\n{compared['rooms']}"
    assert found["nmer-full"] == f"  * unfinished, the first 60,000 steps, success\n{compared['nmer-full']}"
    assert found["multi-room"] == "  * not finished"


def verdicts(experiments: dict[str, Experiment], results: Path) -> dict[str, str]:
    """The verdicts of all items, by the names of the experiments."""
    found = (item for method in METHODS for item in items(method, experiments, results))
    return {task.split("`")[1]: text for task, text in found}


def write(path: Path, pairs: Pairs, missing: dict[str, list[int]] | None = None, **more: int) -> None:
    """Results with a figure for each pair, by their numbers, and others by a measure that does not decide."""
    made = [
        {"arm": arm, "other": other, "verdict": "better", "text": f"{arm} is better than {other}: {number}"}
        for number, (arm, other) in enumerate(pairs)
    ]
    others = [pair | {"text": "of another measure"} for pair in made]
    content = {
        "measure": "success",
        "comparisons": {"speed": others, "success": made},
        "missing": missing or {},
        **more,
    }
    path.write_text(json.dumps(content))


def test_an_item_has_the_headlines_and_of_how_many(tmp_path: Path) -> None:
    experiments = all_experiments()
    few, many = experiments["locks"], experiments["event-tables"]
    for experiment in (few, many):
        write(tmp_path / f"{experiment.name}.json", experiment.pairs)
    found = {name: text.splitlines() for name, text in verdicts(experiments, tmp_path).items()}
    made = [f"    * {arm}: **better**, {number}" for number, (arm, _) in enumerate(few.pairs)]
    assert found["locks"] == ["  * success", "  * against uniform:", *made]
    title, *lines = found["event-tables"]
    shown = [many.pairs[int(line.rpartition(", ")[2])] for line in lines if "**better**" in line]
    assert set(shown) == set(many.headline) and len(shown) == 4
    assert [line for line in lines if "**better**" not in line] == [
        f"  * against {other}:" for other in dict.fromkeys(other for _, other in shown)
    ]
    assert title == "  * success"
    shown = {task.split("`")[1]: task for task, _ in items("Event tables", experiments, tmp_path)}
    assert shown["event-tables"].endswith(" after the first goal (4 of 18)") and "(" not in shown["rooms"]
    (task, _), *_ = items("Prioritized level replay", experiments, tmp_path)
    assert task.endswith(" episodes")  # all comparisons are shown


def test_the_measure_of_several_experiments_stands_above_their_items(tmp_path: Path) -> None:
    experiments = all_experiments()
    for name in ("bits", "goals"):
        write(tmp_path / f"{name}.json", experiments[name].pairs)
    assert usual_measure("Hindsight", tmp_path) == "success"
    above, empty, *lines = listed("Hindsight", experiments, tmp_path).splitlines()
    assert (above, empty) == ("Usual measure: success.", "")
    assert [after for line, after in pairwise(lines) if line.startswith("* ")] == ["  * against uniform:"] * 2
    (tmp_path / "goals.json").unlink()
    assert usual_measure("Hindsight", tmp_path) is None
    assert listed("Hindsight", experiments, tmp_path).splitlines()[1] == "  * success"


def test_verdicts_leave_out_what_the_page_has_once(tmp_path: Path) -> None:
    made = [
        "A is better than B: ratio of medians 0.61 [0.43, 0.84], 4 of 4 seeds (few seeds: rely on it with care)",
        "no difference found between A and C: ratio of medians 0.96 [0.69, 1.18], 9 of 16 seeds",
    ]
    pairs = all_experiments()["locks"].pairs
    verdicts_made = ("better", "no difference found")
    compared = [
        {"arm": arm, "other": other, "verdict": verdict, "text": text}
        for (arm, other), verdict, text in zip(pairs, verdicts_made, made, strict=False)
    ]
    (tmp_path / "locks.json").write_text(
        json.dumps({"measure": "steps", "comparisons": {"steps": compared}, "missing": {}})
    )
    assert verdicts(all_experiments(), tmp_path)["locks"].splitlines() == [
        "  * steps (ratio of medians)",
        "  * against uniform:",
        f"    * {pairs[0][0]}: **better**, 0.61 [0.43, 0.84], 4/4",
        f"    * {pairs[1][0]}: no difference found, 0.96 [0.69, 1.18], 9/16",
    ]


def test_an_experiment_of_one_arm_shows_its_mean(tmp_path: Path) -> None:
    experiments = all_experiments()
    content = {"measure": "success", "comparisons": {"success": []}, "missing": {}}
    content["values"] = {"success": {"the file": {"390": 0.5, "391": 0.7}}}
    (tmp_path / "half-field-file.json").write_text(json.dumps(content))
    assert verdicts(experiments, tmp_path)["half-field-file"].startswith("  * success\n  * the file 0.60 [")


def test_the_length_of_a_run_is_that_of_the_settings() -> None:
    experiments = all_experiments()
    settings = experiments["locks"].settings | {"updates": 1_234}
    changed = experiments | {"locks": dataclasses.replace(experiments["locks"], settings=settings)}
    (task, _), *_ = items("Prioritized level replay", changed, RESULTS)
    assert task.startswith("[`locks`](") and task.endswith(", 1234 updates of 16 episodes")
    lengths = {name: experiment.run_length for name, experiment in experiments.items()}
    assert lengths["nmer-short"] == "8,000 steps" and lengths["event-tables-file"] == "20,000 steps"


def test_an_experiment_without_a_place_is_refused(tmp_path: Path) -> None:
    experiments = all_experiments()
    with pytest.raises(ValueError, match="give each experiment a place"):
        list(items("Hindsight", {**experiments, "new": experiments["locks"]}, tmp_path))


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_experiments_keep_their_results_and_their_place_on_the_page(name: str) -> None:
    assert name not in all_experiments()
    assert json.loads((RESULTS / f"{name}.json").read_text())["units"]
    assert f"../tests/benchmarks/results/{name}.md" in PAGE.read_text()
    assert "this version has no program for it" in (RESULTS / f"{name}.md").read_text()


def test_text_around_the_lists_stays(tmp_path: Path) -> None:
    page, old = tmp_path / "evidence.md", f"{BEGIN}items of earlier results\n{END}"
    page.write_text(f"before\n\n## Hindsight\n\n{old}after\n\n## Other\n\ntext\n\n## Event tables\n\n{old}")
    write_lists(all_experiments(), RESULTS, page)
    goals, events = (
        f"{BEGIN}\n{listed(method, all_experiments(), RESULTS)}\n\n{END}" for method in ("Hindsight", "Event tables")
    )
    assert (
        page.read_text() == f"before\n\n## Hindsight\n\n{goals}after\n\n## Other\n\ntext\n\n## Event tables\n\n{events}"
    )
