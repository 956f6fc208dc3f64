# SPDX-License-Identifier: Apache-2.0
"""Curricula of several seeds in one process: stored rows, signals, schedules, and runs that go on after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lightning_replay.agents import MPDQN
from lightning_replay.options import config_directory
from lightning_replay.schedulers import EasyToHard, Exp3, OneTask, ReverseCurriculum, UniformTasks
from tests.benchmarks.learning.experiments.half_field import EXP3
from tests.benchmarks.learning.experiments.half_field import EXPERIMENTS as HALF_FIELD
from tests.benchmarks.learning.learners.curriculum_learning import TASKS, CurriculumRuns, learn, scheduler_of
from tests.benchmarks.learning.recorder import OutOfTimeError, Recorder

SETTINGS: dict[str, Any] = {
    "scheduler": "exp3",
    "updates": 80,
    "updates_per_round": 2,
    "updates_per_draw": 4,
    "fields": 6,
    "frame_skip": 16,
    "batch_size": 8,
    "capacity_per_task": 200,
    "n_steps": 2,
    "discount": 0.9,
    "time_outs_terminate": True,
    "warmup_rounds": 30,
    "rounds_per_extend": 5,
    "scheduler_exploration": 0.2,
    "advance_at": 0.8,
    "max_signals": None,
    "updates_per_signal": 8,
    "updates_per_test": 20,
    "test_episodes": 3,
    "hidden_sizes": [8],
    "value_learning_rate": 1e-3,
    "parameter_learning_rate": 1e-3,
    "learning_rate_end": 0.1,
    "target_update_rate": 0.05,
    "gradient_clip": 1.0,
    "exploration_end": 0.1,
    "exploration_rounds": 50,
    "parameter_noise": 0.1,
}


def build(seeds: tuple[int, ...] = (3, 5), **options: Any) -> CurriculumRuns:
    return CurriculumRuns(SETTINGS | options, seeds)


def rows_of(runs: CurriculumRuns, run: int) -> torch.Tensor:
    """Returns everything that a run stored, as one table of numbers."""
    rows = runs.replays[run].storage[:]
    leaves = [leaf.reshape(len(rows), -1).double() for leaf in rows.values(include_nested=True, leaves_only=True)]
    return torch.cat(leaves, 1)


def assert_equal(ours: CurriculumRuns, theirs: CurriculumRuns) -> None:
    for run in range(len(ours.replays)):
        assert torch.equal(rows_of(ours, run), rows_of(theirs, run))
    for our, their in zip(ours.agent.parameters(), theirs.agent.parameters(), strict=True):
        assert torch.equal(our, their)
    assert np.array_equal(ours.probabilities(), theirs.probabilities())
    assert np.array_equal(ours.success(2), theirs.success(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "saved_at"),
    [
        ({"scheduler": "exp3"}, 20),
        ({"scheduler": "exp3"}, 52),
        ({"scheduler": "reverse curriculum"}, 52),
        ({"scheduler": "exp3", "actors": "easy to hard"}, 52),
    ],
)
def test_runs_go_on_from_a_save_as_if_they_had_not_stopped(
    options: dict[str, str], saved_at: int, tmp_path: Path
) -> None:
    whole = build(**options, max_signals=5)
    whole.play(saved_at)
    whole.save(tmp_path)
    whole.play(80)
    resumed = build(**options, max_signals=5)
    resumed.load(tmp_path)
    assert resumed.updates == saved_at
    resumed.play(80)
    assert_equal(resumed, whole)
    assert len(set(whole.probabilities()[0].tolist())) > 1  # signals changed the schedule


@pytest.mark.slow
def test_a_killed_unit_records_what_an_uninterrupted_one_records(tmp_path: Path) -> None:
    whole, killed = Recorder((3, 5)), Recorder((3, 5), tmp_path / "unit", deadline=0.0)
    learn(SETTINGS, (3, 5), whole)
    for _ in range(3):
        with pytest.raises(OutOfTimeError):
            learn(SETTINGS, (3, 5), killed)
        killed = Recorder((3, 5), tmp_path / "unit", deadline=0.0)
    resumed = Recorder((3, 5), tmp_path / "unit")
    learn(SETTINGS, (3, 5), resumed)
    assert whole.content["steps"] == [20, 40, 60, 80]
    assert {**whole.content, "seconds": 0} == {**resumed.content, "seconds": 0}


def test_a_run_is_the_same_beside_others() -> None:
    both, alone = build((3, 5)), build((5,))
    both.play(20)
    alone.play(20)
    torch.testing.assert_close(rows_of(both, 1), rows_of(alone, 0), atol=1e-3, rtol=1e-3)
    for together, single in zip(both.agent.parameters(), alone.agent.parameters(), strict=True):
        torch.testing.assert_close(together[1], single[0], atol=1e-4, rtol=1e-3)
    assert not torch.equal(rows_of(both, 0), rows_of(both, 1))


def test_rows_hold_whole_episodes_of_their_tasks() -> None:
    runs = build((3,), capacity_per_task=2_000)
    runs.play(40)
    rows = runs.replays[0].storage[:]
    assert len(rows) == (30 + 20) * 6
    lengths = []
    for trajectory in rows["trajectory"].unique():
        episode = rows[rows["trajectory"] == trajectory]
        assert len(episode["task"].unique()) == 1
        assert torch.equal(episode["next", "observation"][:-1], episode["observation"][1:])
        assert not episode["next", "done"][:-1].any()
        lengths.append(len(episode) if episode["next", "done"][-1] else 0)
    assert max(lengths) <= 13  # 200 cycles of 16 a step
    assert not rows["next", "truncated"].any() and rows["next", "terminated"].any()
    assert rows["task"].unique().tolist() == [0, 1, 2, 3]


def test_time_outs_are_truncations_where_they_do_not_terminate() -> None:
    runs = build((3,), time_outs_terminate=False)
    runs.play(40)
    rows = runs.replays[0].storage[:]["next"]
    assert rows["truncated"].any() and not (rows["truncated"] & rows["terminated"]).any()
    assert torch.equal(rows["done"], rows["truncated"] | rows["terminated"])


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, 40])
def test_signals_are_mean_returns_and_reach_the_scheduler_at_their_rate(every: int) -> None:
    runs = build((3,), updates_per_signal=every)
    sent: dict[tuple[int, str], float] = {}
    ended: dict[tuple[int, str], float] = {}
    progress, returns = runs._progress[0], {task: [] for task in range(4)}
    episode = progress.episode

    def keep_episode(task: int, paid: float) -> float | None:
        returns[task].append(paid)
        synchronisation = every * max(1, -(-runs.updates // every))
        ended[synchronisation, TASKS[task]] = np.mean(returns[task][-100:]) / 5.0
        return episode(task, paid)

    progress.episode = keep_episode  # type: ignore[method-assign]
    runs.replays[0].progress = lambda task, value: sent.update({(runs.updates, task): value})  # type: ignore
    runs.play(80)
    assert sent == pytest.approx(ended)  # of tasks without a new episode nothing is sent
    assert len(sent) < 4 * 80 // 4 and {task for _, task in sent} == set(TASKS) and any(sent.values())


def test_each_draw_is_dealt_to_its_updates() -> None:
    runs = build((3, 5))
    runs.play(4)
    given, drawn = [], []
    learn_from = runs.agent.learn
    runs.agent.learn = lambda batch: given.append(batch) or learn_from(batch)  # type: ignore
    for replay in runs.replays:
        sample = replay.sample

        def keep(sample=sample):
            drawn.append(sample())
            return drawn[-1]

        replay.sample = keep  # type: ignore[method-assign]
    runs.play(8)
    assert [batch.shape for batch in given] == [(2, 8)] * 4 and len(drawn) == 2
    for run in range(2):
        observation = torch.cat([batch["observation"][run] for batch in given])
        assert torch.equal(observation, drawn[run]["observation"])
        assert len(drawn[run]["task"].unique()) == 1


def test_learning_rates_fall_linearly_to_their_end() -> None:
    runs = build((3,))
    factors: list[float] = []
    runs.agent.scale_learning_rates = factors.append  # type: ignore[method-assign]
    runs.play(80)
    np.testing.assert_allclose(factors, np.linspace(1.0, 0.1, 21)[1:])


def test_exploration_ends_at_its_share() -> None:
    runs = build((3,), exploration_rounds=1, fields=4_000, exploration_end=0.25, parameter_noise=0.0)
    discrete, parameters = runs._greedy(runs._field.observation)
    runs._rounds_played = 10
    explored, noisy = runs._explored(discrete.copy(), parameters.copy())
    is_random = (noisy != parameters).any(1)
    assert is_random.mean() == pytest.approx(0.25, abs=0.03)
    assert np.array_equal(explored[~is_random], discrete[~is_random])
    assert np.bincount(explored[is_random], minlength=3).min() > 250


def test_arms_have_the_schedulers_of_the_library() -> None:
    made = {name: scheduler_of(SETTINGS | {"scheduler": name, "max_signals": 7}) for name in KINDS}
    assert {name: type(scheduler) for name, scheduler in made.items()} == KINDS
    assert made["one task"].task == "target" and made["exp3"].exploration == 0.2
    for name in ("easy to hard", "reverse curriculum"):
        assert made[name].order == ("goal_mouth", "near", "far", "target")
        assert (made[name].advance_at, made[name].max_signals) == (0.8, 7)


KINDS = {
    "one task": OneTask,
    "uniform": UniformTasks,
    "exp3": Exp3,
    "easy to hard": EasyToHard,
    "reverse curriculum": ReverseCurriculum,
}


def test_batches_and_actors_of_two_schedulers() -> None:
    both = scheduler_of({**SETTINGS, "scheduler": "exp3", "actors": "easy to hard", "max_signals": None})
    exp3, easy = scheduler_of(SETTINGS), scheduler_of({**SETTINGS, "scheduler": "easy to hard"})
    ready = np.ones(len(TASKS), bool)
    for scheduler in (both, exp3, easy):
        scheduler.start(TASKS)
        for task, value in ((3, 1.0), (3, 0.9), (2, 0.3)):
            scheduler.drawn(task, 0.25)
            scheduler.progress(task, value)
    assert np.array_equal(both.probabilities(ready), exp3.probabilities(ready))
    assert both.actor_tasks(8) == easy.actor_tasks(8)
    assert np.ptp(exp3.probabilities(ready)) > 0
    assert easy.actor_tasks(8) != exp3.actor_tasks(8)


def test_updates_and_draws_must_fit() -> None:
    with pytest.raises(ValueError, match="updates_per_signal is 6 and updates_per_draw 4"):
        build(updates_per_signal=6)


def test_the_shipped_file_has_the_settings_of_the_experiment() -> None:
    """But for signals and shared draws; see docs/curriculum.md."""
    file = yaml.safe_load((config_directory() / "lightning/dpcer_mpdqn_half_field.yaml").read_text())
    settings = HALF_FIELD[0].settings_of(EXP3)
    agent, data = file["model"]["init_args"], file["data"]["init_args"]
    replay = data["replay"]["init_args"]
    (decay,) = (each for each in file["trainer"]["callbacks"] if each["class_path"].endswith("LinearLearningRate"))
    fields = settings["fields"]
    assert data["env_kwargs"] == {name: settings[name] for name in ("frame_skip", "time_outs_terminate")}
    assert replay["scheduler"]["class_path"].endswith("Exp3") and settings["scheduler"] == "exp3"
    assert decay["init_args"]["end"] == settings["learning_rate_end"]
    stated = {
        "updates": round((data["env_steps"] - data["warmup_steps"]) * data["updates_per_env_step"]),
        "updates_per_round": pytest.approx(data["updates_per_env_step"] * fields, rel=1e-5),
        "fields": data["num_envs"],
        "warmup_rounds": data["warmup_steps"] / fields,
        "exploration_rounds": agent["exploration_steps"] / fields,
        "parameter_noise": agent["exploration_noise"],
        "scheduler_exploration": replay["scheduler"]["init_args"]["exploration"],
        **{name: replay[name] for name in ("batch_size", "capacity_per_task", "n_steps", "discount")},
        **{name: agent[name] for name in ("value_learning_rate", "parameter_learning_rate", "target_update_rate")},
        "hidden_sizes": agent["hidden_sizes"],
        "exploration_end": agent["exploration_end"],
        "gradient_clip": MPDQN(2, [0, 1], **agent).hparams["gradient_clip"],
    }
    assert stated == {name: settings[name] for name in stated}
    assert agent["discount"] == settings["discount"] and replay["tasks"] == list(TASKS)
