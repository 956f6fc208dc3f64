# SPDX-License-Identifier: Apache-2.0
"""The command that runs learning experiments: names and numbers that are wrong, interruptions, what it reports."""

from __future__ import annotations

import argparse
import dataclasses
import json
import runpy
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.benchmarks.learning import runner
from tests.benchmarks.learning.command import chosen, parser_of, worker_options
from tests.benchmarks.learning.runner import main
from tests.benchmarks.learning.units import UsageError
from tests.unit.benchmarks.test_learning_runner import CALLS, EXPERIMENT, fresh, ordinary_priority, start

__all__ = ["fresh", "ordinary_priority"]  # fixtures


def test_unknown_names_are_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"no experiment is named 'run'; choose from 'walk'; \* stands for"):
        start(tmp_path, "--only", "run")
    with pytest.raises(UsageError, match="no experiment is named 'wlak', did you mean 'walk'"):
        start(tmp_path, "--only", "wlak")
    with pytest.raises(UsageError, match="no arm of walk is named 'slip'; choose from 'no drift', 'drift'"):
        start(tmp_path, "--arms", "slip")


def test_a_beginning_stands_for_all_names_of_it_unless_it_is_one() -> None:
    names = ["rooms", "nmer-short", "rooms-2", "nmer-15k", "nmerx"]
    assert chosen(names, ["nmer"], "experiment") == ["nmer-short", "nmer-15k"]
    assert chosen(names, ["rooms"], "experiment") == ["rooms"]
    assert chosen(names, ["rooms-2", "*15k"], "experiment") == ["rooms-2", "nmer-15k"]
    with pytest.raises(UsageError, match="no experiment is named 'nme'"):
        chosen(names, ["nme"], "experiment")


def test_arms_of_all_experiments_are_looked_up_before_the_first_is_run(tmp_path) -> None:
    other = dataclasses.replace(EXPERIMENT, name="other", arms={"a": {"drift": 0.0}}, panels=())
    options = ["--arms", "drift", "--state", str(tmp_path / "state"), "--results", str(tmp_path / "results")]
    with pytest.raises(UsageError, match="no arm of other is named 'drift'"):
        main(parser_of(argparse.ArgumentParser()).parse_args(options), {"walk": EXPERIMENT, "other": other})
    assert not CALLS


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seeds", "-1"], "--seeds: '-1' is not accepted; give a whole number of at least 1"),
        (["--seeds", "0"], "--seeds: '0' is not accepted"),
        (["--processes", "0"], "--processes: '0' is not accepted"),
        (["--budget-minutes", "-1"], "--budget-minutes: '-1' is not accepted; give a number of minutes, 0 or more"),
        (["--budget-minutes", "soon"], "--budget-minutes: 'soon' is not accepted"),
        (["--state", __file__], "is a file; give a folder"),
        (["--results", __file__], "is a file; give a folder"),
    ],
)
def test_wrong_values_of_options_are_refused(flags, message, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        start(tmp_path, *flags)
    assert message in capsys.readouterr().err and not CALLS


def test_a_wrong_name_ends_the_command_without_a_traceback(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["learning", "--only", "lokcs", "--list"])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # of this process, which runs other tests too
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tests.benchmarks.learning", run_name="__main__")
    assert ended.value.code == 2 and "error: no experiment is named 'lokcs', did you mean" in capsys.readouterr().err


def test_processes_get_the_options_of_the_command_and_what_is_left_of_its_budget() -> None:
    parser = parser_of(argparse.ArgumentParser())
    options = parser.parse_args(["--processes", "2", "--seeds", "3", "--pilot", "--arms", "dr*", "no*"])
    for deadline, left in ((time.time() - 1, 0.0), (float("inf"), float("inf"))):
        parsed = parser.parse_args(worker_options(EXPERIMENT, options, deadline))
        assert parsed.budget_minutes == left and parsed.only == ["walk"] and parsed.worker
        assert (parsed.seeds, parsed.pilot, parsed.arms) == (3, True, ["dr*", "no*"])


def test_arms_with_all_seeds_have_a_verdict_while_other_arms_are_unfinished(tmp_path) -> None:
    arms = {**EXPERIMENT.arms, "back": {"drift": -1.0}, "far": {"drift": 2.0}}
    more = dataclasses.replace(EXPERIMENT, seeds=range(8), arms=arms)
    start(tmp_path, "--arms", "no drift", "drift", experiment=more)
    start(tmp_path, "--arms", "back", "--seeds", "6", "--partial", experiment=more)
    drift, back = json.loads((tmp_path / "results" / "walk.json").read_text())["verdicts"]
    assert drift.startswith("drift is better than no drift") and drift.endswith("8 of 8 seeds")
    assert back.startswith("no verdict yet, back with no drift") and back.endswith("6 seeds")
    page = (tmp_path / "results" / "walk.md").read_text()
    assert "back: 6 to 7; far: 0 to 7" in page


def test_what_is_begun_anew_takes_no_units_of_results_in_later_commands_either(tmp_path) -> None:
    start(tmp_path, "--seeds", "2", "--partial")
    assert start(tmp_path, "--restart", "--budget-minutes", "0") == 1
    assert len(CALLS) == 2
    start(tmp_path)
    assert len(CALLS) == 2 + 4


def test_the_list_names_what_is_finished_and_written(tmp_path, capsys) -> None:
    start(tmp_path, "--seeds", "2", "--partial")
    capsys.readouterr()
    start(tmp_path, "--list")
    assert capsys.readouterr().out == "walk: 2 of 4 units finished, unfinished results are written\n"
    start(tmp_path)
    shutil.rmtree(tmp_path / "state")
    capsys.readouterr()
    start(tmp_path, "--list")
    assert capsys.readouterr().out == "walk: 0 of 4 units finished, results are written\n"


def test_an_error_ends_the_processes_that_were_started(tmp_path, monkeypatch) -> None:
    started: list[subprocess.Popen] = []

    def start_worker(*_: object) -> list[subprocess.Popen]:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]))
        return started

    monkeypatch.setattr(runner, "start_workers", start_worker)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "carry_out_all", fail)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    assert started[0].poll() == -signal.SIGTERM


def test_an_experiment_without_a_place_in_the_table_is_refused_before_it_is_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runner, "write_lists", lambda *_: None)  # would change the page
    with pytest.raises(ValueError, match="place in METHODS of tests/benchmarks/learning/evidence.py"):
        start(tmp_path)
    assert not CALLS
    assert start(tmp_path, "--pilot") == 0
