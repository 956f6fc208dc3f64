# SPDX-License-Identifier: Apache-2.0
"""The table of what configurations reach is that of the kept results, and so is the comment in each file."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from lightning_replay.options import config_directory
from tests.benchmarks.learning.command import RESULTS
from tests.benchmarks.learning.configurations import CONFIGURATIONS, figure, reached, table, with_comment
from tests.benchmarks.learning.evidence import BEGIN, END
from tests.benchmarks.learning.experiment import Experiment, hash_of, last_of
from tests.benchmarks.learning.experiments import shipped_files
from tests.benchmarks.learning.learners.shipped_files import evaluations, random_return, returns_in
from tests.benchmarks.learning.runner import all_experiments, record, runs_of

CARTPOLE = "lightning/per_dqn_cartpole.yaml"
RECALL = "lightning/recurrent_dqn_recall.yaml"
EXPERIMENTS = {each.name: each for each in shipped_files.EXPERIMENTS}


def test_the_page_and_the_files_have_what_the_kept_results_have() -> None:
    kept = CONFIGURATIONS.read_text().split(BEGIN)[1].split(END)[0].strip()
    assert kept == table(all_experiments(), RESULTS), "run `make experiments FLAGS=--redraw`"
    for each in reached(all_experiments(), RESULTS):
        text = (config_directory() / each.file).read_text()
        assert text == with_comment(text, each.comment) and len(each.comment) <= 120


def write(folder: Path, experiment: Experiment, *units: dict[str, Any]) -> None:
    (folder / f"{experiment.name}.json").write_text(json.dumps({"units": units}))


def unit(experiment: Experiment, seed: int, returns: list[float], **other: Any) -> dict[str, Any]:
    return {
        "arm": CARTPOLE,
        "seeds": [seed],
        "settings_hash": hash_of(experiment.settings | experiment.arms.get(CARTPOLE, {})),
        "steps": list(range(1, len(returns) + 1)),
        "curves": {"return": [[value] for value in returns]},
        "final": {"random_return": [-22.0]},
        "seconds": 120.0 + 60.0 * (seed % 2),
    } | other


def test_a_row_has_the_last_three_evaluations_of_the_present_file(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["files-lightning"]
    first, second = unit(experiment, 700, [900.0, 90.0, 90.0, 120.0]), unit(experiment, 701, [0.0, 200.0, 202.0, 198.0])
    write(tmp_path, experiment, first, second, unit(experiment, 702, [7.0], settings_hash="of another version"))
    (row,) = (each for each in reached(EXPERIMENTS, tmp_path) if each.file == CARTPOLE)
    assert row.row[1:] == ["30,000", "150 (100 to 200), seeds 700 to 701", "-22.0", "2.50"]
    assert (
        row.comment == "# Reached: return 150 (100 to 200) after 30,000 steps, seeds 700 to 701; random actions -22.0."
    )
    others = [each for each in reached(EXPERIMENTS, tmp_path) if each.file != CARTPOLE]
    assert {each.row[2] for each in others} == {"not run yet"}
    write(tmp_path, experiment, *(unit(experiment, seed, [90.0]) for seed in (700, 701, 702)))
    (row,) = (each for each in reached(EXPERIMENTS, tmp_path) if each.file == CARTPOLE)
    assert row.row[2] == "90.0 (90.0 to 90.0)"  # of the usual seeds
    (part,) = (each for each in others if each.file == shipped_files.MIXUP)
    assert part.steps == "25,000 of 200,000"


def test_a_file_with_an_experiment_of_its_own_has_the_measure_of_that(tmp_path: Path) -> None:
    goals = dataclasses.replace(
        EXPERIMENTS["files-lightning"],
        name="half-field-file",
        arms={"the file": {}},
        measure=last_of("success", 1, "success at the end"),
    )
    made = {"arm": "the file", "settings_hash": hash_of(goals.settings_of("the file")), "final": {}}
    runs = unit(goals, 5, [0.2]) | made | {"curves": {"success": [[0.9]]}}
    write(tmp_path, goals, runs)
    (found,) = (
        each for each in reached(EXPERIMENTS | {goals.name: goals}, tmp_path) if each.file == shipped_files.HALF_FIELD
    )
    assert found.row[2:] == ["success at the end: 0.90, seed 5", "", "3.00"]
    assert found.comment == f"# Reached: success at the end 0.90 after {found.steps} steps, seed 5."


def test_every_file_has_a_place() -> None:
    with pytest.raises(ValueError, match=r"apex_dqn_cartpole.yaml.*each file of configs has an arm"):
        reached({"files-lightning": EXPERIMENTS["files-lightning"]}, RESULTS)


def test_the_line_of_a_file_follows_its_command() -> None:
    before = "# command\n# paper\n# Reached: 3.\nmodel: 1  # Reached: no\n# more\n"
    after = "# command\n# Reached: 4.\n# paper\nmodel: 1  # Reached: no\n# more\n"
    assert with_comment(before, "# Reached: 4.") == with_comment(after, "# Reached: 4.") == after


def test_figures_have_three_digits() -> None:
    assert [figure(value) for value in (0.126, -9.994, 12.34, -1234.5)] == ["0.13", "-9.99", "12.3", "-1,234"]


def test_returns_of_rllib_are_those_that_its_command_prints() -> None:
    """As python -m rllib_ext prints them, with what Ray says in between, and interrupted once."""
    plain = """env_steps  updates   return   stored     drawn
     1000        1      nan     1000        64
     2000      501     21.5     2000     32064
(raylet) a worker died
env_steps  updates   return   stored     drawn
     2500      600     -3.0     2500     40000
checkpoint with the replay buffer: /runs
"""
    assert returns_in(plain) == {2000: 21.5, 2500: -3.0}
    levels = """env_steps  updates   return   levels  episodes held_out      gap
     4096        4      0.2       30        99
     8192        8      0.3       60       200     0.25     0.05
"""
    assert returns_in(levels) == {8192: 0.25}
    evaluated = """env_steps  updates   return   stored     drawn     eval
     4000        1      0.2     4000       256
     8000      251      0.3     8000     64256     0.50
"""
    assert returns_in(evaluated) == {8000: 0.5}


def test_random_actions_recall_half_of_the_cues() -> None:
    assert random_return(RECALL, seed=3, episodes=200) == pytest.approx(0.5, abs=0.14)  # four standard errors


@pytest.mark.slow
def test_a_run_records_the_evaluations_of_its_file_and_counts_the_seconds_before_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "seconds.txt").write_text("1000")
    out = record(EXPERIMENTS["files-lightning"], RECALL, (5,), is_fast=True, folder=tmp_path)
    (run,) = runs_of(out).values()
    assert run.steps == [330] and run.curves["return"][0] <= 1.0 and 1_000 < out.content["seconds"] < 2_000


@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_its_folder_left_it(tmp_path: Path) -> None:
    small = ["--data.init_args.warmup_steps=300", "--seed_everything=3", "--data.init_args.seed=3"]
    first = evaluations(RECALL, [*small, "--data.init_args.env_steps=500"], tmp_path)
    both = evaluations(RECALL, [*small, "--data.init_args.env_steps=1_000"], tmp_path)
    assert [step for step, _ in first] == [500] and [step for step, _ in both] == [500, 1_000]
    with open(tmp_path / "lightning_logs/version_1/metrics.csv") as file:
        assert [row["step"] for row in csv.DictReader(file) if row["eval/return"]] == [
            "1000"
        ]  # 500 was not played anew
    assert both[0] == first[0]


def test_a_refused_option_is_reported_in_the_words_of_the_command() -> None:
    with pytest.raises(ValueError, match=r"was refused.*env_stepz"):
        evaluations(RECALL, ["--data.init_args.env_stepz=3"])
