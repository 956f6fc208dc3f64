# SPDX-License-Identifier: Apache-2.0
"""Observations of two cameras, a state and parts of an arm: through every way in and out of a buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_replay import PackedStorage, Replay, load_replay, recipes
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.inspection.compare import inspect_buffers
from lightning_replay.transforms import GaussianNoise, ManhattanDistance, MixStates, PotentialShaping
from tests.attack.states import difference

STATE: tuple[str, ...] = ("observation", "state")
CAMERAS = [("observation", "front"), ("observation", "arm", "wrist")]
#  rows as they come, or with each image of both cameras once
KEPT: list[dict[str, Any]] = [{}, {"frame_stack": 1, "image_key": CAMERAS}]
MIXED = [STATE, ("next", *STATE), "action", ("next", "reward")]


def seen(first: int, count: int) -> TensorDict:
    """Observations ``first`` and on; each part of number n is filled with n, or n % 2."""
    number = torch.arange(first, first + count)
    images = number.to(torch.uint8).view(-1, 1, 1, 1)
    arm = {"wrist": images[:, 0].expand(-1, 5, 6), "joints": number.view(-1, 1) / 8, "touches": number % 2 == 0}
    parts = {"front": images.expand(-1, 7, 8, 3), "state": number.float().view(-1, 1).expand(-1, 3), "arm": arm}
    return TensorDict(parts, [count]).contiguous()


def rows(first: int = 0, count: int = 12) -> TensorDict:
    ends = torch.zeros(count, 1, dtype=torch.bool)
    ends[-1] = True
    reward = torch.arange(first, first + count).float().view(-1, 1)
    following = {"reward": reward, "terminated": ends, "truncated": torch.zeros_like(ends), "done": ends.clone()}
    columns = {"observation": seen(first, count), "action": reward / 100, "trajectory": torch.full((count,), first)}
    return TensorDict(columns | {"next": following | {"observation": seen(first + 1, count)}}, [count])


def columns_of(given: TensorDict) -> dict[Any, np.ndarray]:
    return {key: value.numpy() for key, value in given.items(True, True)}


def number_in(observation: TensorDict) -> list[int]:
    """The number of each observation, which all its parts must have."""
    number = observation["state"][:, 0].int().tolist()
    for place, one in enumerate(number):
        assert (observation[place] == seen(one, 1)[0]).all()
    return number


@pytest.mark.slow
@pytest.mark.parametrize("options", KEPT, ids=["packed", "frames"])
@pytest.mark.parametrize("recipe", ["prioritized", "surprise_retention", "event_tables"])
def test_rows_columns_and_single_rows_are_the_same_rows(recipe: str, options: dict[str, Any], tmp_path) -> None:
    def build() -> Replay:
        table = EventTable("late", condition=reward_at_least(8.0), history_length=3, capacity=9, min_size=1)
        of_tables = {"tables": [table], "min_size": 1} if recipe == "event_tables" else {}
        return recipes.by_name(recipe)(40, 8, n_steps=2, discount=1.0, seed=0, **options, **of_tables)

    by_rows, by_columns, one_by_one = build(), build(), build()
    for first in (0, 100):
        by_rows.extend(rows(first))
        by_columns.extend_columns(columns_of(rows(first)))
        for row in rows(first).unbind(0):
            one_by_one.add(row)
    assert difference(by_rows.state_dict(), by_columns.state_dict()) is None
    assert number_in(by_rows[:]["observation"]) == number_in(one_by_one[:]["observation"])
    batch = by_rows.sample()
    first, last = number_in(batch["observation"]), number_in(batch["next", "observation"])
    steps = batch["steps_to_next_obs"].flatten().tolist()
    assert [one + count for one, count in zip(first, steps, strict=True)] == last and set(steps) == {1, 2}
    by_rows.update_priority(batch["index"], torch.arange(8.0))
    by_rows.save(tmp_path)
    again = load_replay(tmp_path)
    for _ in range(3):
        assert (again.sample() == by_rows.sample()).all()
    if options:
        assert by_rows.storage.frames_held == 26 and by_rows.stats()["image_bytes"].keys() == {
            "observation.front",
            "observation.arm.wrist",
        }


@pytest.mark.parametrize("options", KEPT, ids=["packed", "frames"])
def test_an_entry_of_nested_observations_is_compared(options: dict[str, Any]) -> None:
    replay = recipes.uniform(40, 8, seed=0, **options)
    replay.extend(rows())
    ((name, found),) = inspect_buffers({"a": replay}, observation_key=STATE).items()
    assert name == "a" and found.points.shape == (12, 2)
    if options:  # the first camera
        assert inspect_buffers({"a": replay})["a"].points.shape == (12, 2)
    else:
        with pytest.raises(KeyError, match=r"stored are \('observation', 'front'\).*observation_key="):
            inspect_buffers({"a": replay})


@pytest.mark.parametrize("options", KEPT, ids=["packed", "frames"])
def test_states_are_shaped_and_disturbed_beside_cameras_by_their_key(options: dict[str, Any]) -> None:
    def drawn(transform: Any) -> TensorDict:
        storage = recipes.storage_for(40, **options)
        replay = Replay(storage=storage, transform=transform, batch_size=8, seed=0)
        replay.extend(rows())
        return replay.sample()

    for transform, message in (
        (GaussianNoise(), r"\('observation', 'front'\) has dtype torch.uint8.*name other keys with keys="),
        (MixStates(), r"\('observation', 'front'\) has dtype torch.uint8.*name other keys with keys="),
        (PotentialShaping(ManhattanDistance([3.0]), 0.5), r"parts \['arm', 'front', 'state'\]; .*observation_key="),
        (PotentialShaping(lambda parts: parts["arm", "joints"].squeeze(1) / 0, 0.5), "NaN or infinite"),
    ):
        with pytest.raises(ValueError, match=message):
            drawn(transform)
    shaped = drawn(PotentialShaping(ManhattanDistance([0.0] * 3), 1.0, observation_key=STATE))
    rewards, ends = (shaped["next", name].flatten() for name in ("reward", "terminated"))
    number = torch.tensor(number_in(shaped["observation"]))
    assert rewards.tolist() == torch.where(ends, 4 * number, number - 3).tolist()
    for transform in (GaussianNoise(keys=[STATE]), MixStates(keys=[STATE])):
        moved = drawn(transform)
        number = (8 * moved["observation", "arm", "joints"]).flatten()
        assert (moved["observation", "state"] != number.view(-1, 1)).any()
        assert number_in(moved["observation"].set("state", number.view(-1, 1).expand(-1, 3))) == number.int().tolist()


@pytest.mark.parametrize("recipe", ["mixup", "neighborhood_mixup", "continuous_transition"])
def test_pairs_are_mixed_in_their_states_and_have_the_cameras_of_the_first(recipe: str) -> None:
    features: dict[str, Any] = {"feature_keys": [STATE, "action"]} if recipe == "neighborhood_mixup" else {}
    if features:
        with pytest.raises(ValueError, match=r"name other columns with feature_keys=|Name other columns with feature"):
            recipes.by_name(recipe)(40, 8, seed=0).extend(rows())
    replay = recipes.by_name(recipe)(40, 8, seed=0, **features)
    replay.extend(rows())
    with pytest.raises(ValueError, match=r"\('observation', 'front'\) has dtype torch.uint8; .*mixed with keys="):
        replay.sample()
    replay = recipes.by_name(recipe)(40, 8, seed=0, keys=MIXED, **features)
    replay.extend(rows())
    batch = replay.sample()
    first, weight = batch["index"][:, 0], batch["mixup_coefficient"].view(-1, 1)
    one, other = (replay.storage.get(batch["index"][:, side].contiguous()) for side in (0, 1))
    assert (batch["observation"].exclude("state") == one["observation"].exclude("state")).all() and len(first) == 8
    expected = weight * one[STATE] + (1 - weight) * other[STATE]
    torch.testing.assert_close(batch[STATE], expected)


def test_a_buffer_of_packed_rows_takes_cameras_of_any_shape() -> None:
    replay = Replay(storage=PackedStorage(20), batch_size=4, seed=0)
    replay.extend(rows())
    with pytest.raises(ValueError, match=r"'observation', 'front'\): stored .*\(7, 8, 3\).*given .*\(7, 8\)"):
        replay.extend(rows(100).set(CAMERAS[0], rows(100)[CAMERAS[0]][..., 0].contiguous()))
    assert len(replay) == 12
