# SPDX-License-Identifier: Apache-2.0
"""Groups that are stored, fresh, of which priority, and in a batch are those of lists that hold whole groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay import Replay, recipes

CAPACITY = 5
SIZE = 3
OLD = float("inf")


class Oracle:
    """Keeps the numbers of the stored groups, oldest first, with the priority, turns, and version of each."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.priority: dict[int, float] = {}
        self.turns: dict[int, float] = {}
        self.version: dict[int, int] = {}
        self.given = 0

    def extend(self, groups: int, version: int) -> None:
        largest = max(self.seen, default=0.0) or 1.0
        self.turns = {group: turns and OLD for group, turns in self.turns.items()}
        for _ in range(groups):
            self.stored.append(self.given)
            self.priority[self.given] = largest
            self.turns[self.given] = 0
            self.version[self.given] = version
            self.given += 1
        self.stored = self.stored[-CAPACITY:]

    seen: tuple[float, ...] = ()

    def update(self, groups: list[int], errors: list[float]) -> None:
        for group in set(groups) & set(self.stored):
            own = [abs(error) for each, error in zip(groups, errors, strict=True) if each == group]
            self.priority[group] = sum(own) / len(own)
            self.seen += (self.priority[group],)

    def drawable(self, max_age: int | None) -> list[int]:
        newest = self.version[self.stored[-1]]
        return [group for group in self.stored if max_age is None or newest - self.version[group] <= max_age]

    def fresh(self, wanted: int, max_age: int | None) -> list[int]:
        chosen = sorted(self.drawable(max_age), key=lambda group: (self.turns[group], -group))[:wanted]
        for group in chosen:
            self.turns[group] += 1
        return chosen


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(1, CAPACITY + 2), st.integers(0, 2)),
        st.tuples(st.just("draw"), st.integers(1, 4)),
        st.tuples(st.just("update"), st.lists(st.integers(-8, 8), min_size=1, max_size=9)),
        st.tuples(st.just("save")),
        st.tuples(st.just("refused"), st.integers(1, SIZE - 1)),
    ),
    max_size=12,
)


def rows(first: int, groups: int, version: int) -> TensorDict:
    number = torch.arange(first * SIZE, (first + groups) * SIZE)
    return TensorDict({"group": number // SIZE, "place": number % SIZE, "version": number * 0 + version}, [len(number)])


def built(**options: Any) -> Replay:
    return recipes.groups(CAPACITY * SIZE, 2 * SIZE, group_size=SIZE, seed=1, **options)


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("fresh_share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("max_age", [None, 1])
@settings(max_examples=25)
@given(operations=OPERATIONS)
def test_a_buffer_of_groups_is_the_lists(
    operations: list[tuple[Any, ...]], max_age: int | None, fresh_share: float, replace: bool
) -> None:
    age = None if max_age is None else {"max_age": max_age, "version_key": "version"}
    options = {"fresh_share": fresh_share, "replace": replace, "priority_exponent": 1.0, "age": age}
    replay, oracle = built(**options), Oracle()
    version = 0
    for name, *arguments in [("extend", 2, 0), *operations]:
        if name == "extend":
            groups, later = arguments
            version += later
            replay.extend(rows(oracle.given, groups, version))
            oracle.extend(groups, version)
        elif name == "refused":
            with pytest.raises(ValueError, match="Nothing was stored"):
                replay.extend(rows(oracle.given, 2, version)[: SIZE + arguments[0]])
        elif name == "save":
            other = built(**options)
            other.load_state_dict(replay.state_dict())
            replay = other
        elif name == "update":
            slots = torch.arange(len(arguments[0])) % len(replay)
            errors = torch.tensor(arguments[0], dtype=torch.float32)
            oracle.update(replay[:]["group"][slots].tolist(), errors.tolist())
            replay.update_priority(slots, errors)
        else:
            count = arguments[0]
            drawable = oracle.drawable(max_age)
            fresh = oracle.fresh(-int(-count * fresh_share // 1), max_age) if fresh_share else []
            if not replace and count > len(drawable):
                with pytest.raises(RuntimeError, match=f"needs {count} different groups, and {len(drawable)} of"):
                    replay.sample(count * SIZE)
                continue
            batch = replay.sample(count * SIZE)
            assert torch.equal(batch["place"].view(count, SIZE), torch.arange(SIZE).expand(count, SIZE))
            groups_of = batch["group"].view(count, SIZE)
            assert (groups_of == groups_of[:, :1]).all()
            drawn = groups_of[:, 0].tolist()
            assert drawn[: len(fresh)] == fresh and set(drawn) <= set(drawable)
            assert replace or len(set(drawn)) == count
        assert sorted(set(replay[:]["group"].tolist())) == sorted(oracle.stored)
        slots = torch.arange(len(replay))
        expected = [oracle.priority[group] for group in replay[:]["group"].tolist()]
        assert torch.allclose(replay.sampler.priority_of(slots), torch.tensor(expected), atol=1e-4)
        if fresh_share:
            assert replay.stats()["groups_waiting"] == sum(oracle.turns[group] == 0 for group in oracle.stored)


RAGGED = {
    "fresh": {"fresh_share": 0.5},
    "uniform": {},
    "different": {"replace": False},
    "pass": {"replace": "pass"},
    "priority": {"priority_exponent": 1.0},
    "age": {"age": {"half_life": 2.0}},
}


@pytest.mark.parametrize("options", RAGGED.values(), ids=RAGGED)
@settings(max_examples=25)
@given(
    steps=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=12), loads=st.booleans()
)
def test_groups_of_sequences_leave_whole_to_make_room_for_elements(
    options: dict[str, Any], steps: list[list[int]], loads: bool
) -> None:
    room = 30

    def ragged() -> Replay:
        return built(ragged=["tokens"], element_capacity=room, **options)

    replay = ragged()
    stored: list[tuple[int, int]] = []  # number and elements of each group that is held
    given = 0
    for lengths in steps:
        # The rows of a group have L, L + 1, and 0 elements.
        sizes = [(2 * length + 1) for length in lengths]
        if sum(sizes) > room:
            continue
        tokens = [torch.full((size,), given + n) for n, one in enumerate(lengths) for size in (one, one + 1, 0)]
        number = torch.arange(given, given + len(lengths)).repeat_interleave(SIZE)
        replay.extend_columns({"tokens": tokens, "group": number})
        stored += [(given + n, size) for n, size in enumerate(sizes)]
        given += len(lengths)
        while len(stored) > CAPACITY or sum(size for _, size in stored) > room:
            stored.pop(0)
        assert len(replay) == len(stored) * SIZE
        if loads:
            state = replay.state_dict()
            replay = ragged()
            replay.load_state_dict(state)
        if len(stored) >= 2:
            batch = replay.sample()
            groups = batch["group"].view(-1, SIZE)
            assert (groups == groups[:, :1]).all()
            assert {*groups[:, 0].tolist()} <= {group for group, _ in stored}
            assert torch.equal(
                batch["tokens"][batch["mask"]], batch["group"].unsqueeze(1).expand_as(batch["mask"])[batch["mask"]]
            )
            if options.get("replace") is False:
                assert len({*groups[:, 0].tolist()}) == 2
