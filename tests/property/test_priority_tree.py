# SPDX-License-Identifier: Apache-2.0
"""Both back ends of the priority tree against a plain array, over any sequence of writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay.priority_tree import PriorityTree
from tests.oracles import PriorityOracle

# Multiples of 1/8 below 2**20 add up without rounding, whatever the order: answers must be equal, not close.
EXACT_VALUES = st.one_of(st.just(0.0), st.integers(1, 2**22).map(lambda eighths: eighths / 8))
CAPACITIES = st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 300, 5_000])


@st.composite
def writes(draw: st.DrawFn) -> tuple[int, list[tuple[str, list[int], list[float]]]]:
    capacity = draw(CAPACITIES)
    slots = st.lists(st.integers(0, capacity - 1), min_size=1, max_size=40)
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["set", "set", "fill", "checked", "remove", "clear"]))
        index = draw(slots)
        if kind == "fill" and draw(st.booleans()):
            index = list(range(index[0], min(index[0] + len(index) * 5, capacity)))
        steps.append((kind, index, draw(st.lists(EXACT_VALUES, min_size=len(index), max_size=len(index)))))
    return capacity, steps


def _apply(tree: PriorityTree, oracle: PriorityOracle, kind: str, index: list[int], value: list[float]) -> None:
    slots = torch.tensor(index)
    if kind == "clear":
        tree.clear()
        oracle.values[:] = 0.0
    elif kind == "remove":
        tree.remove(slots)
        oracle.values[index] = 0.0
    elif kind == "fill":
        assert tree.fill_checked(slots, value[0], tree.capacity)
        oracle.set(index, [value[0]] * len(index))
    elif kind == "checked":
        values = torch.tensor(value)
        assert float(tree.set_checked(slots, values, tree.capacity)) == max(value)
        oracle.set(index, value)
    else:
        tree.set(slots, torch.tensor(value))
        oracle.set(index, value)


def _assert_equal(tree: PriorityTree, oracle: PriorityOracle, uniform: np.ndarray) -> None:
    assert float(tree.total()) == oracle.total()
    assert float(tree.min()) == oracle.min()
    np.testing.assert_array_equal(tree.get(torch.arange(tree.capacity)).numpy(), oracle.values)
    assert tree.has_mass() == (oracle.total() > 0)
    if tree.has_mass():
        edges = np.cumsum(oracle.values)
        prefixes = np.concatenate([uniform * oracle.total(), edges, edges - 1 / 16, [0.0, 2 * oracle.total()]])
        prefixes = np.maximum(prefixes, 0.0)
        found = tree.find(torch.from_numpy(prefixes)).numpy()
        np.testing.assert_array_equal(found, oracle.find(prefixes))
        assert (oracle.values[found] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["numba", "torch"])
@settings(max_examples=40)
@given(
    sequence=writes(),
    uniform=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20),
)
def test_equals_the_oracle(backend, sequence, uniform) -> None:
    capacity, steps = sequence
    tree, oracle = PriorityTree(capacity, backend=backend), PriorityOracle(capacity)
    for kind, index, value in steps:
        _apply(tree, oracle, kind, index, value)
        _assert_equal(tree, oracle, np.array(uniform))
    again = PriorityTree(capacity, backend=backend)
    again.load_state_dict(tree.state_dict())
    _assert_equal(again, oracle, np.array(uniform))


@pytest.mark.parametrize("backend", ["numba", "torch"])
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    capacity=st.sampled_from([40, 3_000, 300_000]),
    written=st.sampled_from([5, 500]),  # few: blocks of the levels above the lowest are picked, too
    exponent=st.floats(-30, 30),
)
def test_root_equals_the_sum_of_the_leaves(backend, seed, capacity, written, exponent) -> None:
    rng = np.random.default_rng(seed)
    tree = PriorityTree(capacity, backend=backend)
    for _ in range(3):
        index = torch.from_numpy(rng.integers(0, capacity, written))
        tree.set(index, torch.from_numpy((rng.random(written) ** 8 * 10.0**exponent).astype(np.float32)))
    leaves = tree.leaves().abs().double()
    assert float(tree.total()) == pytest.approx(float(leaves.sum()), rel=1e-12)
    found = tree.find(torch.from_numpy(rng.random(2_000)) * tree.total() * 1.001)
    assert (tree.get(found) > 0).all()
