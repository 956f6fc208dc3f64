# SPDX-License-Identifier: Apache-2.0
"""Learners of combined methods: rows are dealt to updates as stated, and feedback returns to the rows it is of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_replay.envs.grids import ThreeRooms
from lightning_replay.levels import LevelBuffer, scores
from lightning_replay.table_replay import TableReplay
from lightning_replay.writers import RetentionWriter
from tests.benchmarks.learning.experiments import combined_events_retention, combined_levels_priorities
from tests.benchmarks.learning.learners import lock_dqn
from tests.benchmarks.learning.learners.combination_lock import LEVELS, NUM_ACTIONS, CombinationLocks
from tests.benchmarks.learning.learners.retained_walks import RetainedWalks, SideBySide, measure_surprise
from tests.benchmarks.learning.learners.room_walks import agent_of
from tests.benchmarks.learning.learners.stacked_dqn import StackedDQN
from tests.benchmarks.learning.learners.three_rooms import STATE_OF_ONE_HOT, Table
from tests.benchmarks.learning.recorder import Recorder

pytestmark = pytest.mark.filterwarnings("ignore:the condition of event table 'goal'")  # reached once in 1,000 steps
ROOMS = combined_events_retention.EXPERIMENTS[0]
LOCKS = combined_levels_priorities.EXPERIMENTS[0]


def side_by_side(arm: str, seed: int, table: Table) -> SideBySide:
    pair = combined_events_retention.replay_of(ROOMS.settings_of(arm), seed)
    for replay in pair.replays:
        if isinstance(replay.writer, RetentionWriter):
            replay.writer.initial_surprise = lambda rows: rows["next", "reward"].flatten()
    for steps in table.walk_to_goal(seed, 1_000).split(200):
        pair.extend(steps)
    return pair


def states_of(rows: TensorDict) -> torch.Tensor:
    return rows["observation"] @ STATE_OF_ONE_HOT


@pytest.mark.slow
def test_the_arms_hold_as_many_rows() -> None:
    """The walk to the goal gives the table its 200 steps; a second goal would fill it."""
    expected = {"uniform": [500], "event table": [250, 200], "retention": [500], "both": [250, 1, 200]}
    table = Table.of(ThreeRooms())
    for arm in ROOMS.arms:
        pair, held = side_by_side(arm, 1, table), []
        for replay in pair.replays:
            held += replay.tables.length.tolist() if isinstance(replay, TableReplay) else [len(replay)]
        assert held == expected[arm]
        batches = pair.sample()
        assert sum(len(batch) for batch in batches) == 64
        if arm in ("event table", "both"):
            assert batches[-1]["table"].sum() == 32


def test_an_update_has_rows_of_both_buffers_and_td_errors_return_to_their_rows(monkeypatch) -> None:
    table, settings = Table.of(ThreeRooms()), ROOMS.settings_of("both")
    agent, pair = agent_of(settings, (1,)), side_by_side("both", 1, table)
    drawn, fed, updates = [], [], []
    sample, update = pair.sample, agent._update

    def kept_sample() -> list[TensorDict]:
        drawn.append(sample())
        return drawn[-1]

    def kept_update(observation: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        updates.append(observation)
        _, values = update(observation, *others)
        return observation @ STATE_OF_ONE_HOT, values  # in place of TD errors, to see where they go

    monkeypatch.setattr(pair, "sample", kept_sample)
    monkeypatch.setattr(pair, "feed", lambda *given: fed.append(given))
    monkeypatch.setattr(agent, "_update", kept_update)
    RetainedWalks(agent, table, [pair], (1,), settings).advance()
    retained, events = map(states_of, drawn[0])
    assert len(updates) == 8 and len(retained) == len(events) == 32
    for number, observation in enumerate(updates):
        assert torch.equal(observation[0] @ STATE_OF_ONE_HOT, torch.cat([retained[number::8], events[number::8]]))
    _, td_error, values = fed[0]
    assert torch.equal(td_error, torch.cat([retained, events]))
    joined = torch.cat([batch["observation"] for batch in drawn[0]]).unsqueeze(0)
    assert torch.equal(values, agent.values(joined)[0])


def test_feedback_reaches_the_buffer_that_retains() -> None:
    pair = side_by_side("both", 1, Table.of(ThreeRooms()))
    batches = pair.sample()
    td_error, values = torch.arange(1.0, 65.0), torch.zeros(64, 3)
    pair.feed(batches, td_error, values)
    index = batches[0]["index"]
    last = {int(slot): error for slot, error in zip(index, td_error, strict=False)}
    expected = torch.tensor([float(last[int(slot)]) ** 2 / 3 for slot in index])
    torch.testing.assert_close(pair.replays[0].writer.retention_priority(index), expected)


def test_surprise_is_the_squared_td_error_of_the_own_run() -> None:
    table, settings = Table.of(ThreeRooms()), ROOMS.settings_of("retention")
    agent = agent_of(settings, (1, 2))
    walk = table.walk_to_goal(3, 1_000)[-20:]
    pair = combined_events_retention.replay_of(settings, 0)
    measure_surprise(agent, 1, pair.replays[0])
    surprise = pair.replays[0].writer.initial_surprise(walk)
    torch.testing.assert_close(surprise, agent.td_error(1, walk).square())
    assert not torch.equal(agent.td_error(0, walk), agent.td_error(1, walk))
    alone = torch.stack([agent.td_error(run, walk) for run in (0, 1)])
    torch.testing.assert_close(alone, agent.learn([walk, walk])[0])


def lock_runs(seeds: tuple[int, ...], arm: str = "both", **changed) -> lock_dqn.LockRuns:
    settings = LOCKS.settings_of(arm) | changed
    agent = StackedDQN((lock_dqn.OBSERVATION, 16, NUM_ACTIONS), seeds, 1e-2, 0.9, updates_per_target=20)
    levels = [combined_levels_priorities.levels_of(settings, seed) for seed in seeds]
    replays = [combined_levels_priorities.replay_of(settings, seed) for seed in seeds]
    return lock_dqn.LockRuns(agent, levels, replays, seeds, settings)


def test_values_are_those_of_the_network_that_learns() -> None:
    agent = lock_runs((3, 5))._agent
    (episodes,) = lock_runs((3,)).play(np.arange(16)[None])
    rows = lock_dqn.steps_of(episodes)
    rows["priority_weight"] = torch.ones(len(rows))
    for _ in range(2):
        values = agent.values(rows["observation"].expand(2, -1, -1))
        torch.testing.assert_close(agent.learn([rows, rows])[1], values)


def test_a_lock_is_played_by_its_stages() -> None:
    runs = lock_runs((3, 5), exploration=0.3)
    level = np.stack([np.arange(LEVELS), np.arange(LEVELS)[::-1]])
    for run, episodes in enumerate(runs.play(level)):
        locks = CombinationLocks((3, 5)[run])
        assert np.array_equal(episodes.stage, locks.stage[level[run]])
        for row, number in enumerate(level[run].tolist()):
            steps, difficulty = int(episodes.length[row]), int(locks.difficulty[number])
            right = episodes.action[row] == locks.opens[locks.stage[number]]
            assert right[: steps - 1].all()
            assert bool(episodes.reward[row].sum()) == (steps == difficulty and bool(right[steps - 1]))
            assert steps == difficulty or not right[steps - 1]
        values = runs._agent.values(lock_dqn.observations(episodes.stage, episodes.remaining)[:, 0].expand(2, -1, -1))
        assert torch.equal(torch.from_numpy(episodes.state_value[:, 0]).float(), values[run].amax(-1))


def test_rows_of_locks_are_steps_to_the_next_stage() -> None:
    (episodes,) = lock_runs((3,), exploration=0.0).play(np.arange(16)[None])
    rows = lock_dqn.steps_of(episodes)
    assert len(rows) == episodes.length.sum()
    ends = rows["next", "done"].flatten()
    assert torch.equal(torch.cumsum(torch.from_numpy(episodes.length), 0) - 1, ends.nonzero().flatten())
    going = (~ends).nonzero().flatten()
    assert torch.equal(rows["next", "observation"][going], rows["observation"][going + 1])
    assert torch.equal(rows["next", "reward"].sum(), torch.tensor(float(episodes.reward.sum())))
    assert rows["observation"].sum(1).unique().tolist() == [2.0]


def test_greedy_success_is_that_of_playing_without_exploration() -> None:
    runs = lock_runs((3, 5), exploration=0.0)
    for _ in range(20):
        runs.play_and_learn()
    every = np.broadcast_to(np.arange(LEVELS), (2, LEVELS))
    assert runs.success().tolist() == [episodes.reward.sum(1).mean() for episodes in runs.play(every)]
    assert runs.success().min() > 0


def test_levels_are_scored_by_the_action_values() -> None:
    runs = lock_runs((3,), exploration=0.2)
    levels, given = runs._levels[0], []
    assert isinstance(levels, LevelBuffer)
    update = levels.update
    levels.update = lambda actor, level, steps, done: (
        given.append((actor, level, steps)) or update(actor, level, steps, done)
    )
    runs.play_and_learn()
    assert [actor for actor, *_ in given] == list(range(16))
    score = scores.L1ValueLoss(0.99, 0.95)
    scored = dict(zip(*(levels.probabilities()[key].tolist() for key in ("level_id", "score")), strict=True))
    assert scored == pytest.approx({level: float(score(steps)) for _, level, steps in given})


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [LOCKS, ROOMS], ids=lambda experiment: experiment.name)
def test_a_run_is_the_same_beside_others(experiment) -> None:
    settings = experiment.settings_of("both") | {"rounds": 20, "rounds_per_point": 10, "env_steps": 240}
    both, alone = Recorder((3, 5)), Recorder((5,))
    for out in (both, alone):
        experiment.run(settings, out.seeds, out)
    for name, points in alone.content["curves"].items():
        assert [point[1] for point in both.content["curves"][name]] == pytest.approx(
            [point[0] for point in points], rel=1e-3
        )
