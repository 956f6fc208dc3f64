# SPDX-License-Identifier: Apache-2.0
"""A buffer that stores each observation once is the same, bit for bit, as the one that stores both of every row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import recipes
from lightning_replay.replay import Replay
from lightning_replay.storage.device_next_observations import DeviceNextObservations
from lightning_replay.storage.observations_once import ObservationStorage
from lightning_replay.storage.packed import PackedStorage
from tests.attack.states import difference
from tests.attack.variants import VARIANTS, Variant

CAPACITY = 24
WHOLE = [one for one in VARIANTS if not one.has_frames and "in_file" not in one.chosen]
CALLS = st.one_of(
    st.tuples(st.just("extend"), st.integers(1, 12)),
    st.tuples(st.just("draw"), st.just(0)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.just("end"), st.just(0)),
    st.tuples(st.just("empty"), st.just(0)),
)


class FollowedByTorch(ObservationStorage):
    """Finds next observations by torch, as it is done for rows on a device."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.follows_there = True


FollowedByTorch.__name__ = ObservationStorage.__name__  # So that a save of one loads into the other.


def same(ones: list[Any]) -> None:
    """Fails if the batches, or the refusals to draw one, differ."""
    assert difference(*ones) is None


def drawn(replay: Replay) -> Any:
    try:
        batch = replay.sample()
    except RuntimeError as error:  # none of the tables has enough rows yet
        return str(error)
    replay.update_priority(batch, batch["index"].reshape(len(batch), -1)[:, 0].float())
    return batch.to_dict()


def call(name: str, number: int, replays: list[Replay], rows: TensorDict | None, build: Any) -> None:
    """Makes one call with both buffers, and compares what they return."""
    if name == "extend":
        for replay in replays:
            replay.extend(rows)
    elif name == "draw":
        same([drawn(replay) for replay in replays])
    elif name == "end":
        for replay in replays:
            replay.end_episodes()
    elif name == "empty":
        for replay in replays:
            replay.empty()
    else:
        for place, replay in enumerate(replays):
            replays[place] = build(place)
            replays[place].load_state_dict(replay.state_dict())


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=40)
@given(variant=st.sampled_from(WHOLE), history=st.lists(CALLS, min_size=6, max_size=16), seed=st.integers(0, 99))
def test_any_recipe_draws_the_same(variant: Variant, history: list[tuple[str, int]], seed: int) -> None:
    once = replace(variant, options=(*variant.options, ("observations", "once")))
    world = variant.world(seed)

    def build(place: int) -> Replay:
        return (variant, once)[place].build(CAPACITY, 6, seed)

    replays = [build(0), build(1)]
    assert isinstance(replays[1].storage, ObservationStorage)
    for name, number in [("extend", 12), *history, ("draw", 0)]:
        call(name, number, replays, world.take(number) if number else None, build)


def closeness(achieved: Tensor, desired: Tensor, info: dict[str, Any]) -> Tensor:
    return -(achieved - desired).abs().sum(1)


def never(achieved: Tensor, desired: Tensor, info: dict[str, Any]) -> Tensor:
    return torch.zeros(len(achieved), dtype=torch.bool)


ON_DEVICE = [
    Variant("uniform", ()),
    Variant("uniform", (("n_steps", 3), ("check_every", 3))),
    Variant("prioritized", (("n_steps", 2), ("check_every", 2))),
    Variant("sequences", (("length", 4), ("overlap", 2))),
    Variant("hindsight", (("n_steps", 2), ("check_every", 5), ("reward", closeness), ("terminated", never))),
]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=20)
@given(variant=st.sampled_from(ON_DEVICE), history=st.lists(CALLS, min_size=6, max_size=16), seed=st.integers(0, 99))
def test_any_recipe_draws_the_same_on_a_device(variant: Variant, history: list[tuple[str, int]], seed: int) -> None:
    there = replace(variant, options=(*variant.options, ("draws_on", "device")))
    once = replace(there, options=(*there.options, ("observations", "once")))
    world = variant.world(seed)

    def build(place: int) -> Replay:
        return (there, once)[place].build(CAPACITY, 6, seed)

    with patch.object(recipes, "ObservationStorage", FollowedByTorch):
        replays = [build(0), build(1)]
        for name, number in [("extend", 12), *history, ("draw", 0)]:
            call(name, number, replays, world.take(number) if number else None, build)
    following = replays[1].storage._next
    assert isinstance(following, DeviceNextObservations)
    assert following.count == (following.places < 0).sum() <= following._bound < len(following._last)


SLOTS = 8
# Words of float32: NaNs of two payloads, two zeros, and numbers.
WORDS = torch.tensor([0x7FC00001, 0x7FC00002, -0x80000000, 0, 0x3F800000], dtype=torch.int32)


def rows_of(states: list[int], following: list[int]) -> TensorDict:
    """Rows whose observations are an image, a float, and a bfloat16 by number."""

    def observation(numbers: list[int]) -> TensorDict:
        number = torch.tensor(numbers)
        float_ = WORDS[number].view(torch.float32)
        image = (number[:, None, None] % 2).to(torch.uint8).expand(-1, 3, 3)
        return TensorDict({"a": float_, "b": image, "c": number[:, None].bfloat16()}, [len(numbers)])

    count = len(states)
    return TensorDict(
        {
            "observation": observation(states),
            "action": torch.arange(count),
            "next": {"observation": observation(following), "done": torch.zeros(count, 1, dtype=torch.bool)},
        },
        [count],
    )


@pytest.mark.parametrize("kind", [ObservationStorage, FollowedByTorch], ids=["compiled", "by torch"])
@settings(max_examples=30)
@given(data=st.data())
def test_rows_in_any_slots_come_back_bit_for_bit(kind: type[ObservationStorage], data: st.DataObject) -> None:
    once, twice = kind(SLOTS), PackedStorage(SLOTS)
    written: set[int] = set()
    for _ in range(data.draw(st.integers(1, 8))):
        slots = data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(1, SLOTS))]
        states = data.draw(st.lists(st.integers(0, 4), min_size=len(slots) + 1, max_size=len(slots) + 1))
        breaks = data.draw(st.lists(st.integers(0, 4), max_size=3))
        following = [*breaks, *states[1:]][: len(slots)]
        for storage in (once, twice):
            storage.set(torch.tensor(slots), rows_of(states[:-1], following))
        written.update(slots)
        index = torch.tensor(sorted(written))
        copied = data.draw(st.sampled_from([ObservationStorage, FollowedByTorch]))(SLOTS)
        copied.load_state_dict(once.state_dict())
        expected = twice.get(index).to_dict()
        assert difference(once.get(index).to_dict(), expected) is None
        assert difference(copied.get(index).to_dict(), expected) is None
        kept_beside(once)
        once = data.draw(st.sampled_from([once, copied]))


def kept_beside(storage: ObservationStorage) -> None:
    """Each place refers to a slot that refers back, or to a last observation."""
    following = storage._next
    if isinstance(following, DeviceNextObservations):
        assert following.count == (following.places < 0).sum() and following.places[-1] == 0
        return
    users = (following.places > 0).nonzero()[0]
    assert (following._before[following.places[users] - 1] == users + 1).all()
    assert (following._before > 0).sum() == len(users)
    assert following.count == (following.places < 0).sum()
