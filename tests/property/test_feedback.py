# SPDX-License-Identifier: Apache-2.0
"""TD errors in one pass over a batch beside the general way, over random histories with late and bad rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay import PackedStorage, Replay
from lightning_replay import feedback as priority_updates
from lightning_replay.samplers import PrioritizedSampler
from tests.transitions import numbered_steps

CAPACITY = 6

slots, numbers, behind = st.integers(0, CAPACITY - 1), st.floats(-8, 8, width=32), st.sampled_from([0, 0, 0, 1])
# Slot, TD error, and by how much the generation given is behind that of the slot.
sound_rows = st.lists(st.tuples(slots, numbers, behind), min_size=1, max_size=8)
bad_slots = st.tuples(st.sampled_from([-1, -2, CAPACITY, 2**40]), numbers, behind)
bad_errors = st.tuples(slots, st.sampled_from([np.nan, np.inf, -np.inf, 3e38]), behind)
rows = st.tuples(st.just([]) | sound_rows, bad_slots | bad_errors).map(lambda parts: [*parts[0], parts[1]])
feedback = st.tuples(
    st.just([]) | rows | sound_rows | sound_rows, st.sampled_from(["flat", "column", "gradient", "float64", "none"])
)
histories = st.lists(st.integers(1, 9) | feedback | feedback, min_size=1, max_size=12)


def _replay(exponent: float, offset: float, backend: str) -> Replay:
    sampler = PrioritizedSampler(CAPACITY, exponent, priority_offset=offset, backend=backend, seed=0)
    return Replay(storage=PackedStorage(CAPACITY), sampler=sampler, batch_size=2)


def _outcome(replay: Replay, given_rows: list, form: str, *, carefully: bool = False) -> tuple[type, str] | None:
    index = torch.tensor([slot for slot, _, _ in given_rows], dtype=torch.int64)
    td_error = torch.tensor([error for _, error, _ in given_rows], dtype=torch.float32)
    generation: Any = replay.storage.generation_of(index.clamp(0, CAPACITY - 1))
    generation -= torch.tensor([behind for _, _, behind in given_rows], dtype=torch.int64)
    if form == "column":
        td_error = td_error.unsqueeze(1)
    elif form == "gradient":
        td_error.requires_grad_()
    elif form == "float64":
        td_error = td_error.double()
    elif form == "none":
        generation = None
    if carefully:  # which the pass over a batch as it was drawn does not take
        td_error = td_error.double()
    try:
        replay.update_priority(index, td_error, generation=generation)
    except (ValueError, IndexError) as error:
        return type(error), str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize(("exponent", "offset"), [(0.6, 1e-6), (1.0, 0.0), (0.0, 0.0), (3.0, 0.5)])
@settings(max_examples=50, deadline=None)
@given(history=histories)
def test_one_pass_is_the_general_way(backend: str, exponent: float, offset: float, history: list) -> None:
    one_pass, general = _replay(exponent, offset, backend), _replay(exponent, offset, backend)
    written = 0
    for event in (CAPACITY - 2, *history):
        if isinstance(event, int):
            for replay in (one_pass, general):
                replay.extend(numbered_steps(written, event, done_every=0))
            written += event
        else:
            assert _outcome(one_pass, *event) == _outcome(general, *event, carefully=True)
        trees = [replay.sampler.state_dict()["tree"]["leaves"] for replay in (one_pass, general)]
        assert torch.equal(*trees)
        totals = [replay.group_totals() for replay in (one_pass, general)]
        assert totals[0].mass == totals[1].mass and totals[0].smallest == totals[1].smallest
        assert one_pass.sampler.default_priority == general.sampler.default_priority
        assert one_pass.stats() == general.stats()
        assert one_pass.awaits_priorities == general.awaits_priorities


def test_sound_batches_take_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above compares two ways."""
    replay = _replay(0.6, 1e-6, "numba")
    replay.extend(numbered_steps(0, 5, done_every=0))
    monkeypatch.setattr(priority_updates, "magnitudes", None)
    batch = replay.sample()
    replay.update_priority(batch, torch.randn(2))
    replay.update_priority(batch["index"], torch.randn(2, 1), generation=batch["generation"])
    replay.update_tensordict_priority(batch.set("td_error", torch.randn(2)))
    assert replay.stats()["priorities_updated"] == 6


class Doubled(PrioritizedSampler):
    """A subclass that sets priorities in its own way."""

    def set_priorities(self, slots: torch.Tensor, magnitudes: torch.Tensor, storage: Any) -> None:
        super().set_priorities(slots, 2 * magnitudes, storage)


def test_a_subclass_sets_its_own_priorities_or_is_refused() -> None:
    sampler = Doubled(CAPACITY, 1.0, priority_offset=0.0, seed=0)
    replay = Replay(storage=PackedStorage(CAPACITY), sampler=sampler, batch_size=2)
    replay.extend(numbered_steps(0, 5, done_every=0))
    replay.update_priority(replay.sample(), torch.full((2,), 3.0))
    assert sampler.default_priority == 6.0
    mine = type("Mine", (PrioritizedSampler,), {"update_priority": lambda self, index, priority, storage=None: None})
    with pytest.raises(TypeError, match=r"Mine defines update_priority, which Replay does not call; define set_prio"):
        Replay(storage=PackedStorage(CAPACITY), sampler=mine(CAPACITY), batch_size=2)
