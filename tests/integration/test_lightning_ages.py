# SPDX-License-Identifier: Apache-2.0
"""Draws by age in a Lightning run: ages are those of the rows, logs show them, and a resume draws the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_replay import Age, Replay, recipes
from lightning_replay.lit import LogReplayStats, ReplayDataModule
from lightning_replay.lit.cli import main
from lightning_replay.options import config_directory
from lightning_replay.schedules import Linear
from tests.unit.lit.stopped_runs import RUN, Agent, CloseAt, fit
from tests.unit.lit.test_callbacks import Memory
from tests.unit.lit.toys import Counting, make_trainer

pytestmark = pytest.mark.slow
STEPS, WARMUP = RUN["env_steps"], RUN["warmup_steps"]


class Versioned(Counting):
    """Each info has the version of a policy, which rises with every fifth step of all environments."""

    steps = 0

    def step(self, action: Any) -> Any:
        *found, info = super().step(action)
        Versioned.steps += 1
        return *found, info | {"policy": Versioned.steps // 5}


AGES: dict[str, Age] = {
    "rows": Age(half_life=8, floor=0.01),
    # It rises by half of a percent with an update, and the age follows in steps of one percent.
    "env_steps": Age(half_life=Linear(8.0, 12.0, duration=100, clock="updates"), floor=0.2, clock="env_steps"),
    "updates": Age(half_life=6, floor=0.3, max_age=25, clock="updates"),
    "versions": Age(half_life=2, version_key=("next", "policy")),
}


@pytest.fixture(autouse=True)
def first_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Versioned, "steps", 0)


def data_of(recipe: str, age: Age, env_steps: int = STEPS) -> ReplayDataModule:
    replay: Replay = getattr(recipes, recipe)(500, 4, age=age, seed=0)
    return ReplayDataModule(Versioned, replay, **(RUN | {"env_steps": env_steps, "info_keys": ("policy",)}))


def births(replay: Replay) -> list[float]:
    """The births that a save holds, oldest row first."""
    return replay.state_dict()["sampler"]["ages"]["births"][replay.oldest_first()].tolist()


@pytest.mark.parametrize("age", AGES)
@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_a_resumed_run_draws_the_rows_of_one_that_did_not_stop(tmp_path: Path, recipe: str, age: str) -> None:
    fit(tmp_path / "first", Agent(), data_of(recipe, AGES[age], env_steps=44))
    path = tmp_path / "first" / "run" / "last.ckpt"
    update = torch.load(path)["ReplayDataModule"]["updates"]
    resumed = fit(tmp_path / "again", agent := Agent(), data_of(recipe, AGES[age]), ckpt_path=path)
    Versioned.steps = 0
    unbroken = fit(tmp_path / "whole", whole := Agent(), data_of(recipe, AGES[age]), [CloseAt(update)])
    assert len(agent.seen) == STEPS - 44 and agent.seen == whole.seen[update:]
    assert torch.equal(agent.weight, whole.weight)
    one, other = resumed.datamodule.replay, unbroken.datamodule.replay
    assert births(one) == births(other)
    assert one.sampler.state_dict()["ages"]["half_life"] == other.sampler.state_dict()["ages"]["half_life"]


@pytest.mark.parametrize("age", AGES)
def test_the_ages_are_those_of_the_rows(tmp_path: Path, age: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are born at the reading before their write; the warm-up is written in parts of six rows here."""
    monkeypatch.setattr("lightning_replay.lit.collection.Collection.rows_per_write", 6)
    data = data_of("prioritized", AGES[age])
    fit(tmp_path, Agent(), data)
    expected = {
        "rows": list(range(STEPS)),
        # Then two steps for each two updates.
        "env_steps": [0] * 6 + [6] * 6 + [12] * 6 + [18] * 4 + [step for step in range(22, STEPS, 2) for _ in "ab"],
        "updates": [0] * 22 + [1] * 2 + [update for update in range(3, STEPS - WARMUP - 1, 2) for _ in "ab"],
        "versions": data.replay[:]["next", "policy"].flatten().tolist(),
    }
    assert births(data.replay) == expected[age]
    assert len(set(expected[age])) > 10


def test_logs_show_the_ages_that_are_drawn(tmp_path: Path) -> None:
    figures: dict[str, dict[str, float]] = {}
    for name, age in (("uniform", None), ("aged", Age(max_age=5))):
        replay = recipes.prioritized(500, 4, age=age, seed=0)
        data = ReplayDataModule(Counting, replay, **(RUN | {"env_steps": 140, "warmup_steps": 100}))
        logger = Memory()
        trainer = make_trainer(tmp_path, [LogReplayStats(every_n_updates=1)], logger=logger)
        trainer.fit(agent := Agent(), datamodule=data)
        logged = [record for _, record in logger.records if "replay/drawn_age_mean" in record]
        assert len(logged) == len(agent.seen) == 40
        # A slot is the number of its row, because the buffer does not wrap.
        newest = [int(record["replay/size"]) - 1 for record in logged]
        ages = [[last - slot for slot in slots] for last, slots in zip(newest, agent.seen, strict=True)]
        assert [record["replay/drawn_age_mean"] for record in logged] == [sum(one) / 4 for one in ages]
        assert [record["replay/drawn_age_max"] for record in logged] == [max(one) for one in ages]
        figures[name] = {key: logged[-1][f"replay/{key}"] for key in ("drawn_age_max", "effective_sample_size")}
    assert figures["aged"]["drawn_age_max"] <= 5 and figures["uniform"]["drawn_age_max"] > 5
    assert figures["aged"]["effective_sample_size"] <= 6 < figures["uniform"]["effective_sample_size"]


FADING = {"start": 20.0, "end": 200.0, "duration": 40, "clock": "updates"}


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's use of jsonargparse
def test_a_file_gives_an_age_with_a_schedule_and_goes_on(tmp_path: Path) -> None:
    config = yaml.safe_load((config_directory() / "lightning/per_dqn_cartpole.yaml").read_text())
    schedule = {"class_path": "lightning_replay.schedules.Linear", "init_args": FADING}
    config["data"]["init_args"] |= {"warmup_steps": 100, "updates_per_env_step": 1}
    config["data"]["init_args"]["replay"] = {
        "class_path": "lightning_replay.recipes.uniform",
        "init_args": {"capacity": 500, "batch_size": 16, "age": {"half_life": schedule, "clock": "env_steps"}},
    }
    config["trainer"] = {"accelerator": "cpu", "callbacks": [{"class_path": "ReplayCheckpoint"}]}
    Path("aged.yaml").write_text(yaml.safe_dump(config))
    runs = tmp_path / "lightning_logs"
    halves = []
    for number, env_steps in enumerate((120, 130)):
        last = ["--ckpt_path=last"] if number else []
        main(["fit", "-c=aged.yaml", f"--data.init_args.env_steps={env_steps}", *last])
        (saved,) = (runs / f"version_{number}" / "checkpoints").glob("last.*.replay")
        replay = recipes.uniform(500, 16, age=Age(half_life=Linear(**FADING), clock="env_steps"))
        replay.load(saved)
        halves.append(replay.sampler.state_dict()["ages"]["half_life"])
        assert births(replay) == [0.0] * 101 + [float(step) for step in range(101, env_steps)]
    # The last update is the one before the number of updates; the half-life moves in steps of 1 %.
    assert halves == pytest.approx([20 + 19 * 4.5, 20 + 29 * 4.5], rel=0.01)
