# SPDX-License-Identifier: Apache-2.0
"""The runner of learning experiments: units are computed once, resumed, and refused if settings differ."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.learning.command import parser_of
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, final, last_of, mean_of
from tests.benchmarks.learning.recorder import OutOfTimeError, Recorder, seed_runs
from tests.benchmarks.learning.runner import main
from tests.benchmarks.learning.units import UsageError, carry_out_all, units_of

CALLS: list[tuple[str, tuple[int, ...]]] = []
FAILS_AT: list[int] = []  # a step at which the next run is interrupted


class Interruption(Exception):
    """Stands for a killed process."""


def random_walk(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """A walk for each seed whose steps are drawn from its own generator; the state is generators and places."""
    CALLS.append((settings["kind"], tuple(seeds)))
    generators = [np.random.default_rng(seed) for seed in seeds]
    place, first = np.zeros(len(seeds)), 1
    if out.resume_from is not None:
        kept = json.loads((out.resume_from / "walk.json").read_text())
        place, first = np.array(kept["place"]), kept["step"] + 1
        for generator, state in zip(generators, kept["states"], strict=True):
            generator.bit_generator.state = state

    def save(folder: Path) -> None:
        states = [generator.bit_generator.state for generator in generators]
        (folder / "walk.json").write_text(json.dumps({"place": place.tolist(), "step": step, "states": states}))

    for step in range(first, settings["steps"] + 1):
        if step in FAILS_AT:
            FAILS_AT.remove(step)
            raise Interruption
        place = place + [generator.normal() for generator in generators] + settings["drift"]
        out.record(step, place=place, negative=-place)
        out.checkpoint(save)
    out.final(steps=[settings["steps"]] * len(seeds))


EXPERIMENT = Experiment(
    name="walk",
    title="Random walks",
    claim="drift moves.",
    task="A walk.",
    length="{steps} steps",
    arms={"no drift": {"drift": 0.0}, "drift": {"drift": 1.0}},
    settings={"kind": "walk", "steps": 5},
    fast={"steps": 2},
    seeds=range(4),
    pilot_seeds=(10, 11),
    measure=last_of("place", 1, "place at the end"),
    also=(mean_of("negative", "negative place"), final("steps", "steps taken", digits=0)),
    panels=(Panel("place", "place"),),
    seeds_together=2,
    run=random_walk,
)


@pytest.fixture(autouse=True)
def fresh() -> None:
    CALLS.clear()
    FAILS_AT.clear()


@pytest.fixture(autouse=True)
def ordinary_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.nice", lambda more: 10)  # of this process, which runs other tests too


def start(folder: Path, *arguments: str, experiment: Experiment = EXPERIMENT) -> int:
    options = [*arguments, "--state", str(folder / "state"), "--results", str(folder / "results")]
    return main(parser_of(argparse.ArgumentParser()).parse_args(options), {experiment.name: experiment})


def curves(folder: Path) -> dict[str, dict]:
    units = units_of(EXPERIMENT, list(EXPERIMENT.seeds), list(EXPERIMENT.arms), folder)
    kept = [unit.results() for unit in units]
    return {f"{each['arm']} {each['seeds']}": [each[name] for name in ("steps", "curves", "final")] for each in kept}


def test_a_command_writes_numbers_page_and_picture_and_computes_a_unit_once(tmp_path, capsys) -> None:
    assert start(tmp_path) == 0
    # all arms of the first seeds, then of the next
    assert CALLS == [("walk", (0, 1))] * 2 + [("walk", (2, 3))] * 2
    content = json.loads((tmp_path / "results" / "walk.json").read_text())
    assert content["verdicts"] == [
        "drift is better than no drift: +5.000 [+5.000, +5.000], 4 of 4 seeds (few seeds: rely on it with care)"
    ]
    assert content["verdicts"][0] in (tmp_path / "results" / "walk.md").read_text()
    assert (tmp_path / "results" / "walk.png").stat().st_size > 1_000
    assert content["missing"] == {} and content["values"]["steps taken"] == {
        arm: {str(seed): 5.0 for seed in range(4)} for arm in EXPERIMENT.arms
    }
    assert content["versions"]["numpy"] == np.__version__ and content["command"].endswith("--only walk")
    assert start(tmp_path) == 0
    assert len(CALLS) == 4
    assert "written" in capsys.readouterr().out


def test_curves_are_those_of_the_seed() -> None:
    out = Recorder((3, 8))
    out.record(10, a=[1, 2])
    out.record(20, a=np.array([3.0, np.nan]))
    out.final(b=[5, 6])
    runs = seed_runs({"seeds": [3, 8], **out.content})
    assert runs[3].steps == [10, 20] and runs[3].curves["a"].tolist() == [1.0, 3.0] and runs[8].final == {"b": 6.0}
    assert np.isnan(runs[8].curves["a"][1])


def test_a_killed_unit_goes_on_and_ends_as_if_it_had_not_been_killed(tmp_path) -> None:
    units = units_of(EXPERIMENT, list(EXPERIMENT.seeds), list(EXPERIMENT.arms), tmp_path / "whole")
    carry_out_all(units, float("inf"))
    FAILS_AT.extend([2, 5])
    interrupted = units_of(EXPERIMENT, list(EXPERIMENT.seeds), list(EXPERIMENT.arms), tmp_path / "killed")
    for unit in interrupted:
        while not unit.is_finished:
            try:
                unit.carry_out(checkpoint_seconds=0.0)
            except Interruption:
                kept = list((unit.folder / "checkpoints").iterdir())
                assert len(kept) == 1, "only the newest checkpoint is kept"
                (unit.folder / "checkpoints" / "000099.part").mkdir()  # as a process leaves it that is killed in a save
    assert len(CALLS) == 4 + 4 + 2
    assert curves(tmp_path / "killed") == curves(tmp_path / "whole")
    assert not (interrupted[0].folder / "checkpoints").exists()


@pytest.mark.slow
def test_a_killed_process_goes_on(tmp_path) -> None:
    """The same through processes: one is killed in the middle of a unit, the next ends it."""
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.unit.benchmarks import test_learning_runner as t\n"
        "units = t.units_of(t.EXPERIMENT, [0, 1], ['drift'], Path(sys.argv[1]))\n"
        "append = t.Recorder.record\n"
        "def slow(out, step, **values):\n    append(out, step, **values)\n    print(step, flush=True)\n"
        "    time.sleep(60.0 if step == 4 else 0.0)\n"
        "t.Recorder.record = slow\n"
        "units[0].carry_out(checkpoint_seconds=0.0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline().strip() for _ in range(4)]
        process.kill()
    assert seen == ["1", "2", "3", "4"]
    (unit,) = units_of(EXPERIMENT, [0, 1], ["drift"], tmp_path)
    assert not unit.is_finished
    unit.carry_out()
    (whole,) = units_of(EXPERIMENT, [0, 1], ["drift"], tmp_path / "whole")
    whole.carry_out()
    assert unit.results()["curves"] == whole.results()["curves"] and unit.results()["steps"] == [1, 2, 3, 4, 5]


def test_a_spent_budget_ends_the_unit_at_its_next_checkpoint(tmp_path) -> None:
    units = units_of(EXPERIMENT, [0, 1], ["drift"], tmp_path)
    with pytest.raises(OutOfTimeError):
        units[0].carry_out(deadline=time.time())
    assert not units[0].is_finished and units[0].folder.joinpath("checkpoints", "000000").exists()
    units[0].carry_out()
    assert units[0].results()["steps"] == [1, 2, 3, 4, 5]
    assert start(tmp_path, "--budget-minutes", "0") == 1 and len(CALLS) == 2, "no further unit is begun"


def test_changed_settings_are_refused_until_the_kept_units_are_set_aside(tmp_path) -> None:
    start(tmp_path)
    changed = dataclasses.replace(EXPERIMENT, settings={"kind": "walk", "steps": 6})
    with pytest.raises(ValueError, match=r"walk, no drift: .* was begun with steps 5 \(now 6\).*--restart"):
        start(tmp_path, experiment=changed)
    arm = dataclasses.replace(EXPERIMENT, arms={**EXPERIMENT.arms, "drift": {"drift": 2.0}})
    with pytest.raises(ValueError, match=r"walk, drift: .* was begun with drift 1.0 \(now 2.0\)"):
        start(tmp_path, experiment=arm)
    assert len(CALLS) == 4
    assert start(tmp_path, "--restart", experiment=changed) == 0
    assert len(CALLS) == 8 and (tmp_path / "state" / "walk.old-1" / "drift").is_dir()


def test_more_seeds_and_arms_keep_what_is_finished(tmp_path) -> None:
    start(tmp_path)
    more = dataclasses.replace(EXPERIMENT, seeds=range(6), arms={**EXPERIMENT.arms, "back": {"drift": -1.0}})
    start(tmp_path, experiment=more)
    assert CALLS[4:] == [("walk", seeds) for seeds in ((0, 1), (2, 3), (4, 5), (4, 5), (4, 5))]


def test_unfinished_experiments_are_printed_and_written_only_when_asked_for(tmp_path, capsys) -> None:
    assert start(tmp_path, "--seeds", "2", "--arms", "dr*") == 1
    assert CALLS == [("walk", (0, 1))] and not (tmp_path / "results").exists()
    assert "Unfinished: no verdict on arms" in capsys.readouterr().out
    assert start(tmp_path, "--seeds", "2", "--partial") == 1
    page = (tmp_path / "results" / "walk.md").read_text()
    assert "no drift: 2 to 3; drift: 2 to 3" in page


def test_units_in_turn_advance_together_and_are_written_up_to_their_common_length(tmp_path, capsys) -> None:
    experiment = dataclasses.replace(EXPERIMENT, also=())
    FAILS_AT.append(3)
    with pytest.raises(Interruption):
        start(tmp_path, "--in-turn", experiment=experiment)
    assert [seeds for _, seeds in CALLS] == [(0, 1), (0, 1), (2, 3), (2, 3)] * 2 + [(0, 1)]
    state = tmp_path / "state"
    assert len(units_of(experiment, [2, 3], ["drift"], state / "walk")[0].recorded()["steps"]) == 2
    start(tmp_path, "--seeds", "2", "--arms", "drift", experiment=experiment)  # to its end
    assert start(tmp_path, "--cut", "--budget-minutes", "0", experiment=experiment) == 1
    kept = json.loads((tmp_path / "results" / "walk.json").read_text())
    assert kept["cut_at"] == 2 and not kept["missing"] and {tuple(unit["steps"]) for unit in kept["units"]} == {(1, 2)}
    assert "**Unfinished: 2 of 5 steps.**" in (tmp_path / "results" / "walk.md").read_text()
    capsys.readouterr()
    start(tmp_path, "--list", experiment=experiment)
    assert capsys.readouterr().out == "walk: 1 of 4 units finished, unfinished results are written\n"
    assert start(tmp_path, "--in-turn", experiment=experiment) == 0
    start(tmp_path / "whole", experiment=experiment)
    assert curves(state / "walk") == curves(tmp_path / "whole" / "state" / "walk")
    assert "cut_at" not in json.loads((tmp_path / "results" / "walk.json").read_text())


def test_a_unit_without_a_checkpoint_cannot_be_cut(tmp_path) -> None:
    with pytest.raises(
        UsageError, match="--cut needs a checkpoint of every unit; units of drift, no drift, drift have"
    ):
        start(tmp_path, "--cut", "--seeds", "2", "--arms", "no drift")


def test_another_machine_goes_on_from_the_results_of_an_unfinished_experiment(tmp_path) -> None:
    """The folder of units is lost, the results are not."""
    start(tmp_path, "--seeds", "2", "--arms", "drift", "--partial")
    shutil.rmtree(tmp_path / "state")
    assert start(tmp_path) == 0
    assert len(CALLS) == 4, "one unit is not computed again"
    shutil.rmtree(tmp_path / "state")
    start(tmp_path)
    assert len(CALLS) == 8, "complete results are computed again"


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "steps", "more"), [(["--restart"], 5, 4), (["--pilot"], 5, 2), ([], 6, 4)])
def test_units_of_results_are_taken_only_where_asked_for_and_with_their_settings(flags, steps, more, tmp_path) -> None:
    start(tmp_path, "--seeds", "2", "--partial")
    shutil.rmtree(tmp_path / "state")
    experiment = dataclasses.replace(EXPERIMENT, settings={"kind": "walk", "steps": steps})
    start(tmp_path, *flags, experiment=experiment)
    assert len(CALLS) == 2 + more


def test_pilots_are_kept_apart(tmp_path) -> None:
    assert start(tmp_path, "--pilot") == 0
    assert CALLS == [("walk", (10, 11))] * 2 and not (tmp_path / "results").exists()
    assert (tmp_path / "state" / "walk-pilot" / "walk.md").exists()


def test_a_unit_that_another_process_runs_is_left_to_it(tmp_path) -> None:
    (unit,) = units_of(EXPERIMENT, [0, 1], ["drift"], tmp_path)
    with unit.claim() as is_ours, unit.claim() as is_twice:
        assert is_ours and not is_twice
        carry_out_all([unit], float("inf"))
    assert not CALLS
    carry_out_all([unit], float("inf"))
    assert len(CALLS) == 1


def test_pages_are_drawn_anew_without_running(tmp_path) -> None:
    start(tmp_path)
    written = (tmp_path / "results" / "walk.json").read_text()
    (tmp_path / "results" / "walk.md").unlink()
    start(tmp_path, "--redraw", experiment=dataclasses.replace(EXPERIMENT, title="Walks"))
    assert len(CALLS) == 4 and (tmp_path / "results" / "walk.md").read_text().startswith("# Walks")
    assert json.loads((tmp_path / "results" / "walk.json").read_text())["units"] == json.loads(written)["units"]


def test_a_fast_command_keeps_nothing(tmp_path, capsys) -> None:
    start(tmp_path, "--fast")
    assert CALLS == [("walk", (0, 1))] * 2 and not list(tmp_path.iterdir())
    printed = capsys.readouterr().out
    assert "+2.000" in printed and 'Settings: `{"kind": "walk", "steps": 2}`' in printed


def test_wrong_records_are_refused() -> None:
    out = Recorder((0, 1))
    with pytest.raises(ValueError, match=r"place has the shape \[3\]; give one number for each of \(0, 1\)"):
        out.record(1, place=[1, 2, 3])
    out.record(1, place=[1, 2])
    with pytest.raises(ValueError, match="increasing order"):
        out.record(1, place=[1, 2])
    with pytest.raises(ValueError, match="same names"):
        out.record(2, height=[1, 2])


def test_measures_that_are_not_finite_are_refused(tmp_path) -> None:
    lost = dataclasses.replace(EXPERIMENT, measure=dataclasses.replace(EXPERIMENT.measure, of=lambda run: float("nan")))
    with pytest.raises(ValueError, match=r"walk, drift: 'place at the end' by seed is .*finite"):
        start(tmp_path, experiment=lost)
