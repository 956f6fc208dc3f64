# SPDX-License-Identifier: Apache-2.0
"""Links and returns on a device, on timelines small enough to draw; the CPU is the device."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from lightning_replay import recipes
from lightning_replay.episodes.device_links import DeviceLinks
from lightning_replay.episodes.returns import EpisodeTracker
from lightning_replay.samplers import UniformSampler
from lightning_replay.storage import PackedStorage
from tests.transitions import numbered_steps


def test_interleaved_trajectories_are_linked_apart() -> None:
    links = DeviceLinks(8, "cpu")
    no_end = torch.zeros(4, dtype=torch.bool)
    links.write(torch.arange(4), torch.tensor([7, 9, 7, 9]), no_end)
    links.write(torch.tensor([4, 5, 6]), torch.tensor([9, 7, 7]), torch.tensor([True, False, False]))
    links.write(torch.tensor([7]), torch.tensor([9]), no_end[:1])
    # 7: 0 -> 2 -> 5 -> 6      9: 1 -> 3 -> 4 |  7
    assert links.successor.tolist() == [2, 3, 5, 4, -1, 6, -1, -1]
    slots, steps_used = links.chain(torch.tensor([0, 1, 7]), 3)
    assert slots.tolist() == [[0, 2, 5], [1, 3, 4], [7, 7, 7]] and steps_used.tolist() == [3, 3, 1]
    assert links.walk(torch.tensor([6, 4]), torch.tensor([2, 9]), back=True)[0].tolist() == [2, 1]


def test_the_table_of_running_episodes_shrinks_to_those_that_run() -> None:
    links = DeviceLinks(100, "cpu")
    for call in range(4):
        links.write(torch.arange(3) + 3 * call, torch.arange(3), torch.tensor([False, True, False]))
    bytes_before = links.nbytes
    assert links.counts.tolist() == [2, 0, 0]
    links.receive([2, 0, 0])
    assert links.nbytes == bytes_before - 10 * 2 * 8  # Of 12 entries 2 are left.
    links.write(torch.tensor([20]), torch.tensor([2]), torch.tensor([False]))
    assert links.successor[11] == 20


def rows_of(generator: torch.Generator, count: int) -> TensorDict:
    def whole(most: int) -> torch.Tensor:
        return torch.randint(most, (count, 1), generator=generator)

    done = whole(6) == 0
    after = {"observation": whole(2).float(), "reward": torch.randn(count, 1, generator=generator)}
    after |= {"terminated": done & (whole(2) == 0), "done": done}
    return TensorDict({"observation": whole(2).float(), "trajectory": whole(4).flatten(), "next": after}, [count])


@pytest.mark.parametrize("check_continuity", [False, True])
def test_returns_equal_those_on_the_cpu_bit_for_bit_also_after_a_load(check_continuity: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    storage = PackedStorage(50)
    trackers = [EpisodeTracker(3, 0.9, check_continuity, device) for device in (None, "cpu")]
    for call in range(12):
        index = (torch.arange(8) + 8 * call) % 50
        storage.set(index, rows_of(generator, 8))
        if call == 6:
            states = [tracker.state_dict() for tracker in trackers]
            trackers = [EpisodeTracker(3, 0.9, check_continuity, device) for device in (None, "cpu")]
            for tracker, state in zip(trackers, reversed(states), strict=True):
                tracker.load_state_dict(state, storage)
        for tracker in trackers:
            tracker.mark_update(index, storage)
        drawn = torch.randint(len(storage), (64,), generator=generator)
        first, second = (tracker.draw(storage.get(drawn), drawn, storage) for tracker in trackers)
        assert (first == second).all()
        assert 1 < first["steps_to_next_obs"].float().mean() < 3


def test_a_tracker_links_the_rows_that_were_stored_before_it_came() -> None:
    storage = PackedStorage(8)
    storage.set(torch.arange(6), rows_of(torch.Generator().manual_seed(1), 6))
    trackers = [EpisodeTracker(3, 0.9, False, device) for device in (None, "cpu")]
    sums = [tracker.returns(torch.arange(6), storage) for tracker in trackers]
    assert sums[0].equal(sums[1]) and trackers[1].links.successor.equal(trackers[0].links.successor)


def test_without_any_sequence_left_a_batch_is_empty_until_the_next_read() -> None:
    replay = recipes.sequences(8, 2, length=3, min_steps=3, draws_on="device", seed=0)
    replay.extend(numbered_steps(0, 8))
    assert replay.sample()["mask"].all()
    replay.extend(numbered_steps(8, 8, done_every=1))
    assert not replay.sample()["mask"].any()
    replay.sampler.base_sampler.receive([0])
    with pytest.raises(ValueError, match="no sequence of 3 steps or more among the 8 stored rows: the long"):
        replay.sample()


def test_rows_that_do_not_continue_others_are_reported_on_a_device() -> None:
    replay = recipes.uniform(64, 2, n_steps=3, draws_on="device", seed=0)
    with pytest.warns(UserWarning, match="of 16 rows do not start with the observation that the row before ended with"):
        for first in range(0, 180, 10):
            replay.extend(numbered_steps(first, 1))


def test_a_filled_buffer_moves_its_links_to_the_device_and_back() -> None:
    replay = recipes.uniform(8, 4, n_steps=3, seed=0)
    replay.extend(numbered_steps(0, 6))
    before = replay.successors(torch.arange(6))
    replay.set_sampler(UniformSampler(device="cpu"))
    assert isinstance(replay.sampler, UniformSampler) and replay.successors(torch.arange(6)).equal(before)
    replay.extend(numbered_steps(6, 1))
    assert replay.successors(torch.tensor([5])).tolist() == [6]
    replay.set_sampler(UniformSampler())
    replay.extend(numbered_steps(7, 1))
    assert replay.successors(torch.tensor([5, 6])).tolist() == [6, 7]
