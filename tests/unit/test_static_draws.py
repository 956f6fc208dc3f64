# SPDX-License-Identifier: Apache-2.0
"""Draws into static memory: what CUDA graphs capture and ``torch.compile`` compiles, with the CPU as the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.config
from torch import Tensor

from lightning_replay import recipes
from lightning_replay.replay import Replay
from lightning_replay.schedules import Linear
from tests.transitions import numbered_steps

# PyTorch compiles the backward pass as a part of a step, if it is told so.
BACKWARD = {"trace_autograd_ops": True} if hasattr(torch._dynamo.config, "trace_autograd_ops") else {}


def stored(recipe: str = "prioritized", rows: int = 20, **options: Any) -> Replay:
    given = {"capacity": 30, "batch_size": 8, "draws_on": "device", "seed": 0}
    replay = recipes.by_name(recipe)(**given | options)
    if rows:
        replay.extend(numbered_steps(0, rows))
    return replay


@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_batches_are_stored_rows_with_the_columns_of_sample(recipe: str, n_steps: int) -> None:
    replay = stored(recipe, n_steps=n_steps)
    sampled = replay.sample()
    draws = replay.static_draws()
    batch = draws.draw()
    assert set(batch.keys(True)) == set(sampled.keys(True)) and batch.shape == sampled.shape
    assert torch.equal(batch["observation"], replay[:]["observation"][batch["index"]])
    assert torch.equal(draws.draw()["index"], batch["index"])  # until the next random numbers
    seen = torch.cat([batch["index"], *(_prepared(draws) for _ in range(40))])
    assert set(seen.tolist()) == set(range(20))
    replay.extend(numbered_steps(20, 10))
    assert max(_prepared(draws).max() for _ in range(40)) >= 20


def _prepared(draws: Any) -> Tensor:
    draws.prepare()
    return draws.draw()["index"]


def test_draws_and_weights_are_in_proportion_to_the_priorities() -> None:
    replay = stored(rows=4, priority_exponent=1.0, priority_offset=0.0, importance_exponent=Linear(0.0, 1.0, 4))
    replay.update_priority(torch.arange(4), torch.tensor([1.0, 0.0, 2.0, 5.0]))
    draws = replay.static_draws(4)  # sums 1, 1, 3, 8; the points are eighths of the sum
    draws.prepare()
    draws.prepare()
    draws._uniform.copy_(torch.tensor([0.0, 0.124, 0.126, 0.99]))
    batch = draws.draw()
    assert batch["index"].tolist() == [0, 0, 2, 3]
    # Two draws were made before the present one, so that β is 2/4.
    torch.testing.assert_close(batch["priority_weight"], torch.tensor([1.0, 1.0, 2.0, 5.0]) ** -0.5)


def test_feedback_is_that_of_update_priority() -> None:
    one, other = stored(), stored()
    draws = one.static_draws()
    batch = draws.draw()
    for replay in (one, other):
        replay.extend(numbered_steps(20, 18))  # overwrites rows 0 to 7
    error = torch.linspace(-2, 2, 8).unsqueeze(1)
    draws.update_priority(batch, error)
    other.update_priority(batch, error)
    assert torch.equal(one.sampler._tree.leaves(), other.sampler._tree.leaves())
    assert one.stats()["stale_updates_dropped"] == other.stats()["stale_updates_dropped"] > 0
    assert one.sampler.default_priority == other.sampler.default_priority


def test_errors_that_are_not_finite_are_raised_before_the_next_step_and_never_written() -> None:
    replay = stored()
    draws = replay.static_draws()
    before = replay.sampler._tree.leaves()
    draws.prepare()  # the second; the first is made with the draws
    draws.update_priority(draws.draw(), torch.full((8,), torch.nan))
    with pytest.raises(ValueError, match="call 2 of update_priority brought TD errors that are NaN or infinite"):
        draws.prepare()
    assert torch.equal(replay.sampler._tree.leaves(), before)


@pytest.mark.filterwarnings("ignore:.*functools.lru_cache:UserWarning")
@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
@pytest.mark.skipif(not BACKWARD, reason="PyTorch compiles no backward")
@torch._dynamo.config.patch(**BACKWARD)
def test_a_whole_step_compiles_without_a_break(recipe: str) -> None:
    replay = stored(recipe, n_steps=2)
    draws = replay.static_draws()
    network = torch.nn.Linear(replay[:]["observation"].shape[1], 1)

    def step() -> tuple[Tensor, Tensor]:
        batch = draws.draw()
        error = (network(batch["observation"]) - batch["next", "reward"]).squeeze(1)
        error.square().mean().backward()
        draws.update_priority(batch, error)
        return batch["index"], error.detach()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for first in (20, 25):
        draws.prepare()
        before = replay.sampler.state_dict()
        found: list[list[Tensor]] = []
        for work in (step, compiled):
            replay.sampler.load_state_dict(before)
            network.zero_grad()
            priorities = replay.sampler._tree.leaves() if recipe == "prioritized" else torch.zeros(1)
            found.append([*work(), *(one.grad.clone() for one in network.parameters()), priorities])
        torch.testing.assert_close(found[0], found[1])
        replay.extend(numbered_steps(first, 5))


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: stored(rows=0), RuntimeError, "static draws need the columns of a row, and the buffer is empty"),
        (lambda: stored(draws_on="cpu"), ValueError, "static draws are of rows as they are stored, drawn on their dev"),
        (lambda: stored("uniform", transform=lambda batch: batch), ValueError, "and 1 transforms"),
    ],
)
def test_buffers_without_static_draws_are_refused(make: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        make().static_draws()


def test_draws_of_a_buffer_that_was_emptied_are_refused() -> None:
    replay = stored()
    draws = replay.static_draws()
    replay.empty()
    with pytest.raises(RuntimeError, match="the buffer is empty; call extend first"):
        draws.prepare()


def test_a_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size is 0; it must be a whole number of transitions from 1 on"):
        stored().static_draws(0)


@pytest.mark.parametrize("draws_on", ["cpu", "device"])
def test_sample_writes_into_a_batch_that_was_returned_before(draws_on: str) -> None:
    one, other = stored(draws_on=draws_on, n_steps=2), stored(draws_on=draws_on, n_steps=2)
    batch = one.sample()
    other.sample()
    places = {key: value.data_ptr() for key, value in batch.items(True, True)}
    assert one.sample(out=batch) is batch
    assert (batch == other.sample()).all()
    assert {key: value.data_ptr() for key, value in batch.items(True, True)} == places


def test_a_batch_of_another_form_is_refused() -> None:
    replay = stored()
    batch = replay.sample()
    with pytest.raises(ValueError, match=r"out is not a batch like the one that was drawn, \[4\]"):
        replay.sample(4, out=batch)
    with pytest.raises(ValueError, match="they differ in .*'action'"):
        replay.sample(out=batch.exclude("action"))
    with pytest.raises(TypeError, match="out is 3; it must be a batch that sample returned"):
        replay.sample(out=3)
    with pytest.raises(RuntimeError, match="cannot sample from an empty replay buffer"):
        stored(rows=0).sample(out=batch)
