# SPDX-License-Identifier: Apache-2.0
"""A buffer of sequences of different lengths holds and draws what a list of rows does, first in, first out."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay import load_replay
from tests.ragged_rows import columns, log_prob_of, ragged, rows, sequences_of, tokens_of

CAPACITY, ELEMENTS = 6, 12
LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=9).filter(lambda lengths: sum(lengths) <= ELEMENTS)
FORMS = st.sampled_from(["jagged", "strided", "list"])
CALLS = st.one_of(
    st.tuples(st.just("extend"), LENGTHS, FORMS),
    st.tuples(st.just("draw")),
    st.tuples(st.just("save")),
    st.tuples(st.just("empty")),
)


def kept(lengths: dict[int, int]) -> dict[int, int]:
    """Returns the newest rows that fit, lengths by number: the oracle."""
    newest: dict[int, int] = {}
    for number, length in reversed(lengths.items()):
        if len(newest) == CAPACITY or sum(newest.values()) + length > ELEMENTS:
            break
        newest[number] = length
    return dict(reversed(newest.items()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(CALLS, min_size=4, max_size=20),
    recipe=st.sampled_from(["uniform", "prioritized"]),
    options=st.sampled_from([{}, {"jagged": True}, {"prefetch": 2}, {"age": {"half_life": 3.0}}]),
)
def test_holds_and_draws_the_newest_rows_that_fit(calls: list[Any], recipe: str, options: dict[str, Any]) -> None:
    replay = ragged(recipe, element_capacity=ELEMENTS, **options)
    held: dict[int, int] = {}
    count = 0
    for name, *arguments in calls:
        if name == "extend":
            lengths, form = arguments
            if form == "list":
                replay.extend_columns(columns(lengths, count))
            else:
                replay.extend(rows(lengths, count, getattr(torch, form)))
            held = kept(held | dict(enumerate(lengths, count)))
            count += len(lengths)
        elif name == "empty":
            replay.empty()
            held = {}
        elif name == "save" and held:
            with tempfile.TemporaryDirectory() as folder:
                replay.save(folder)
                loaded = load_replay(folder)
            one, other = replay.sample(), loaded.sample()
            assert torch.equal(one["index"], other["index"]) and torch.equal(one["generation"], other["generation"])
            replay = loaded
        elif name == "draw" and held:
            batch = replay.sample()
            drawn = sequences_of(batch)
            if "prefetch" not in options:  # which draws before the rows that came last
                assert {number for number, _, _ in drawn} <= held.keys()
                for number, tokens, log_prob in drawn:
                    assert torch.equal(tokens, tokens_of(number, held[number]))
                    assert torch.equal(log_prob, log_prob_of(number, held[number]))
            replay.update_priority(batch, batch["number"].float())
        slots = replay.storage.occupancy.slots()
        stored = sequences_of(replay.storage.get(slots)) if len(slots) else []
        assert {number: len(tokens) for number, tokens, _ in stored} == held
        for number, tokens, log_prob in stored:
            assert torch.equal(tokens, tokens_of(number, len(tokens)))
            assert torch.equal(log_prob, log_prob_of(number, len(tokens)))
        assert replay.stats()["elements_held"] == sum(held.values())
