# SPDX-License-Identifier: Apache-2.0
"""Buffers whose rows are on a GPU: the same draws as of rows on the CPU, before and after a save is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SliceSampler

from lightning_replay import recipes
from lightning_replay.replay import Replay
from lightning_replay.samplers import ContinuousTransitionSampler, PrioritizedSampler, SequenceSampler
from lightning_replay.storage.packed import PackedStorage
from tests.frame_steps import IMAGE_KEYS, frame_rows, stacks_of
from tests.goal_steps import goal_rows, reached
from tests.recipe_options import ROW_RECIPES, built, fitting
from tests.transitions import numbered_steps

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

CASES = [
    *ROW_RECIPES,
    *("sequences", "sequences of drawn rows", "goals", "frames", "two cameras", "frames in tables", "same action"),
    *("pairs with both priorities", "kept by TD errors"),
]
COMPUTED_THERE = ("observation", "action", "next", "discount")  # by arithmetic, which may round in another way


def made(name: str, device: str) -> Replay:
    """A small buffer with rows on the device."""
    options: dict[str, Any] = {"batch_size": 8, "device": device, "seed": 0}
    if name in ROW_RECIPES:
        return built(name, capacity=64, n_steps=2, **options)
    if name == "sequences":
        return recipes.sequences(64, length=5, overlap=2, burn_in=1, priority_exponent=0.9, **options)
    if name == "sequences of drawn rows":
        replay = built("event_tables", capacity=64, **options)
        replay.set_sampler(SequenceSampler(4, base_sampler=replay.sampler, seed=1))
        return replay
    if name == "goals":
        ends = {"reward": reached, "terminated": reached}
        return recipes.hindsight(64, strategy="episode", share=0.8, n_steps=3, **ends, **options)
    if name == "same action":
        return recipes.neighborhood_mixup(64, discrete="same_action", num_neighbors=3, **options)
    if name == "pairs with both priorities":
        replay, first = recipes.continuous_transition(64, **options), PrioritizedSampler(64, seed=1)
        replay.set_sampler(ContinuousTransitionSampler(first, update_partners=True, seed=2))
        return replay
    if name == "kept by TD errors":
        return recipes.surprise_retention(64, priority_exponent=0.6, **options)
    key = IMAGE_KEYS[name == "two cameras"]
    options |= {"frame_stack": 2, "image_key": key, "frame_capacity": 60, "n_steps": 2}
    if name == "frames in tables":
        return recipes.parallel_curriculum(["a", "b"], 32, min_size=1, **options)
    return recipes.prioritized(64, **options)


def steps(name: str, replay: Replay, part: int) -> TensorDict:
    """New rows: 20, of two environments that take turns, whose observations are no whole numbers."""
    first = 20 * part
    if name == "goals":
        return torch.cat([goal_rows(range(first, first + 13), done=True), goal_rows(range(first + 500, first + 507))])
    if "frames" in name or name == "two cameras":
        key = IMAGE_KEYS[name == "two cameras"]
        rows = frame_rows(stacks_of([number % 250 for number in range(first, first + 21)], 2), first=first, key=key)
        return fitting(replay, rows)
    rows = numbered_steps(first, 20, done_every=11)
    walk = torch.randn(1000, 3, generator=torch.Generator().manual_seed(7)).cumsum(0)
    rows["observation"], rows["next", "observation"] = walk[first : first + 20], walk[first + 1 : first + 21]
    if name == "same action":
        rows["action"] = torch.arange(first, first + 20) % 2
    return fitting(replay, rows.set("trajectory", torch.arange(first, first + 20) // 7 % 2))


def drawn(replay: Replay, seed: int) -> TensorDictBase:
    """A batch, whose TD errors are given on its device; all its columns lie there."""
    batch = replay.sample()
    device = batch["index"].device
    assert {column.device for column in batch.values(True, True)} == {device}
    errors = torch.randn(batch["index"].shape, generator=torch.Generator().manual_seed(seed))
    errors = errors if replay.sequence_length is not None else errors.reshape(8, -1)[:, 0]
    if replay.takes_feedback:
        replay.update_priority(batch, errors.to(device))
    return batch.cpu()


def assert_equal(one: TensorDictBase, other: TensorDictBase, *unlike: str) -> None:
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key, column in one.exclude(*unlike).items(True, True):
        is_computed = column.is_floating_point() and (key[0] if isinstance(key, tuple) else key) in COMPUTED_THERE
        torch.testing.assert_close(column, other[key], rtol=1e-5 if is_computed else 0, atol=1e-5 if is_computed else 0)


def assert_same_draws(seed: int, on_cpu: Replay, *others: Replay, unlike: tuple[str, ...] = ()) -> None:
    for number in range(3):
        batch = drawn(on_cpu, seed + number)
        for other in others:
            assert_equal(batch, drawn(other, seed + number), *unlike)


@pytest.mark.filterwarnings("ignore:.* have another reward than RelabelGoals computes")
@pytest.mark.parametrize("given_on", ["cpu", DEVICE])
@pytest.mark.parametrize("name", CASES)
def test_the_same_rows_are_drawn_as_of_rows_on_the_cpu(name: str, given_on: str, tmp_path: Path) -> None:
    on_cpu, there = made(name, "cpu"), made(name, DEVICE)

    def extend(replay: Replay, part: int, device: str) -> Tensor:
        rows = steps(name, replay, part).to(device)
        return torch.cat([replay.extend(rows[:-1]), replay.extend(rows[-1:])])

    for part in range(5):
        slots = extend(on_cpu, part, "cpu"), extend(there, part, given_on)
        assert torch.equal(*slots) and slots[1].is_cpu
        assert_same_draws(10 * part, on_cpu, there)
    for saved, path in ((on_cpu, tmp_path / "cpu"), (there, tmp_path / "gpu")):
        saved.save(path)
    # Each continues from what the other saved.
    on_cpu.load(tmp_path / "gpu", end_episodes=False)
    there.load(tmp_path / "cpu", end_episodes=False)
    again = made(name, DEVICE)
    again.load(tmp_path / "gpu", end_episodes=False)
    for part in range(5, 8):
        assert_same_draws(10 * part, on_cpu, there, again, unlike=("generation",))  # higher where rows were before
        for one, device in ((on_cpu, "cpu"), (there, DEVICE), (again, "cpu")):
            extend(one, part, device)


def test_rows_are_ended_emptied_and_read() -> None:
    replay = recipes.uniform(16, 4, n_steps=3, device=DEVICE, seed=0)
    slots = replay.extend(numbered_steps(0, 6, trajectory=1).to(DEVICE))
    generation = replay.sample()["generation"]
    assert generation.tolist() == [1] * 4 and replay.successors(slots.to(DEVICE)).tolist() == [1, 2, 3, 4, 5, -1]
    replay.end_episodes([1])
    assert replay[:]["next", "truncated"].flatten().tolist() == [False] * 5 + [True]
    replay.empty()
    assert replay.storage.generation_of(torch.arange(6)).tolist() == [2] * 6
    replay.extend(numbered_steps(0, 20, trajectory=2).to(DEVICE))
    assert replay[:]["generation"].tolist() == replay.storage.generation_of(torch.arange(16)).tolist()
    assert replay.oldest_first().tolist() == [*range(4, 16), *range(4)]


def test_parts_of_torchrl_with_parts_of_this_library() -> None:
    rows = numbered_steps(0, 40, done_every=10).set("trajectory", torch.arange(40) // 10).to(DEVICE)
    of_theirs = Replay(
        storage=LazyTensorStorage(64, device=DEVICE), sampler=PrioritizedSampler(64, seed=1), batch_size=8, n_steps=2
    )
    slices = SliceSampler(num_slices=2, traj_key="trajectory")
    with_slices = Replay(storage=PackedStorage(64, device=DEVICE), sampler=slices, batch_size=8)
    for replay in (of_theirs, with_slices):
        assert replay.extend(rows).tolist() == [*range(40)]
        batch = replay.sample()
        assert {column.device.type for column in batch.values(True, True)} == {DEVICE}
        assert torch.equal(rows["observation"][batch["index"]], batch["observation"])
        replay.update_priority(batch["index"], torch.ones(8, device=DEVICE))
        assert replay.stats()["drawn_age_max"] <= 39
    theirs = TensorDictReplayBuffer(
        storage=PackedStorage(64, device=DEVICE), sampler=PrioritizedSampler(64, seed=1), batch_size=8
    )
    theirs.extend(rows.cpu())
    batch = theirs.sample().set("td_error", torch.ones(8, device=DEVICE))
    theirs.update_tensordict_priority(batch)
    assert torch.equal(rows["observation"][batch["index"]], batch["observation"])
