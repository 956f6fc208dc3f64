# SPDX-License-Identifier: Apache-2.0
"""Partners that are the next step of the same episode."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from lightning_replay.replay import Replay
from lightning_replay.samplers import ContinuousTransitionSampler
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.transforms import MixPairs
from tests.transitions import connected, numbered_steps


def make_steps(done: list[int], trajectory: list[int] | None = None, key: object = "trajectory") -> TensorDict:
    steps = numbered_steps(1, len(done))
    for flag in ("truncated", "done"):
        steps["next", flag] = torch.tensor(done, dtype=torch.bool).unsqueeze(1)
    return connected(steps if trajectory is None else steps.set(key, torch.tensor(trajectory)))


def make_buffer(capacity: int = 6) -> TensorDictReplayBuffer:
    sampler = ContinuousTransitionSampler(seed=0)
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=32, transform=MixPairs(seed=0)
    )


def partners(buffer: TensorDictReplayBuffer) -> list[int]:
    return buffer.sampler.partners(torch.arange(len(buffer)), buffer.storage).tolist()


def test_partner_is_the_next_step_and_the_row_itself_at_an_end() -> None:
    buffer = make_buffer()
    buffer.extend(make_steps([0, 0, 1, 0, 0]))
    # 0 -> 1 -> 2 |  3 -> 4 (newest)
    assert partners(buffer) == [1, 2, 2, 4, 4]
    batch = buffer.sample()
    first, second = batch["index"].unbind(1)
    assert torch.equal(second, torch.tensor(partners(buffer))[first])
    alone = (first == 2) | (first == 4)
    rows = buffer.storage.get(first)
    assert torch.equal(batch["observation"][alone], rows["observation"][alone])
    assert not (batch["observation"][~alone] == rows["observation"][~alone]).any()


def test_environments_are_told_apart_by_either_key() -> None:
    for key in ("trajectory", ("collector", "traj_ids")):
        buffer = make_buffer()
        steps = make_steps([0, 0, 0, 0, 1, 0], [4, 8, 4, 8, 4, 4], key)
        buffer.extend(steps[:5])
        buffer.extend(steps[5:])
        # 4: 0 -> 2 -> 4 |  5      8: 1 -> 3
        assert partners(buffer) == [2, 3, 4, 3, 4, 5]


def test_cut_and_empty() -> None:
    buffer = make_buffer()
    steps = make_steps([0, 0, 0])
    buffer.extend(steps[:2])
    buffer.sampler.end_episodes(torch.tensor([1]))
    buffer.extend(steps[2:])
    assert partners(buffer) == [1, 1, 2]
    assert buffer.sampler.nbytes == (2 * 8 + 4) * 6
    buffer.empty()
    assert buffer.sampler.nbytes == 0
    buffer.extend(make_steps([0, 0]))
    assert partners(buffer) == [1, 1]


def test_rows_that_do_not_say_where_episodes_end_are_refused_before_they_are_stored() -> None:
    replay = Replay(storage=PackedStorage(8), sampler=ContinuousTransitionSampler(), batch_size=2)
    steps = make_steps([0, 1])
    steps = steps.exclude(*(("next", name) for name in ("done", "terminated", "truncated")))
    with pytest.raises(ValueError, match=r"no \('next', 'done'\).*nothing was stored"):
        replay.extend(steps)
    assert len(replay) == 0
    replay.extend(make_steps([0, 1]))
    assert replay.sample().shape == (2, 2)
