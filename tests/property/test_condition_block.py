# SPDX-License-Identifier: Apache-2.0
"""Conditions evaluated together, compiled and in NumPy, against each condition called by itself."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay import events
from lightning_replay.events.compiled import ConditionBlock
from lightning_replay.storage import PackedStorage

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool]
numbers = st.sampled_from([-math.inf, -1e300, -1.0, -0.1, 0.0, 0.1, 0.5, 1.0, 2.0, 3.0, 16777217.0, 1e300, math.nan])
thresholds = numbers.filter(math.isfinite)
bounds = st.one_of(st.none(), thresholds)


@st.composite
def regions(draw) -> object:
    pairs = [sorted(draw(st.tuples(thresholds, thresholds))) for _ in range(2)]
    low = [pair[0] if draw(st.booleans()) else None for pair in pairs]
    high = [pair[1] if draw(st.booleans()) or low == [None, None] else None for pair in pairs]
    return events.key_in_region(("next", "observation"), low, high)


single = st.one_of(
    st.builds(events.reward_at_least, thresholds),
    st.builds(events.reward_below, thresholds),
    st.builds(events.terminal_with_reward, thresholds),
    st.builds(events.info_key, st.sampled_from(["score", ("deep", "flag")]), thresholds),
    regions(),
)
several_conditions = st.recursive(
    single,
    lambda inner: st.builds(
        lambda combine, parts: combine(*parts),
        st.sampled_from([events.every_of, events.any_of]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=5,
)


def column(draw: st.DrawFn, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    given = draw(st.lists(numbers, min_size=count * width, max_size=count * width))
    values = torch.tensor(given, dtype=torch.float64).reshape(count, width)
    return values.to(dtype) if dtype.is_floating_point else values.nan_to_num(3.0).clamp(0, 200).to(dtype)


@st.composite
def steps(draw) -> TensorDict:
    count, kinds = draw(st.integers(1, 5)), st.sampled_from(DTYPES)
    following = {
        "reward": column(draw, count, 1, draw(kinds)),
        "observation": column(draw, count, 2, draw(kinds)),
        "terminated": column(draw, count, 1, torch.bool),
        "score": column(draw, count, 1, draw(kinds)).reshape(count),
        "deep": {"flag": column(draw, count, 1, torch.bool)},
    }
    return TensorDict({"next": following}, [count])


@settings(max_examples=100, deadline=None)
@given(rows=steps(), several=st.lists(several_conditions, min_size=1, max_size=6))
def test_a_block_of_conditions_is_each_of_them(rows, several) -> None:
    storage = PackedStorage(8)
    values = storage.checked_values(rows)
    block = ConditionBlock(several, storage.row_columns)
    assert block.others == []
    for condition, found in zip(several, block(values), strict=True):
        assert found.tolist() == events.holds(condition, rows).tolist(), condition


class Inverted(events.reward_at_least):
    """A user's subclass, whose call differs."""

    def __call__(self, steps):
        return ~super().__call__(steps)


def test_other_conditions_are_left_to_be_called() -> None:
    """A function, a subclass, memory, columns that are missing or have too many components."""
    rows = TensorDict({"next": {"reward": torch.ones(2, 1), "observation": torch.ones(2, 2)}}, [2])
    storage = PackedStorage(8)
    values = storage.checked_values(rows)
    others = [
        lambda steps: steps["next", "reward"] > 0,
        Inverted(0.5),
        events.first_in_episode(events.reward_at_least(0.5)),
        events.info_key("missing"),
        events.terminal_with_reward(0.5),
        events.key_in_region(("next", "observation"), [0.0, 0.0, 0.0]),
        events.every_of(events.reward_at_least(0.5), Inverted(0.5)),
    ]
    block = ConditionBlock([events.reward_below(2.0), *others, events.reward_below(1.0)], storage.row_columns)
    assert block.others == [1, 2, 3, 4, 5, 6, 7]
    assert block(values)[[0, 8]].tolist() == [[True, True], [False, False]]
