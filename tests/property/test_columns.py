# SPDX-License-Identifier: Apache-2.0
"""Rows given as columns and rows given as a TensorDict: one buffer, to the last bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay.storage.columns import ONE_EACH
from tests.attack.refusals import REASONS, STATES, refusals
from tests.attack.states import difference, fingerprint
from tests.attack.variants import VARIANTS, Variant
from tests.twins import Twins

HISTORY = st.lists(
    st.tuples(st.sampled_from(["extend", "feed back", "flush", "empty", "refuse"]), st.integers(0, 30)),
    min_size=1,
    max_size=14,
)


def columns_of(rows: TensorDict, kind: int = 0) -> dict[Any, Any]:
    """Tensors, arrays, names as tuples, arrays of another order and other strides, or columns that buffers complete."""
    columns: dict[Any, Any] = dict(rows.items(True, True))
    if kind >= 4:
        completed = shortened(columns)
        return {key: value.numpy() for key, value in completed.items()} if kind == 4 else completed
    if kind == 1:
        return {key: value.numpy() for key, value in columns.items()}
    if kind == 2:
        columns = dict(reversed(columns.items()))
        return {(key,) if isinstance(key, str) else key: value.numpy() for key, value in columns.items()}
    if kind == 3:
        return {key: np.flip(np.flip(value.numpy(), 0).copy(), 0) for key, value in columns.items()}
    return columns


def shortened(columns: dict[Any, Any]) -> dict[Any, Any]:
    """Leaves ``done`` out, which follows from the other flags, and gives rewards and flags as ``[N]``."""
    flat = {key: value.squeeze(-1) if key in ONE_EACH and value.ndim == 2 else value for key, value in columns.items()}
    ends = [flat[key] for key in (("next", "terminated"), ("next", "truncated")) if key in flat]
    if ends and torch.equal(flat["next", "done"], ends[0] | ends[-1]):
        del flat["next", "done"]
    return flat


class Pairs(Twins):
    """They get columns and TensorDicts."""

    def extend(self, count: int) -> None:
        rows = self.world.take(count + 1)
        by_columns, other = self.replays
        kind = count % 6 if by_columns.storage.layout else 0  # the first columns set their order
        slots = [by_columns.extend_columns(columns_of(rows, kind)), other.extend(rows)]
        assert slots[0].dtype == slots[1].dtype and slots[0].tolist() == slots[1].tolist()
        assert len({str(replay.last_insertion) for replay in self.replays}) == 1

    def refuse(self, number: int) -> None:
        """Rows that are refused change nothing and get one message, whichever way they are given."""
        offered = refusals(self.replays[0], self.variant).items()
        left_out = {*STATES, "no TensorDict", "rows of two dimensions"}  # which columns cannot express
        found = [call for name, call in offered if name not in left_out]
        call, rows = found[number % len(found)], self.variant.world(7).take(3)
        messages = []
        for place, replay in enumerate(self.replays):
            before = replay.state_dict()
            try:
                if place == 0:
                    call(_ByColumns(replay), rows)
                else:
                    call(replay, rows)
            except REASONS as error:
                messages.append((type(error), str(error)))
            assert difference(before, replay.state_dict()) is None
        assert len(messages) == 2
        assert messages[0] == messages[1] or "extend_columns takes" in messages[0][1]

    def check(self) -> None:
        states = [replay.state_dict() for replay in self.replays]
        assert difference(states[0], states[1]) is None
        assert len({fingerprint(replay.stats()) for replay in self.replays}) == 1


class _ByColumns:
    """A buffer whose rows are given as columns."""

    def __init__(self, replay: Any) -> None:
        self._replay = replay

    def extend(self, rows: TensorDict) -> torch.Tensor:
        return self._replay.extend_columns(columns_of(rows, 1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replay, name)


@pytest.mark.slow
@settings(max_examples=65)
@given(variant=st.sampled_from(VARIANTS), history=HISTORY)
def test_columns_are_stored_as_the_rows_they_make(variant: Variant, history: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pairs = Pairs(variant, Path(folder))
        pairs.go(history)
        pairs.check()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_recipe_stores_columns(variant: Variant, tmp_path: Path) -> None:
    pairs = Pairs(variant, tmp_path)
    for count in (0, 2, 10, 11, 0, 4, 1, 5, 29, 0):
        pairs.extend(count)
        pairs.feed_back(0)
        pairs.refuse(count)
    pairs.check()
