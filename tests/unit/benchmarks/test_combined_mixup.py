# SPDX-License-Identifier: Apache-2.0
"""Pucks and HalfCheetah with mixed rows of tables: the environment, the arms' buffers, rows dealt to updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_replay.replay import Replay
from lightning_replay.table_replay import CurriculumReplay, TableReplay
from tests.benchmarks.learning.experiments import combined_mixup_events, combined_pucks
from tests.benchmarks.learning.learners.puck import DISTANCES, GOAL_RADIUS, LIMIT, TASKS, PuckRuns, Pucks
from tests.benchmarks.learning.learners.stacked_runs import DealtRuns
from tests.benchmarks.learning.learners.stacked_td3 import StackedTD3
from tests.benchmarks.learning.recorder import Recorder

CURRICULA, EVENTS = combined_pucks.EXPERIMENTS
SHORT = {"rounds": 60, "rounds_per_point": 20, "warmup_rounds": 40, "hidden_sizes": [8], "min_size": 8}


def test_a_force_towards_the_goal_reaches_it_and_none_does_not() -> None:
    task, angle = np.arange(4).repeat(8), np.tile(np.arange(8) / 8, 4)
    pushed, left = Pucks(task, angle), Pucks(task, angle)
    np.testing.assert_allclose(np.linalg.norm(pushed.position, axis=-1), DISTANCES[task])
    np.testing.assert_allclose(pushed.position[1], 0.9 * np.sqrt([0.5, 0.5]))
    reached = np.zeros(32, dtype=bool)
    for step in range(1, LIMIT + 1):
        is_there, is_over = pushed.step(-0.3 * pushed.position / np.linalg.norm(pushed.position, axis=-1)[:, None])
        reached |= is_there
        assert np.array_equal(is_there, np.linalg.norm(pushed.position, axis=-1) < GOAL_RADIUS)
        nothing, over = left.step(np.zeros((32, 2)))
        assert not nothing.any() and over.all() == over.any() == (step == LIMIT)
        assert not (is_there & is_over).any()
    assert reached.all()


def test_speed_has_a_limit_and_ends_at_the_edge() -> None:
    puck = Pucks(np.array([0]), np.array([0.0]))
    seen = []
    for _ in range(20):
        puck.step(np.array([[0.0, 1.0]]))
        seen.append(puck.observation[0, 1::2].tolist())
    position, velocity = np.array(seen).T
    assert (np.diff(velocity[position < 1]) > 0).all() and velocity.max() < 1.0
    assert position.max() == 1.0 and (velocity[position == 1.0] == 0).all()


def runs_of(arm: str, seeds: tuple[int, ...], experiment=CURRICULA) -> PuckRuns:
    settings = experiment.settings_of(arm) | SHORT
    agent = StackedTD3(4, 2, seeds, hidden_sizes=(8,))
    return PuckRuns(agent, [combined_pucks.replay_of(settings, seed) for seed in seeds], seeds, settings)


@pytest.mark.slow
@pytest.mark.parametrize("arm", CURRICULA.arms)
def test_a_curriculum_plays_and_draws_every_task(arm: str) -> None:
    runs = runs_of(arm, (3,))
    for _ in range(48):
        runs.play_round()
    for replay in runs._replays:
        assert isinstance(replay, CurriculumReplay) and len(replay) == 192
        rows = replay.storage[:192]
        starts = torch.cat([rows["trajectory"].new_ones(4), rows["trajectory"][4:] - rows["trajectory"][:-4]]) > 0
        assert starts.sum() >= 8  # episodes of at most 40 of 48 steps
        distance = torch.from_numpy(DISTANCES)[rows["task"]].float()
        torch.testing.assert_close(rows["observation"][starts, :2].norm(dim=1), distance[starts])
        assert rows["task"].tolist() == ([0, 1, 2, 3] if arm.startswith("curriculum") else [0, 0, 0, 0]) * 48
        drawn = {tuple(replay.sample()["task"].unique().tolist()) for _ in range(40)}
        assert drawn == ({(0,), (1,), (2,), (3,)} if arm.startswith("curriculum") else {(0,)})
        pairs = replay.sample()["index"]
        assert pairs.ndim == (2 if arm.endswith("mixup") else 1)
        assert arm.endswith("mixup") == ("mixup_coefficient" in replay.sample())


def goals(replay: Replay) -> Replay:
    """Four pucks, the third of which reaches the goal at every eighth step."""
    seen = torch.rand(65, 4, 4)
    for step in range(64):
        done = torch.tensor([[False], [False], [step % 8 == 7], [False]])
        flags = {"terminated": done, "truncated": torch.zeros_like(done), "done": done}
        after = {"observation": seen[step + 1], "reward": done.float(), **flags}
        columns = {"observation": seen[step], "action": torch.rand(4, 2), "task": torch.full((4,), 2)}
        trajectory = torch.tensor([0, 1, 100 + step // 8, 3])
        replay.extend(TensorDict(columns | {"trajectory": trajectory, "next": after}, [4]))
    return replay


def test_updates_have_their_share_of_the_table(monkeypatch) -> None:
    for arm in ("event table", "both"):
        runs = runs_of(arm, (3,), EVENTS)
        replay = goals(runs._replays[0])
        assert isinstance(replay, TableReplay)
        drawn, sample = [], replay.sample

        def kept(drawn=drawn, sample=sample) -> TensorDict:
            drawn.append(sample())
            return drawn[-1]

        given = []
        monkeypatch.setattr(replay, "sample", kept)
        monkeypatch.setattr(runs._agent, "learn", given.append)
        runs._learn()
        is_event = drawn[0]["table"].bool()
        assert is_event.sum() == 128
        for number in range(4):
            assert torch.equal(given[0]["observation"][0, number], drawn[0]["observation"][number::4])
            assert is_event[number::4].sum() == 32


def test_dealt_runs_have_their_share_in_every_update() -> None:
    runs = DealtRuns.__new__(DealtRuns)
    runs._updates_per_draw = 5
    dealt = runs._dealt(TensorDict({"table": torch.arange(20) // 10}, [20]))["table"]
    assert dealt.tolist() == [[0, 0, 1, 1]] * 5


def test_the_arms_of_half_cheetah_draw_halves_and_pairs() -> None:
    experiment = combined_mixup_events.EXPERIMENTS[0]
    for arm in ("event table", "both"):
        settings = experiment.settings_of(arm) | {"table_min_size": 20}
        replay = combined_mixup_events.replay_of(settings, 0)
        for start in range(0, 4_000, 1_000):
            reward = torch.where(torch.arange(1_000) % 100 == 99, 1.3, 1.2).unsqueeze(1)
            flags = {name: torch.zeros(1_000, 1, dtype=torch.bool) for name in ("terminated", "truncated", "done")}
            seen = torch.rand(1_001, 17)
            after = {"observation": seen[1:], "reward": reward, **flags}
            columns = {"observation": seen[:-1], "action": torch.rand(1_000, 6)}
            trajectory = torch.full((1_000,), start)
            replay.extend(TensorDict(columns | {"trajectory": trajectory, "next": after}, [1_000]))
        assert replay.table("fast").shape == (800,)
        batch = replay.sample()
        assert batch["table"].bincount().tolist() == [1_000, 1_000]
        assert ("mixup_coefficient" in batch) == (arm == "both")


@pytest.mark.slow
@pytest.mark.parametrize("experiment", combined_pucks.EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_a_run_is_the_same_beside_others(experiment) -> None:
    settings = experiment.settings_of(list(experiment.arms)[-1]) | SHORT
    both, alone = Recorder((3, 5)), Recorder((5,))
    for out in (both, alone):
        combined_pucks.run(settings, out.seeds, out)
    assert sorted(alone.content["curves"]) == sorted(["every", *TASKS])
    for name, points in alone.content["curves"].items():
        assert [point[1] for point in both.content["curves"][name]] == pytest.approx([point[0] for point in points])
