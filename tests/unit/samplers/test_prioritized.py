# SPDX-License-Identifier: Apache-2.0
"""The prioritized sampler alone and in TorchRL's own buffers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer
from torchrl.data.replay_buffers import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data.replay_buffers.scheduler import StepScheduler

from lightning_replay.samplers import PrioritizedSampler, RandomPairSampler, TableShares
from lightning_replay.schedules import Linear
from tests.oracles import probabilities

BACKENDS = ["numba", "torch"]


def _rows(count: int) -> TensorDict:
    return TensorDict({"observation": torch.arange(count).float()}, [count])


def _buffer(sampler: PrioritizedSampler, rows: int, batch_size: int = 64) -> TensorDictReplayBuffer:
    storage = LazyTensorStorage(sampler.max_size)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size, priority_key="td_error")
    if rows:
        buffer.extend(_rows(rows))
    return buffer


@pytest.mark.parametrize("case", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_worked_example(case: int, backend: str, fixtures: Path) -> None:
    worked = json.loads((fixtures / "per_probabilities_and_weights.json").read_text())["cases"][case]
    inputs, expected = worked["inputs"], worked["expected"]
    errors = torch.tensor(inputs["absolute_td_errors"], dtype=torch.float64)
    alpha, beta, batch = inputs["alpha"], inputs["beta"], inputs["sampled_batch"]

    probability = probabilities(errors, alpha, inputs["epsilon"])
    raw = (6 * probability) ** -beta
    drawn = raw[batch]
    for value, key in (
        (probability, "probabilities"),
        (raw, "raw_weights"),
        (raw / raw.max(), "weights_divided_by_max_over_memory"),
        (drawn / drawn.max(), "weights_of_batch_divided_by_batch_max"),
    ):
        if key in expected:
            wanted = torch.tensor(expected[key], dtype=torch.float64)
            torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-9)

    for over_batch in (False, True):
        sampler = PrioritizedSampler(6, alpha, beta, inputs["epsilon"], over_batch, backend, seed=0)
        buffer = _buffer(sampler, 6)
        buffer.update_priority(torch.arange(6), errors)
        sample = buffer.sample()
        weights = raw[sample["index"]] / (raw[sample["index"]].max() if over_batch else raw.max())
        torch.testing.assert_close(sample["priority_weight"].double(), weights, rtol=2e-6, atol=0)
        leaves = sampler.state_dict()["tree"]["leaves"].double()
        torch.testing.assert_close(leaves / leaves.sum(), probability, rtol=2e-6, atol=0)


def test_new_rows_can_be_drawn_when_only_zeros_were_given() -> None:
    sampler = PrioritizedSampler(4, priority_offset=0.0)
    buffer = _buffer(sampler, 2)
    buffer.update_priority(torch.arange(2), 0.0)
    with pytest.raises(RuntimeError, match="every one of the 2 stored rows has priority 0"):
        buffer.sample()
    buffer.extend(_rows(1))
    assert buffer.sample()["index"].unique().tolist() == [2]


@pytest.mark.parametrize("priority", [0.5, torch.full((3,), 0.5), torch.full((3, 1), 0.5), torch.tensor(0.5)])
def test_accepted_shapes_of_priorities(priority: object) -> None:
    sampler = PrioritizedSampler(5, priority_exponent=1.0, priority_offset=0.0)
    buffer = _buffer(sampler, 5)
    sampler.update_priority(torch.tensor([0, 2, 4]), priority, storage=buffer.storage)
    sampler.update_priority(1, 4.0)
    assert sampler.state_dict()["tree"]["leaves"].tolist() == [0.5, 4.0, 0.5, 1.0, 0.5]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("index", "priority", "error", "message"),
    [
        ([0, 1], [1.0, float("nan")], ValueError, "priority is nan at position 1; priorities must be finite and >= 0"),
        ([0, 1], [float("inf"), 1.0], ValueError, "priority is inf at position 0"),
        ([0, 1], [1.0, -0.5], ValueError, "priority is -0.5 at position 1"),
        ([0, 1], [1.0, 3e38], ValueError, "does not fit float32"),
        ([0, 5], [9.0, 9.0], IndexError, r"index is 5 at position 1, but 5 rows are stored; accepted are 0 to 4"),
        ([-2, 1], [9.0, 9.0], IndexError, "index is -2 at position 0"),
        ([0, 1, 2], [1.0, 2.0], ValueError, "2 priorities of shape .* for 3 slots"),
        ([[0, 1], [2, 3]], [1.0, 2.0], ValueError, "index has shape"),
        ([0.5, 1.0], [1.0, 2.0], TypeError, "slots must be integers"),
        ([True, False], [1.0, 2.0], TypeError, "slots must be integers"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(
    backend: str, index: list, priority: list, error: type[Exception], message: str
) -> None:
    sampler = PrioritizedSampler(8, priority_exponent=2.0, backend=backend, seed=0)
    buffer = _buffer(sampler, 5)
    before = sampler.state_dict()
    with pytest.raises(error, match=message):
        buffer.update_priority(torch.tensor(index), torch.tensor(priority))
    after = sampler.state_dict()
    assert torch.equal(before["tree"]["leaves"], after["tree"]["leaves"])
    assert before["max_priority"] == after["max_priority"]
    assert sampler.group_totals(buffer.storage).mass[0] == after["tree"]["leaves"].double().sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_storage_larger_than_the_sampler_is_named(backend: str) -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), sampler=PrioritizedSampler(4, backend=backend), batch_size=2
    )
    with pytest.raises(ValueError, match="capacity of PrioritizedSampler is 4 and that of the storage 10"):
        buffer.extend(_rows(2))


def test_index_minus_one_is_skipped_and_the_last_duplicate_counts() -> None:
    sampler = PrioritizedSampler(4, priority_exponent=1.0, priority_offset=0.0)
    _buffer(sampler, 4)
    sampler.update_priority(torch.tensor([-1, 2, -1, 2]), torch.tensor([9.0, 5.0, 9.0, 3.0]))
    assert sampler.state_dict()["tree"]["leaves"].tolist() == [1.0, 1.0, 3.0, 1.0]
    assert sampler.default_priority == 5.0
    sampler.mark_update(torch.tensor([-1, 0]))
    assert sampler.state_dict()["tree"]["leaves"].tolist() == [5.0, 1.0, 3.0, 1.0]


def test_torchrl_max_value_writer() -> None:
    sampler = PrioritizedSampler(5, seed=0)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(5),
        sampler=sampler,
        writer=TensorDictMaxValueWriter(rank_key="observation"),
        batch_size=16,
        priority_key="td_error",
    )
    buffer.extend(_rows(20))
    buffer.extend(_rows(10))
    sample = buffer.sample()
    assert set(sample["observation"].tolist()) <= {15.0, 16.0, 17.0, 18.0, 19.0}
    sample["td_error"] = torch.rand(16)
    buffer.update_tensordict_priority(sample)


@pytest.mark.parametrize("attach", ["constructor", "set_sampler"])
def test_rows_stored_before_the_sampler_was_attached_are_drawn(attach: str) -> None:
    storage = LazyTensorStorage(6)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=256)
    buffer.extend(_rows(4))
    sampler = PrioritizedSampler(6, seed=0)
    if attach == "constructor":
        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=256)
    else:
        buffer.set_sampler(sampler)
        buffer.extend(_rows(1))
    assert buffer.sample()["index"].unique().tolist() == list(range(len(buffer)))


def test_importance_exponent_follows_its_clock() -> None:
    sampler = PrioritizedSampler(4, importance_exponent=Linear(0.0, 1.0, duration=4))
    buffer = _buffer(sampler, 4)
    betas = []
    for _ in range(6):
        betas.append(sampler.beta)
        buffer.sample()
    assert betas == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]

    sampler = PrioritizedSampler(4, importance_exponent=Linear(0.0, 1.0, duration=100, clock="env_steps"))
    sampler.advance(env_steps=50, updates=3)
    assert sampler.beta == 0.5
    sampler.beta = 0.9
    assert sampler.beta == 0.9


@pytest.mark.parametrize("number", [torch.tensor, np.array, np.float32])
def test_exponents_may_be_tensors_and_arrays_of_no_dimension(number) -> None:
    sampler = PrioritizedSampler(4, number(0.5), number(0.25), number(0.125), seed=0)
    assert (sampler.alpha, sampler.beta, sampler.priority_offset) == (0.5, 0.25, 0.125)
    sampler.alpha, sampler.beta = number(0.75), number(1.0)
    assert (sampler.alpha, sampler.beta) == (0.75, 1.0) and type(sampler.alpha) is float
    for wrong, error in ((number(-0.5), ValueError), (torch.tensor([0.5]), TypeError), (torch.tensor(True), TypeError)):
        with pytest.raises(error, match="importance_exponent is"):
            sampler.beta = wrong


def test_the_beta_of_torchrls_schedulers_may_exceed_1_also_after_a_load(tmp_path: Path) -> None:
    sampler, again = (PrioritizedSampler(4, importance_exponent=torch.tensor(0.9)) for _ in range(2))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler)
    scheduler = StepScheduler(buffer, param_name="beta", gamma=0.1, n_steps=1, mode="additive")
    for _ in range(3):
        scheduler.step()
    assert sampler.beta == pytest.approx(1.2)
    sampler.dumps(tmp_path)
    again.loads(tmp_path)
    assert again.beta == sampler.beta
    buffer.extend(TensorDict({"number": torch.arange(4)}, [4]))
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    probability = (torch.arange(1.0, 5) + 1e-6) ** 0.6
    weight = (probability / probability[0]) ** -sampler.beta
    batch = buffer.sample(64)
    torch.testing.assert_close(batch["priority_weight"], weight[batch["index"]])


def test_names_of_torchrl() -> None:
    sampler = PrioritizedSampler(4, priority_exponent=0.5, importance_exponent=0.4)
    assert isinstance(sampler, TorchRLPrioritizedSampler)
    assert (sampler.alpha, sampler.beta, sampler.max_size, str(sampler.device)) == (0.5, 0.4, 4, "cpu")


def test_setting_the_priority_exponent_raises_the_stored_priorities_anew() -> None:
    sampler = PrioritizedSampler(4, priority_exponent=0.0, priority_offset=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is empty
        sampler.alpha = 0.5
    buffer = _buffer(sampler, 3)
    buffer.update_priority(torch.arange(3), torch.tensor([4.0, 16.0, 0.0]))
    sampler.alpha = 1.0
    assert sampler.state_dict()["tree"]["leaves"].tolist() == [4.0, 16.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="priority_exponent is 90"):
        sampler.priority_exponent = 90.0
    assert sampler.priority_exponent == 1.0
    sampler.priority_exponent = 0.0
    with pytest.warns(UserWarning, match="keeps no priorities"):
        sampler.priority_exponent = 1.0


def test_a_storage_of_two_dimensions() -> None:
    storage = LazyTensorStorage(12, ndim=2)
    sampler = PrioritizedSampler(12, priority_exponent=1.0, priority_offset=0.0, seed=0)
    buffer = TensorDictReplayBuffer(
        storage=storage, sampler=sampler, batch_size=32, priority_key="td_error", dim_extend=0
    )
    buffer.extend(TensorDict({"observation": torch.arange(12.0).reshape(3, 4)}, [3, 4]))
    sample = buffer.sample()
    sample["td_error"] = torch.where(sample["observation"] == 6, 5.0, 0.0)
    buffer.update_tensordict_priority(sample)
    buffer.update_priority(torch.cartesian_prod(torch.arange(3), torch.arange(4)), 0.0)
    buffer.update_priority(torch.tensor([[1, 2]]), torch.tensor([5.0]))
    assert buffer.sample()["observation"].unique().tolist() == [6.0]


@pytest.mark.parametrize("sampler", [PrioritizedSampler(4, seed=0), TableShares({"default": 1.0}, seed=0)])
@pytest.mark.parametrize(
    ("name", "shown", "value", "error"),
    [
        ("beta", "importance_exponent", -1, ValueError),
        ("beta", "importance_exponent", "0.4", TypeError),
        ("importance_exponent", "importance_exponent", True, TypeError),
        ("importance_exponent", "importance_exponent at reading 9 of Linear.*", Linear(0.4, 7.0, 9), ValueError),
        ("alpha", "priority_exponent", -0.1, ValueError),
        ("alpha", "priority_exponent", None, TypeError),
        ("priority_exponent", "priority_exponent", "0.6", TypeError),
    ],
)
def test_what_is_set_later_is_checked_alike(sampler, name: str, shown: str, value: Any, error) -> None:
    before = sampler.beta, sampler.alpha
    with pytest.raises(error, match=f"^{shown} is .*; it must be a"):
        setattr(sampler, name, value)
    assert (sampler.beta, sampler.alpha) == before


@pytest.mark.parametrize("priority", [torch.tensor([1.0 + 1j]), 1j, torch.zeros(1, dtype=torch.complex128)])
def test_complex_priorities_are_refused_and_nothing_is_changed(priority: Any) -> None:
    storage, sampler = LazyTensorStorage(4), PrioritizedSampler(4, seed=0)
    storage.set(torch.arange(4), torch.zeros(4, 1))
    sampler.mark_update(torch.arange(4), storage=storage)
    pairs = RandomPairSampler(base_sampler=sampler, seed=0)
    before = sampler.state_dict()["tree"]["leaves"]
    for update in (sampler.update_priority, pairs.update_priority):
        with pytest.raises(TypeError, match=r"priority is torch.complex\d+; it must be real"):
            update(torch.tensor([0]), priority, storage=storage)
    assert torch.equal(sampler.state_dict()["tree"]["leaves"], before)
