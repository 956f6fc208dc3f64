# SPDX-License-Identifier: Apache-2.0
"""Sweeps backwards from goals, compared with lists of numbered steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from lightning_replay import recipes
from lightning_replay.events import first_in_episode, reward_at_least
from lightning_replay.replay import Replay
from lightning_replay.samplers import ReverseSweepSampler
from lightning_replay.storage.packed import PackedStorage
from tests.transitions import numbered_steps


def reached_goal(steps: TensorDict) -> torch.Tensor:
    return steps["next", "reward"] >= 1


def make_steps(done: list[int], goal: list[int], trajectory: list[int] | None = None, first: int = 0) -> TensorDict:
    count = len(done)
    flags = torch.tensor(done, dtype=torch.bool).unsqueeze(1)
    following = {"reward": torch.tensor(goal, dtype=torch.float32).unsqueeze(1)}
    following |= {"terminated": flags.clone(), "truncated": torch.zeros_like(flags), "done": flags}
    steps = TensorDict({"number": torch.arange(first, first + count), "next": following}, [count])
    return steps if trajectory is None else steps.set("trajectory", torch.tensor(trajectory))


def make_replay(capacity: int, batch_size: int = 4, sweep_share: float = 1.0) -> Replay:
    sampler = ReverseSweepSampler(reached_goal, sweep_share=sweep_share)
    return Replay(storage=PackedStorage(capacity), sampler=sampler, batch_size=batch_size, seed=0)


def test_batches_run_back_from_the_goal_and_then_start_anew() -> None:
    replay = make_replay(16)
    #  0 1 2 3* 4 |   5 6 7 |   8 9 (running)
    replay.extend(make_steps([0, 0, 0, 0, 1, 0, 0, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]))
    assert replay.sampler.num_goal_episodes == 1
    batches = [replay.sample(3)["number"].tolist() for _ in range(4)]
    assert batches == [[3, 2, 1], [0, 3, 2], [1, 0, 3], [2, 1, 0]]


def test_a_sweep_starts_at_the_last_goal_of_an_episode() -> None:
    replay = make_replay(16)
    replay.extend(make_steps([0, 0, 0], [0, 1, 0]))
    assert replay.sample(3)["number"].tolist() == [1, 0, 1]
    replay.extend(make_steps([0, 0], [1, 1], first=3))
    assert replay.sample(6)["number"].tolist() == [0, 4, 3, 2, 1, 0]
    assert replay.sampler.num_goal_episodes == 1
    at_once = make_replay(16)
    at_once.extend(make_steps([0] * 9, [1, 1, 0, 0, 0, 0, 0, 1, 0]))
    assert at_once.sampler.num_goal_episodes == 1
    assert at_once.sample(9)["number"].tolist() == [7, 6, 5, 4, 3, 2, 1, 0, 7]


def test_rows_stored_earlier_and_emptied_buffers() -> None:
    sampler = ReverseSweepSampler(reached_goal, sweep_share=1.0, seed=0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    buffer.extend(make_steps([0, 0, 0], [0, 0, 1]))
    assert sampler.sample(buffer.storage, 4)[0].tolist() == [2, 1, 0, 2]
    replay = make_replay(8)
    assert replay.sampler.nbytes == 0
    replay.extend(make_steps([0, 0, 0], [0, 0, 1]))
    assert replay.sampler.nbytes == (3 * 8 + 4) * 8
    replay.empty()
    assert replay.sampler.num_goal_episodes == 0
    replay.extend(make_steps([0, 0], [0, 1], first=10))
    assert replay.sample(3)["number"].tolist() == [11, 10, 11]


def test_until_a_goal_is_stored_batches_are_uniform_and_an_empty_buffer_is_refused() -> None:
    replay = make_replay(16)
    replay.extend(make_steps([0] * 8, [0] * 8))
    assert set(replay.sample(200)["number"].tolist()) == set(range(8))
    with pytest.raises(RuntimeError, match="empty"):
        ReverseSweepSampler(reached_goal).sample(PackedStorage(4), 2)


class Stretch:
    """True at the second of two consecutive rewards: a condition with a memory."""

    def __init__(self) -> None:
        self.held = False

    def __call__(self, steps: TensorDict) -> torch.Tensor:
        reached = []
        for reward in steps["next", "reward"].flatten().tolist():
            reached.append(self.held and reward >= 1)
            self.held = reward >= 1
        return torch.tensor(reached)

    def state_dict(self) -> dict[str, bool]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        self.held = state["held"]


def test_a_condition_with_a_memory_sees_every_row_once_and_is_saved() -> None:
    def make() -> Replay:
        sampler = ReverseSweepSampler(Stretch(), sweep_share=1.0)
        return Replay(storage=PackedStorage(8), sampler=sampler, batch_size=3, seed=0)

    replay, again = make(), make()
    replay.extend(make_steps([0, 0], [0, 1]))
    again.load_state_dict(replay.state_dict())
    for each in (replay, again):
        assert each.sampler.num_goal_episodes == 0
        each.extend(make_steps([0], [1], first=2))
        assert each.sample()["number"].tolist() == [2, 1, 0]


def test_what_a_goal_remembers_belongs_to_one_buffer_and_is_forgotten_with_its_rows() -> None:
    goal = first_in_episode(reached_goal)
    one, other = (Replay(storage=PackedStorage(8), sampler=ReverseSweepSampler(goal), batch_size=2) for _ in range(2))
    for replay in (one, other):
        replay.extend(make_steps([0, 0, 0], [0, 1, 1]))
        assert replay.sampler.num_goal_episodes == 1
    one.empty()
    one.extend(make_steps([0, 0, 0], [0, 1, 1]))
    assert one.sampler.num_goal_episodes == 1


def test_bad_input_is_refused_before_anything_is_stored() -> None:
    for wrong in (lambda steps: steps["next", "reward"], lambda steps: torch.ones(3, dtype=torch.bool), lambda _: True):
        replay = Replay(storage=PackedStorage(8), sampler=ReverseSweepSampler(wrong), batch_size=2)
        with pytest.raises(ValueError, match="the condition .* returned"):
            replay.extend(make_steps([0, 1], [0, 1]))
        assert len(replay) == 0
    replay = make_replay(8)
    steps = make_steps([0, 1], [0, 1])
    steps = steps.exclude(*(("next", name) for name in ("done", "terminated", "truncated")))
    with pytest.raises(ValueError, match=r"no \('next', 'done'\).*nothing was stored"):
        replay.extend(steps)
    assert len(replay) == 0
    sampler = ReverseSweepSampler(reached_goal)
    with pytest.raises(ValueError, match="got no storage"):
        sampler.mark_update(0)
    with pytest.raises(ValueError, match=r"index of shape \[2, 2\]"):
        sampler.mark_update(torch.zeros(2, 2, dtype=torch.int64), storage=replay.storage)


class StepList:
    """What a sweep may draw, as lists of numbered steps: the oracle."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.stored: list[int] = []
        self.newest: dict[int, int] = {}
        self.before: dict[int, int] = {}
        self.episode: dict[int, int] = {}
        self.goal: dict[int, int] = {}

    def extend(self, done: list[int], goal: list[int], trajectory: list[int], first: int) -> None:
        count = len(done)
        self.stored = [*self.stored, *range(first, first + count)][-self.capacity :]
        for offset in range(max(0, count - self.capacity), count):
            number, name = first + offset, trajectory[offset]
            before = self.newest.pop(name, None)
            if before in self.stored:
                self.before[number] = before
            self.episode[number] = self.episode[before] if before in self.stored else number
            if not done[offset]:
                self.newest[name] = number
            if goal[offset]:
                self.goal[self.episode[number]] = number

    def starts(self) -> set[int]:
        return {number for number in self.goal.values() if number in self.stored}

    def back(self, number: int) -> int | None:
        before = self.before.get(number)
        return before if before in self.stored else None


steps_of_a_batch = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 1]), st.booleans(), st.integers(0, 2)), min_size=1, max_size=9
)


@pytest.mark.slow
@given(capacity=st.integers(3, 14), rounds=st.lists(st.tuples(steps_of_a_batch, st.integers(1, 7)), max_size=12))
def test_every_sweep_is_one_that_the_lists_allow(
    capacity: int, rounds: list[tuple[list[tuple[int, bool, int]], int]]
) -> None:
    replay, steps = make_replay(capacity, batch_size=1), StepList(capacity)
    first, following = 0, None
    for batch, draws in rounds:
        done, goal, trajectory = (list(map(int, column)) for column in zip(*batch, strict=True))
        replay.extend(make_steps(done, goal, trajectory, first=first))
        steps.extend(done, goal, trajectory, first)
        first += len(batch)
        following = following if following in steps.stored else None
        assert replay.sampler.num_goal_episodes == len(steps.starts())
        drawn = replay.sample(draws)["number"].tolist()
        if not steps.starts():
            assert set(drawn) <= set(steps.stored)
            continue
        for number in drawn:
            assert number in (steps.starts() if following is None else {following})
            following = steps.back(number)


def test_a_goal_that_is_never_reached_is_warned_of_once() -> None:
    replay = recipes.reverse_sweep(capacity=1_200, batch_size=4, goal=reward_at_least(1e6), seed=0)
    replay.extend(numbered_steps(0, 1_100, done_every=100))
    with pytest.warns(UserWarning, match=r"the goal reward_at_least\(1000000.0\) .* 'reward'\) are 100 to 1299"):
        replay.extend(numbered_steps(1_100, 200, done_every=100))
    again = recipes.reverse_sweep(capacity=1_200, batch_size=4, goal=reward_at_least(1e6), seed=0)
    again.load_state_dict(replay.state_dict())
    for one in (replay, again):
        one.extend(numbered_steps(1_300, 200, done_every=100))
    reached = recipes.reverse_sweep(capacity=1_200, batch_size=4, goal=reward_at_least(1_000.0), seed=0)
    reached.extend(numbered_steps(0, 2_000, done_every=100))
