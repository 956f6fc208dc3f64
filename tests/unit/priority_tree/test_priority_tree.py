# SPDX-License-Identifier: Apache-2.0
"""Hand-worked trees, the corners of find, and exactness at ten million slots."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numba.core.caching import CacheImpl

from lightning_replay.priority_tree import PriorityTree, numba_kernels, numba_tree

BACKENDS = ["numba", "torch"]


@pytest.fixture(params=BACKENDS)
def tree(request: pytest.FixtureRequest) -> PriorityTree:
    #   slot        0    1    2    3    4   5 ... 99
    #   value       1    0    2    -    4   -
    #   cumulative  1    1    3    3    7   7
    tree = PriorityTree(100, backend=request.param)
    tree.set(torch.tensor([0, 1, 2, 4]), torch.tensor([1.0, 0.0, 2.0, 4.0]))
    return tree


def test_find_is_the_first_slot_whose_cumulative_sum_exceeds_the_prefix(tree: PriorityTree) -> None:
    prefixes = torch.tensor([0.0, 0.999, 1.0, 2.999, 3.0, 6.999], dtype=torch.float64)
    assert tree.find(prefixes).tolist() == [0, 0, 2, 2, 4, 4]


def test_total_and_min(tree: PriorityTree) -> None:
    assert tree.total() == 7.0 and tree.total().dtype is torch.float64 and tree.total().shape == ()
    assert tree.min() == 1.0 and tree.bounds() == (7.0, 1.0)
    tree.remove(torch.tensor([0]))
    assert tree.total() == 6.0 and tree.min() == 2.0


def test_draw_gives_each_value_over_the_smallest(tree: PriorityTree) -> None:
    uniform = torch.tensor([0.2, 0.5], dtype=torch.float64)
    index, ratio = tree.draw(uniform)
    assert index.tolist() == [2, 4] and ratio.tolist() == [2.0, 4.0]
    index, ratio = tree.draw(uniform, over_batch=True)
    assert index.tolist() == [2, 4] and ratio.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("index", "priority"),
    [([0, 100], [1, 1]), ([0, -2], [1, 1]), ([0, 1], [1, -1]), ([0, 1], [1, np.nan]), ([0, 1], [np.inf, 1])],
)
def test_set_checked_writes_nothing_when_an_entry_is_unsound(tree: PriorityTree, index: list, priority: list) -> None:
    before = tree.leaves()
    values = torch.tensor(priority, dtype=torch.float32)
    assert tree.set_checked(torch.tensor(index), values, 100) is None
    assert torch.equal(tree.leaves(), before) and tree.total() == 7.0


def test_checked_writes_skip_minus_one(tree: PriorityTree) -> None:
    values = torch.tensor([50.0, 3.0])
    assert tree.set_checked(torch.tensor([-1, 0]), values, 100) == 3.0
    assert tree.set_checked(torch.tensor([-1, -1]), values, 100) < 0
    assert tree.fill_checked(torch.tensor([-1, 5]), 1.0, 100) and tree.fill_checked(-1, 50.0, 100)
    assert tree.total() == 3 + 2 + 4 + 1


def test_fill_checked_takes_runs_wrapped_runs_and_single_slots(tree: PriorityTree) -> None:
    tree.clear()
    assert tree.fill_checked(torch.arange(10, 90), 0.5, 100) and tree.total() == 40
    assert tree.fill_checked(torch.tensor([98, 99, 0, 1]), 2.0, 100) and tree.total() == 48
    assert tree.fill_checked(50, 1.5, 100) and tree.total() == 49
    assert not tree.fill_checked(100, 1.0, 100)
    assert not tree.fill_checked(torch.tensor([99, 100]), 1.0, 100) and tree.total() == 49


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_small_value_beside_a_large_sum_is_reachable(backend: str) -> None:
    tree = PriorityTree(3, backend=backend)
    tree.set(torch.arange(3), torch.tensor([1e8, 1e-6, 1e8]))  # a float32 sum holds multiples of 8 here
    assert tree.find(torch.tensor([1e8 + 5e-7], dtype=torch.float64)).tolist() == [1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("capacity", [1, 64, 4097, 270_000])
def test_every_slot_of_every_size_is_found(backend: str, capacity: int) -> None:
    tree = PriorityTree(capacity, backend=backend)
    tree.set(torch.arange(capacity), 1.0)
    assert torch.equal(tree.find(torch.arange(capacity) + 0.5), torch.arange(capacity))


def _positive_and_reachable(capacity: int, updates: int, backend: str) -> None:
    """Multiples of 2**-28 below 1 add up to less than 2**25 without rounding: each slot can be asked for exactly."""
    rng = np.random.default_rng(0)
    tree = PriorityTree(capacity, backend=backend)
    tree.set(torch.arange(capacity), 1.0)
    for _ in range(updates // 1_000_000):
        index = torch.from_numpy(rng.integers(0, capacity, 1_000_000))
        value = (np.floor(rng.random(1_000_000) ** 16 * 2**24) * 2.0**-28).astype(np.float32)
        tree.set(index, torch.from_numpy(value))
    leaves = tree.leaves().abs().double()
    assert leaves.eq(0).any() and leaves[leaves > 0].min() < 1e-7
    assert tree.total() == leaves.sum()
    positive = torch.nonzero(leaves).squeeze(1)
    before = leaves.cumsum(0).sub_(leaves)
    assert torch.equal(tree.find(before[positive]), positive)


@pytest.mark.slow
def test_ten_million_slots_after_ten_million_updates_numba() -> None:
    _positive_and_reachable(10_000_000, 10_000_000, "numba")


@pytest.mark.slow
def test_a_million_slots_after_a_million_updates_torch() -> None:
    _positive_and_reachable(1_000_000, 1_000_000, "torch")


def test_values_of_every_size_are_found_and_zeros_never() -> None:
    """Values below 2**-62 of the sum are rounded up, so that none becomes 0; the points lie beside each of them."""
    tree = PriorityTree(7, device="cpu", backend="torch")
    #   slot   0  1      2  3     4  5       6
    #   value  0  1e-45  0  3e38  0  1e-20   0
    tree.set(torch.tensor([1, 3, 5]), torch.tensor([1e-45, 3e38, 1e-20]))
    cumulative, _ = tree._backend._cumulative()
    assert cumulative.diff(prepend=torch.zeros(1, dtype=torch.int64)).gt(0).tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert int(cumulative[-1]) < 2**63 - 2**61
    found, _ = tree.draw(torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))
    assert found.tolist() == [1, 3, 3]
    tree.set(torch.tensor([3]), torch.tensor([0.0]))
    assert tree.draw(torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))[0].tolist() == [1, 5, 5]
    tree.clear()
    assert tree.find(torch.tensor([0.0, 1.0])).tolist() == [0, 0] and not tree.has_mass()


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_has_the_leaves_alone_and_brings_the_sums_back(backend: str) -> None:
    tree = PriorityTree(1_000, backend=backend)
    tree.set(torch.arange(0, 900), torch.rand(900))
    tree.remove(torch.arange(5))
    state = tree.state_dict()
    assert list(state) == ["leaves"]
    again = PriorityTree(1_000, backend="torch" if backend == "numba" else "numba")
    again.load_state_dict(state)
    assert float(again.total()) == pytest.approx(float(tree.total()), rel=1e-14)
    assert again.min() == tree.min()
    with pytest.raises(ValueError, match="1000 slots are saved, this tree has 10"):
        PriorityTree(10, backend=backend).load_state_dict(state)


def test_bytes_are_those_of_leaves_and_a_few_levels() -> None:
    assert PriorityTree(1_000_000, backend="torch").nbytes == 4_000_004
    assert 4_000_000 < PriorityTree(1_000_000, backend="numba").nbytes < 5_000_000


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="backend='numba' runs on the CPU only"):
        PriorityTree(4, backend="numba", device="meta")
    with pytest.raises(ValueError, match="device is 'meta', which keeps no values"):
        PriorityTree(4, device="meta")


@pytest.mark.slow
def test_kernels_compile_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[object] = []

    def nowhere(*given: object) -> None:
        refused.append(given)
        raise RuntimeError("cannot cache function: no locator available for file")

    monkeypatch.setattr(CacheImpl, "__init__", nowhere)
    monkeypatch.setattr(numba_tree, "kernels", SimpleNamespace(**runpy.run_path(numba_kernels.__file__)))
    tree = PriorityTree(4, backend="numba")
    tree.set(torch.tensor([1]), 2.0)
    assert tree.total() == 2.0 and refused


def test_the_tree_pickles_with_its_contents(tree: PriorityTree) -> None:
    import copy

    again = copy.deepcopy(tree)
    again.set(torch.tensor([10]), 3.0)
    assert again.total() == 10.0 and tree.total() == 7.0


@pytest.mark.gpu
def test_a_cuda_graph_draws_and_updates() -> None:
    tree = PriorityTree(100_000, device="cuda")
    tree.set(torch.arange(100_000, device="cuda"), 1.0)
    uniform = torch.rand(512, dtype=torch.float64, device="cuda")
    priority = torch.rand(512, device="cuda")
    tree.draw(uniform)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        index, _ = tree.draw(uniform)
        tree.set(index, priority)
    for _ in range(3):
        uniform.uniform_()
        priority.uniform_()
        graph.replay()
    torch.cuda.synchronize()
    assert float(tree.total()) == pytest.approx(float(tree.leaves().double().sum()), rel=1e-12)
