# SPDX-License-Identifier: Apache-2.0
"""Lunar lander of the experiment: events where the pad is, updates with rows of all tables, runs that are resumed."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SWIG's types lack an attribute; as an error this would end the interpreter
    import Box2D  # noqa: F401

from tests.benchmarks.learning.learners.lander import CONDITIONS, ENV, LanderRuns, replay_of
from tests.benchmarks.learning.learners.stacked_runs import StackedRuns
from tests.benchmarks.learning.learners.stacked_sac import StackedSAC

EVENTS = {"replay": "event tables", "events": list(CONDITIONS), "history_length": 20, "table_capacity": 200}
SETTINGS: dict[str, Any] = EVENTS | {"capacity": 2_000, "batch_size": 8, "steps_per_draw": 4, "default_share": 0.5}
PRIORITIZED = SETTINGS | {"replay": "prioritized", "priority_exponent": 0.6, "importance_exponent": 0.4}
WARMUP = 200


def build(seeds: tuple[int, ...] = (3, 5), settings: dict[str, Any] = SETTINGS) -> LanderRuns:
    return LanderRuns(StackedSAC(8, 2, seeds, (8,)), [replay_of(settings, seed) for seed in seeds], seeds, WARMUP, 4)


def landing(count: int) -> TensorDict:
    """Steps of an episode that stands in the middle of the pad all the time."""
    observation = torch.tensor([0.0] * 6 + [1.0] * 2).repeat(count, 1)
    done = torch.arange(count).unsqueeze(1) == count - 1
    ends = {"terminated": done, "truncated": torch.zeros_like(done), "done": done}
    following = {"observation": observation, "reward": torch.zeros(count, 1)} | ends
    columns = {"observation": observation, "action": torch.zeros(count, 2), "trajectory": torch.full((count,), 9_999)}
    return TensorDict(columns | {"next": following}, [count])


def test_both_legs_count_between_the_flags() -> None:
    env = gymnasium.make(ENV).unwrapped
    env.reset(seed=0)
    width = 600 / 30  # of the viewport, in the units of the world
    flags = [(x - width / 2) / (width / 2) for x in (env.helipad_x1, env.helipad_x2)]
    assert flags == pytest.approx([-0.2, 0.2])
    places = [(0.15, 0.0, 1, 1), (-0.19, 0.0, 1, 1), (0.21, 0.0, 1, 1), (0.15, 0.0, 1, 0), (0.0, 0.09, 0, 0)]
    places += [(0.0, 0.11, 0, 0), (0.11, 0.0, 0, 0), (-0.09, -0.05, 0, 1), (-0.21, 0.0, 1, 1), (-0.11, 0.0, 0, 0)]
    observation = torch.tensor([[x, y, 0.0, 0.0, 0.0, 0.0, *legs] for x, y, *legs in places])
    steps = TensorDict({"next": {"observation": observation}}, [len(places)])
    found = {name: condition(steps).tolist() for name, condition in CONDITIONS.items()}
    assert found == {
        "both legs down": [True, True, False, False, False, False, False, False, False, False],
        "near the centre": [False, False, False, False, True, False, False, True, False, False],
    }


def test_every_update_has_the_same_share_of_every_table() -> None:
    runs = build((3,))
    runs.replays[0].extend(landing(30))
    batches: list[TensorDict] = []
    drawn: list[torch.Tensor] = []
    learn, sample = runs.agent.learn, runs.replays[0].sample

    def learn_and_keep(batch: TensorDict) -> torch.Tensor:
        batches.append(batch)
        return learn(batch)

    def mark_and_keep() -> TensorDict:
        batch = sample()
        drawn.append(batch["table"])
        batch["priority_weight"] = 1.0 + batch["table"]  # any learned column would do
        return batch

    runs.agent.learn, runs.replays[0].sample = learn_and_keep, mark_and_keep
    runs.play(WARMUP + 40)
    assert len(batches) == 10 and all(table.bincount().tolist() == [16, 8, 8] for table in drawn)
    for batch in batches:
        counts = torch.stack([(batch["priority_weight"][0] == 1.0 + name).sum(-1) for name in range(3)])  # [3, U]
        assert batch.shape == (1, 4, 8) and counts.tolist() == [[4] * 4, [2] * 4, [2] * 4]


def test_td_errors_return_to_the_rows_they_are_of() -> None:
    runs = build(settings=PRIORITIZED)
    given: list[tuple[TensorDict, torch.Tensor]] = []
    replay = runs.replays[1]
    update = replay.update_priority

    def update_and_keep(batch: TensorDict, td_error: torch.Tensor) -> None:
        given.append((batch, td_error))
        update(batch, td_error)

    replay.update_priority = update_and_keep
    runs.agent.learn = lambda batch: batch["next", "reward"].squeeze(-1).abs()
    runs.play(WARMUP + 8)
    assert len(given) == 2
    for batch, td_error in given:
        assert torch.equal(td_error, batch["next", "reward"].squeeze(-1).abs()) and len(td_error) == 32


@pytest.mark.parametrize("limit", [30, 1_000])
def test_an_evaluation_is_that_of_other_environments(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = build()
    monkeypatch.setattr(gymnasium, "make", partial(gymnasium.make, max_episode_steps=limit))
    assert runs.evaluate(2, seed=7).tolist() == pytest.approx(StackedRuns.evaluate(runs, 2, seed=7).tolist())


def test_a_run_is_the_same_beside_others() -> None:
    both, alone = build((3, 5)), build((5,))
    for runs in (both, alone):
        runs.play(WARMUP + 40)
    rows, rows_alone = (runs.replays[-1].storage[:]["action"] for runs in (both, alone))
    torch.testing.assert_close(rows[: WARMUP + 40], rows_alone[: WARMUP + 40], atol=1e-4, rtol=1e-4)
    assert both.replays[0].stats()["tables"]["both legs down"] != both.replays[1].stats()["tables"]["both legs down"]


def test_runs_go_on_from_a_save_in_a_new_episode(tmp_path: Path) -> None:
    runs = build()
    runs.play(WARMUP + 40)
    runs.save(tmp_path)
    resumed = build()
    resumed.load(tmp_path)
    assert resumed.env_steps == WARMUP + 40
    resumed.play(WARMUP + 80)
    rows = resumed.replays[0].storage[:]
    assert len(resumed.replays[0]) == WARMUP + 80
    assert rows["trajectory"][WARMUP + 40] == rows["trajectory"][WARMUP + 39] + 1
    assert np.isfinite(resumed.evaluate(1, seed=7)).all()
