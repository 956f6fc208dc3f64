# SPDX-License-Identifier: Apache-2.0
"""Neighbour lists against worked cases, the authors' fixture and the definition."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_replay.neighbors import NeighborLists
from lightning_replay.neighbors.search import PointTable, exact_search, faiss_search

FIXTURE = json.loads((Path(__file__).parents[2] / "fixtures" / "nmer_neighbours.json").read_text())
CASES = {case["name"]: case for case in FIXTURE["cases"]}


def filled(features: Tensor, num_neighbors: int, capacity: int | None = None, **options: object) -> NeighborLists:
    lists = NeighborLists(capacity or len(features), num_neighbors, **options)
    lists.write(torch.arange(len(features)), features)
    return lists


def waiting(lists: NeighborLists) -> int:
    return int(lists.state_dict()["upkeep"]["waiting"].sum())


def fixture_features(case: dict) -> Tensor:
    inputs = case["inputs"]
    return torch.tensor(np.concatenate([inputs["states"], inputs["actions"]], 1), dtype=torch.float64)


def walk(steps: int, seed: int = 0) -> Tensor:
    """Random walks through a bent 4-dimensional state space seen in 8 dimensions, and 2 random actions."""
    generator = torch.Generator().manual_seed(seed)
    state, states = torch.zeros(4), []
    for step in range(steps):
        state = 0.95 * state * (step % 200 > 0) + 0.3 * torch.randn(4, generator=generator)
        states.append(state)
    seen = torch.tanh(torch.stack(states) @ torch.randn(4, 8, generator=generator))
    return torch.cat([seen, torch.rand(steps, 2, generator=generator) * 2 - 1], 1)


@pytest.mark.parametrize("refresh_interval", [1, 64])
@pytest.mark.parametrize("name", CASES)
def test_neighbours_are_those_of_the_authors_code(name: str, refresh_interval: int) -> None:
    case = CASES[name]
    lists = filled(fixture_features(case), case["inputs"]["k"], refresh_interval=refresh_interval)
    expected, rows = case["expected"], len(lists)
    found = lists.neighbors(torch.arange(rows))
    for row, nearest in enumerate(expected.get("neighbours_nearest_first", [])):
        assert found[row, : len(nearest)].tolist() == nearest
        assert (found[row, len(nearest) :] == -1).all()
    for row, neighbors in expected.get("neighbour_sets", {}).items():
        assert set(found[int(row)].tolist()) == set(neighbors)


@pytest.mark.parametrize("name", [name for name in CASES if "distances" in CASES[name]["expected"]])
def test_distances_and_statistics_are_those_of_the_authors_code(name: str) -> None:
    case = CASES[name]
    lists = filled(fixture_features(case), case["inputs"]["k"], refresh_interval=1)
    distance, _ = lists._by_definition(torch.arange(len(lists)), case["inputs"]["k"])
    torch.testing.assert_close(distance, torch.tensor(case["expected"]["distances"]).double(), atol=1e-9, rtol=1e-6)
    lists.standardization.refit(fixture_features(case))
    states = len(case["expected"]["mean"])
    for statistic, key in ((lists.standardization.mean, "mean"), (lists.standardization.std, "population_std")):
        torch.testing.assert_close(
            statistic[:states], torch.tensor(case["expected"][key]).double(), atol=1e-9, rtol=1e-6
        )


def test_integers_are_features_too() -> None:
    assert filled(torch.tensor([[0], [1], [5]]), 1).neighbors(torch.arange(3)).tolist() == [[1], [0], [1]]


def test_partners_stay_uniform_when_a_neighbour_was_just_overwritten() -> None:
    lists = filled(torch.arange(20.0).unsqueeze(1), 5, capacity=20)
    index, generator = torch.full((100_000,), 10), torch.Generator().manual_seed(0)
    before = lists.neighbors(torch.tensor([10]))[0]
    lists.write(before[:1], torch.tensor([[1000.0]]))
    counts = torch.bincount(lists.draw(index, generator), minlength=20)
    assert waiting(lists) == 1
    assert counts[before[0]] == 0
    assert ((counts[before[1:]] - 25_000).abs() < 5 * (100_000 * 0.25 * 0.75) ** 0.5).all()


def test_passes_are_fewer_than_insertions_at_twenty_draws_each() -> None:
    data = walk(1260)
    lists = filled(data[:1000], 5, capacity=1260)
    generator = torch.Generator().manual_seed(0)
    lists.neighbors(torch.arange(1000))
    passes = []
    for row in range(1000, 1260):
        lists.write(torch.tensor([row]), data[row : row + 1])
        before = waiting(lists)
        for _ in range(20):
            lists.draw(torch.randint(0, 100, (8,), generator=generator), generator)
        if not waiting(lists):
            passes.append(before)
    assert passes == [64] * (260 // 64)


@pytest.mark.slow
def test_recall_through_growth_and_a_turn_of_the_ring() -> None:
    data, capacity = walk(2400), 900
    lists = filled(data[:400], 10, capacity=capacity)
    generator = torch.Generator().manual_seed(0)
    recalls = []
    for row in range(400, len(data)):
        lists.write(torch.tensor([row % capacity]), data[row : row + 1])
        lists.draw(torch.randint(0, min(row, capacity), (8,), generator=generator), generator)
        if row % 300 == 0:
            recalls.append(lists.recall_at(10, 300, generator))
    assert min(recalls) > 0.96


@pytest.mark.parametrize("tolerance", [0.03, float("inf")])
def test_a_drifted_scale_is_followed_and_lists_are_renewed_unless_any_drift_is_tolerated(tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(1800, 6, generator=generator)
    data[600:] *= torch.tensor([4.0, 0.3, 1.0, 1.0, 1.0, 1.0])
    lists = filled(data[:600], 10, capacity=1800, drift_tolerance=tolerance)
    everything = torch.arange(1800)
    lists.neighbors(everything[:600])
    for block in everything[600:].split(100):
        lists.write(block, data[block])
        lists.neighbors(block)
        assert lists.standardization.drift() <= lists.drift_tolerance
    recall = lists.recall_at(10, 500, generator)
    assert recall > 0.97 if tolerance < 1 else recall < 0.9


def test_lists_are_ranked_anew_at_once_when_the_scale_has_drifted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_replay.neighbors.lists._RENEWAL_DISTANCES", 1)  # hardly any renewal
    data = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
    lists = filled(data, 5, capacity=2000, num_spare=11)
    lists.neighbors(torch.arange(2000))
    data[:64, 0] *= 6.0
    lists.write(torch.arange(64), data[:64])
    lists.neighbors(torch.arange(1))
    assert lists.standardization.drift() == pytest.approx(0.0, abs=1e-6)
    assert lists.recall_at(5, 500, torch.Generator().manual_seed(0)) > 0.97


def test_a_feature_that_becomes_constant_is_ignored_again() -> None:
    data = walk(64)
    data[:, 0] = 3.7
    lists = filled(walk(64) * 1e3, 3, capacity=64)
    lists.neighbors(torch.arange(64))
    for row in range(64):
        lists.write(torch.tensor([row]), data[row : row + 1])
        lists.neighbors(torch.tensor([row]))
    assert lists.standardization.std[0] == 0
    true = filled(data, 3, refresh_interval=1).neighbors(torch.arange(64))
    assert (lists.neighbors(torch.arange(64)) == true).double().mean() > 0.95


def test_statistics_do_not_lose_digits_far_from_zero() -> None:
    data = 1e6 + torch.randn(400, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lists = NeighborLists(100, 3, drift_tolerance=10.0)
    for block in torch.arange(400).split(20):
        lists.write(block % 100, data[block])
        lists.neighbors(block % 100)
    lists.write(torch.arange(40), data[:40] + 5)  # overwritten before any pass saw them
    lists.write(torch.arange(40), 1e6 + 2 * (data[:40] - 1e6))
    assert waiting(lists) == 40
    lists.neighbors(torch.arange(1))
    now = torch.cat([1e6 + 2 * (data[:40] - 1e6), data[340:]])
    change = (now.std(0, correction=0) / lists.standardization.std - 1).abs().max()
    assert lists.standardization.drift() == pytest.approx(float(change), rel=1e-9)


def test_empty_lists_save_load_and_clear() -> None:
    lists = NeighborLists(8, 2)
    lists.load_state_dict(lists.state_dict())
    assert len(lists) == 0 and lists.nbytes == 0
    lists.write(torch.arange(4), torch.randn(4, 3))
    assert len(lists) == 4 and lists.nbytes > 0
    lists.clear()
    lists.write(torch.arange(0), torch.randn(0, 5))
    lists.write(torch.arange(2), torch.randn(2, 5))
    assert len(lists) == 2
    assert lists.draw(torch.arange(0), torch.Generator()).shape == (0,)


def test_a_state_of_other_options_is_refused() -> None:
    state = filled(torch.randn(10, 2), 3).state_dict()
    for other in (NeighborLists(10, 4), NeighborLists(9, 3), NeighborLists(10, 3, refresh_interval=1)):
        with pytest.raises(ValueError, match="Nothing was loaded; build them"):
            other.load_state_dict(state)


@pytest.mark.parametrize(("name", "value"), [("slot", 11), ("slot", -1), ("choices", 4.0), ("choices", torch.nan)])
def test_lists_of_a_damaged_file_are_refused_before_a_loop_reads_them(name: str, value: float) -> None:
    state = filled(torch.randn(10, 2), 3).state_dict()
    lists = filled(torch.randn(10, 2), 3)
    lists.draw(torch.arange(10), torch.Generator())
    state = lists.state_dict()
    lists.load_state_dict(state)
    state["upkeep"]["cache"][name].view(-1)[7] = value
    with pytest.raises(ValueError, match="not those of 10 slots of 10"):
        lists.load_state_dict(state)
    state["upkeep"]["cache"][name] = lists.state_dict()["upkeep"]["cache"][name][:1]
    with pytest.raises(ValueError, match="not those of 10 slots of 10"):
        lists.load_state_dict(state)


@pytest.mark.parametrize(
    ("index", "features", "error", "message"),
    [
        ([3, 4], [[0.0, 1.0], [float("nan"), 0.0]], ValueError, r"slots \[4\] are NaN"),
        ([3], [[0.0, float("inf")]], ValueError, r"slots \[3\]"),
        ([3], [[0.0, 1.0, 2.0]], ValueError, "3 wide and the rows stored 2"),
        ([10], [[0.0, 1.0]], IndexError, r"slots \[10\] do not exist; accepted are 0 to 9"),
        ([-1], [[0.0, 1.0]], IndexError, r"slots \[-1\]"),
        ([3, 3], [[0.0, 1.0], [0.0, 2.0]], ValueError, "twice"),
        ([3], [[0.0, 1.0], [0.0, 1.0]], ValueError, "shape"),
    ],
)
def test_bad_rows_are_refused_and_nothing_is_lost(
    index: list[int], features: list, error: type[Exception], message: str
) -> None:
    lists = filled(torch.randn(6, 2), 2, capacity=10)
    before = lists.neighbors(torch.arange(6))
    with pytest.raises(error, match=message):
        lists.write(torch.tensor(index), torch.tensor(features))
    assert len(lists) == 6
    assert torch.equal(lists.neighbors(torch.arange(6)), before)


@pytest.mark.parametrize("refresh_interval", [1, 64])
@pytest.mark.parametrize(("slot", "message"), [(10, "do not exist"), (-1, "do not exist"), (8, "hold no row")])
def test_drawing_for_slots_without_a_row_is_refused(slot: int, message: str, refresh_interval: int) -> None:
    lists = filled(torch.randn(6, 2), 2, capacity=10, refresh_interval=refresh_interval)
    with pytest.raises(IndexError, match=message):
        lists.draw(torch.tensor([0, slot]), torch.Generator())
    with pytest.raises(IndexError, match="hold no row"):
        NeighborLists(10, 2, refresh_interval=refresh_interval).draw(torch.tensor([0]), torch.Generator())


def test_an_inexact_definition_is_refused() -> None:
    with pytest.raises(ValueError, match="refresh_interval=1"):
        NeighborLists(10, 2, backend="faiss_flat", refresh_interval=1)


def test_missing_faiss_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-replay\[faiss-[cg]pu\]'"):
        NeighborLists(10, 2, backend="faiss_flat")


@pytest.mark.parametrize(("cuda", "extra"), [("13.0", "faiss-gpu-cu13"), ("12.8", "faiss-gpu"), (None, "faiss-cpu")])
def test_the_extra_fits_the_cuda_version_of_torch(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ImportError, match=rf"\[{extra}\]"):
        NeighborLists(10, 2, backend="faiss_flat")


@pytest.mark.parametrize("inverted_file", [False, True])
def test_points_for_faiss_stay_where_they_are(monkeypatch: pytest.MonkeyPatch, inverted_file: bool) -> None:
    pytest.importorskip("faiss")
    table, slots = PointTable(900, 10), torch.arange(900)
    table.place(slots, walk(900))
    exact = exact_search(table, slots, 3, 900)

    def refused(tensor: Tensor, *_: object) -> None:
        raise AssertionError(f"{tensor.shape} was moved")

    for name in ("cpu", "numpy", "to"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    found = faiss_search(table, slots, 3, 900, inverted_file=inverted_file)
    assert (found[1] == exact[1]).double().mean() > (0.3 if inverted_file else 0.999)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("inverted_file", [False, True])
def test_faiss_on_the_gpu_finds_what_it_finds_on_the_cpu(inverted_file: bool) -> None:
    faiss = pytest.importorskip("faiss")
    if not hasattr(faiss, "StandardGpuResources"):
        pytest.skip("this Faiss has no GPU support")
    found = []
    for device in ("cpu", "cuda"):
        table, slots = PointTable(1500, 10, device), torch.arange(1500, device=device)
        table.place(slots, walk(1500).to(device))
        found.append(faiss_search(table, slots, 3, 1500, inverted_file=inverted_file))
    assert found[1][1].is_cuda
    assert (found[0][1] == found[1][1].cpu()).double().mean() > (0.5 if inverted_file else 0.999)


def test_faiss_finds_what_the_exact_search_finds() -> None:
    pytest.importorskip("faiss")
    data = walk(1000)
    slots = torch.arange(1000) * 2 + 1
    found = []
    for backend in ("exact", "faiss_flat"):
        lists = NeighborLists(2000, 5, backend=backend)
        lists.write(slots, data)
        found.append(lists.neighbors(slots))
    assert (found[0] == found[1]).double().mean() > 0.999


def test_the_inverted_file_is_close_and_passes_stay_exact() -> None:
    pytest.importorskip("faiss")
    data = walk(2020)
    lists = filled(data[:2000], 5, capacity=2020, backend="faiss_ivf")
    assert 0.5 < lists.recall_at(5, 500, torch.Generator().manual_seed(0)) < 1
    lists.write(torch.arange(2000, 2020), data[2000:])
    true = filled(data, 5, refresh_interval=1).neighbors(torch.arange(2000, 2020))
    assert (lists.neighbors(torch.arange(2000, 2020)) == true).double().mean() > 0.97


@pytest.mark.parametrize("backend", ["exact", "faiss_flat"])
def test_faiss_with_fewer_rows_than_neighbours(backend: str) -> None:
    if backend != "exact":
        pytest.importorskip("faiss")
    lists = filled(torch.tensor([[0.0], [1.0], [5.0]]), 8, capacity=9, backend=backend)
    assert lists.neighbors(torch.arange(3))[:, :3].tolist() == [[1, 2, -1], [0, 2, -1], [1, 0, -1]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_lists_on_the_gpu_are_those_on_the_cpu() -> None:
    data = walk(1500)
    found = []
    for device in ("cpu", "cuda"):
        lists = NeighborLists(1500, 5)
        for block in torch.arange(1500).split(500):
            lists.write(block, data[block].to(device))
            lists.draw(block.to(device), torch.Generator().manual_seed(0))
        found.append(lists.neighbors(torch.arange(1500, device=device)).cpu())
    assert (found[0] == found[1]).double().mean() > 0.999
