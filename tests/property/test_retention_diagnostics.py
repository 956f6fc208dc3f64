# SPDX-License-Identifier: Apache-2.0
"""The figures of kept rows beside the newest, next to a list of all rows, for any sequence of calls."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay import PackedStorage, Replay, load_replay, save_replay
from lightning_replay.writers import RetentionWriter, SurpriseOnly
from tests.stored import stored_rows


@dataclass
class Row:
    """An offered row."""

    is_end: bool
    error: float | None


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def expected(rows: list[Row], kept: list[int], capacity: int) -> dict[str, float]:
    """The figures from their definitions."""
    newest = rows[-capacity:]
    stored = [rows[number] for number in kept]
    shares = [sum(row.is_end for row in part) / len(part) for part in (stored, newest)]
    errors = [mean([row.error for row in part if row.error is not None]) for part in (stored, newest)]
    figures = {
        "age_over_capacity": mean([len(rows) - 1 - number for number in kept]) / capacity,
        "terminal_share": shares[0],
        "terminal_over_newest": shares[0] / max(shares[1], 1 / capacity),
        "td_error_over_newest": ratio(*errors),
    }
    return {name: value for name, value in figures.items() if value is not None}


def offered_surprise(rows: TensorDict) -> torch.Tensor:
    return rows["error"] ** 2


def rows_of(first: int, rows: list[tuple[bool, float]]) -> TensorDict:
    ends = torch.tensor([end for end, _ in rows]).unsqueeze(1)
    number, error = torch.arange(first, first + len(rows)), torch.tensor([error for _, error in rows])
    return TensorDict({"number": number, "error": error, "next": {"terminated": ends, "done": ends}}, [len(rows)])


@pytest.mark.slow
@settings(max_examples=50)
@given(
    capacity=st.sampled_from([1, 5, 64, 65, 150]),
    knows_surprise=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    calls=st.lists(st.tuples(st.sampled_from(["extend", "feedback", "save"]), st.integers(1, 200)), max_size=12),
)
def test_figures_are_those_of_a_list_of_all_rows(capacity, knows_surprise, seed, calls) -> None:
    generator = torch.Generator().manual_seed(seed)
    writer = RetentionWriter(SurpriseOnly(), initial_surprise=offered_surprise if knows_surprise else None)
    replay = Replay(storage=PackedStorage(capacity), writer=writer, batch_size=1)
    rows: list[Row] = []
    for call, size in [("extend", 3), *calls]:
        places = torch.randint(0, 4, (2, size), generator=generator)
        errors = torch.tensor([0.0, 0.5, 1.0, 3.0])[places[1]]
        if call == "extend":
            ends = [bool(place == 0) for place in places[0]]
            replay.extend(rows_of(len(rows), list(zip(ends, errors.tolist(), strict=True))))
            known = errors.tolist() if knows_surprise else [None] * size
            rows += [Row(end, error) for end, error in zip(ends, known, strict=True)]
        elif call == "feedback":
            slots = torch.randint(0, len(replay), (size,), generator=generator)
            replay.update_priority(slots, -errors)
            for number, error in zip(replay.storage.get(slots)["number"].tolist(), errors.tolist(), strict=True):
                rows[number].error = error
        else:
            with tempfile.TemporaryDirectory() as folder:
                save_replay(replay, folder)
                replay = load_replay(folder, trust=["tests"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of hoarding
            stats = replay.stats()
        kept = stored_rows(replay)["number"].tolist()
        figures = expected(rows, kept, capacity)
        assert {name: value for name, value in stats.items() if name in figures} == pytest.approx(figures)
        assert ("td_error_over_newest" in stats) == ("td_error_over_newest" in figures)
