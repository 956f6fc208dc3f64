# SPDX-License-Identifier: Apache-2.0
"""The table of the page on evidence is that of the kept results, and all pages quote their figures."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.benchmarks.learning.command import RESULTS
from tests.benchmarks.learning.evidence import BEGIN, END, METHODS, PAGE, REPLACED, rows, table, write_table
from tests.benchmarks.learning.experiment import Pairs
from tests.benchmarks.learning.runner import all_experiments

ROOT = PAGE.parents[1]
README = ROOT / "README.md"
FIGURE = re.compile(r"[-+]?[\d.,]*\d \[[-+]?[\d.,]*\d, [-+]?[\d.,]*\d\]")  # a number with its interval
# Rows of the README by how they begin, and the method of the page that has their figures.
QUOTED = {
    "| PER,": "Event tables",
    "| NMER,": "Neighbourhood mixup",
    "| SSET,": "Event tables",
    "| DPCER,": "Parallel curriculum",
    "| retention by": "Retention by surprise and on-policyness",
    "| PLR,": "Prioritized level replay",
    "| learnability,": "Learnability of prompts",
    "| mixreg,": "mixreg and UCB-DrAC",
    "| HER,": "Hindsight",
    "| RLPD's halves,": "Demonstrations in half of each batch",
    "| sequences, R2D2,": "Recurrent agents on sequences",
    "Baselines of": "Event tables",
}


def test_the_page_has_the_table_of_the_kept_results() -> None:
    kept = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()
    assert kept == table(all_experiments(), RESULTS), "run `make experiments FLAGS=--redraw`"


def of_method(method: str) -> str:
    """The rows of a method in the page's table, and its section."""
    kept, after = PAGE.read_text().split(BEGIN)[1].split(END)
    lines = [line for line in kept.splitlines() if re.match(rf"\| (\*\*)?{method}[ *]", line)]
    sections = {section.split("\n")[0]: section for section in after.split("\n## ")}
    assert len(lines) == len(METHODS[method][1])
    return "\n".join([*lines, sections[method]])


@pytest.mark.parametrize("begins", QUOTED)
def test_the_effects_in_the_readme_are_figures_of_the_same_method(begins: str) -> None:
    (line,) = (line for line in README.read_text().splitlines() if line.startswith(begins))
    figures = FIGURE.findall(line)
    assert figures and [figure for figure in figures if figure not in of_method(QUOTED[begins])] == []


def test_every_interval_in_the_readme_is_of_a_method() -> None:
    quoting = [line for line in README.read_text().splitlines() if FIGURE.search(line)]
    assert [line for line in quoting if not line.startswith(tuple(QUOTED))] == []


def test_every_interval_in_a_text_is_of_a_kept_result() -> None:
    kept = {figure for page in RESULTS.glob("*.md") for figure in FIGURE.findall(page.read_text())}
    texts = [README, ROOT / "CHANGELOG.md"]
    for folder, pattern in (("docs", "*.md"), ("docs", "*.ipynb"), ("configs", "*.yaml"), ("examples", "*.py")):
        texts += (ROOT / folder).rglob(pattern)
    texts += [*(ROOT / "lightning_replay").rglob("*.py"), *(ROOT / "rllib_ext").rglob("*.py")]
    quoted = {(str(text.relative_to(ROOT)), figure) for text in texts for figure in FIGURE.findall(text.read_text())}
    assert len(quoted) > 200
    assert {(text, figure) for text, figure in quoted if figure not in kept} == set()


def test_rows_name_what_is_compared_and_what_is_unfinished(tmp_path: Path) -> None:
    experiments = all_experiments()
    write(tmp_path / "locks.json", experiments["locks"].pairs[:1])
    write(tmp_path / "rooms.json", experiments["rooms"].pairs[:1], missing={"uniform": [1]})
    found = {name: row for row in rows(experiments, tmp_path) for name in [row[3].split("=")[1].rstrip("`")]}
    assert list(found) == [name for _, names in METHODS.values() for name in names]
    assert found["locks"][2] == "success:<br>verdict 0"
    assert found["rooms"][2] == "unfinished; success:<br>verdict 0"
    assert found["multi-room"][2] == "not finished, no verdict yet"


def write(path: Path, pairs: Pairs, missing: dict[str, list[int]] | None = None) -> None:
    """Results with a verdict for each pair, by their numbers, and others by a measure that does not decide."""
    made = [{"arm": arm, "other": other, "text": f"verdict {number}"} for number, (arm, other) in enumerate(pairs)]
    others = [pair | {"text": "of another measure"} for pair in made]
    content = {"measure": "success", "comparisons": {"speed": others, "success": made}, "missing": missing or {}}
    path.write_text(json.dumps(content))


def test_a_row_has_the_headlines_and_a_link_to_all(tmp_path: Path) -> None:
    experiments = all_experiments()
    few, many = experiments["locks"], experiments["event-tables"]
    for experiment in (few, many):
        write(tmp_path / f"{experiment.name}.json", experiment.pairs)
    found = {row[3]: row[2].split("<br>")[1:] for row in rows(experiments, tmp_path)}
    assert found["`make experiments ONLY=locks`"] == [f"verdict {number}" for number in range(4)]
    *headlines, link = found["`make experiments ONLY=event-tables`"]
    shown = [many.pairs[int(verdict.split()[1])] for verdict in headlines]
    assert set(shown) == set(many.headline) and len(shown) == 4
    assert link == "[all 18 comparisons](../tests/benchmarks/results/event-tables.md)"


def test_an_experiment_of_one_arm_shows_its_mean(tmp_path: Path) -> None:
    experiments = all_experiments()
    content = {"measure": "success", "comparisons": {"success": []}, "missing": {}}
    content["values"] = {"success": {"the file": {"390": 0.5, "391": 0.7}}}
    (tmp_path / "half-field-file.json").write_text(json.dumps(content))
    (found,) = (row[2] for row in rows(experiments, tmp_path) if "ONLY=half-field-file`" in row[3])
    assert found.startswith("success:<br>the file 0.60 [")


def test_the_length_of_a_run_is_that_of_the_settings() -> None:
    experiments = all_experiments()
    settings = experiments["locks"].settings | {"updates": 1_234}
    changed = experiments | {"locks": dataclasses.replace(experiments["locks"], settings=settings)}
    task = next(row[1] for row in rows(changed, RESULTS) if "ONLY=locks`" in row[3])
    assert task.endswith("; 1234 updates of 16 episodes, seeds 200 to 207")
    lengths = {name: experiment.run_length for name, experiment in experiments.items()}
    assert lengths["nmer-short"] == "8,000 steps" and lengths["event-tables-file"] == "20,000 steps"


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
    page.write_text(f"before\n{BEGIN}rows of earlier results\n{END}after\n")
    write_table(all_experiments(), RESULTS, page)
    assert page.read_text() == f"before\n{BEGIN}\n{table(all_experiments(), RESULTS)}\n\n{END}after\n"
