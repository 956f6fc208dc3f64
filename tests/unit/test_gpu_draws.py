# SPDX-License-Identifier: Apache-2.0
"""Slots drawn on a GPU: nothing waits, results are those of the CPU as the device, and CUDA graphs capture a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import recipes
from lightning_replay.replay import Replay
from tests.transitions import numbered_steps

pytestmark = pytest.mark.gpu


@contextmanager
def no_wait() -> Iterator[None]:
    """A block in which PyTorch raises where a call waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def built(device: str, recipe: str = "prioritized", **options: Any) -> Replay:
    given = {"capacity": 50, "batch_size": 16, "device": device, "draws_on": "device", "seed": 0, "check_every": 1_000}
    return recipes.by_name(recipe)(**given | options)


def rows(first: int, count: int, device: str) -> TensorDict:
    return numbered_steps(first, count).to(device)


@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_no_call_waits(recipe: str, n_steps: int) -> None:
    replay = built("cuda", recipe, n_steps=n_steps)
    for first in range(0, 100, 10):
        given = rows(first, 10, "cuda")
        error = torch.rand(16, device="cuda")
        if first < 20:  # The first rows fix columns, and the first draw keeps powers of the discount.
            replay.extend(given)
            replay.update_priority(replay.sample(), error)
            continue
        with no_wait():
            replay.extend(given)
            replay.update_priority(replay.sample(), error)
    assert len(replay) == 50


def test_priorities_are_those_of_the_cpu_as_the_device() -> None:
    here, there = built("cpu"), built("cuda")
    generator = torch.Generator().manual_seed(0)
    for first in range(0, 200, 20):
        for device, replay in (("cpu", here), ("cuda", there)):
            replay.extend(rows(first, 20, device))
        batch = there.sample()
        error = torch.randn(16, generator=generator)
        there.update_priority(batch, error.cuda())
        here.update_priority(batch["index"].cpu(), error, generation=batch["generation"].cpu())
        torch.testing.assert_close(there.sampler._tree.leaves().cpu(), here.sampler._tree.leaves())
    uniform = torch.rand(1_000, dtype=torch.float64, generator=generator)
    drawn = [replay.sampler._tree.draw(uniform.to(replay.storage.device)) for replay in (here, there)]
    assert torch.equal(drawn[0][0], drawn[1][0].cpu())


@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_graph_of_a_whole_step_gives_what_the_step_gives(recipe: str, n_steps: int) -> None:
    replay = built("cuda", recipe, n_steps=n_steps)
    replay.extend(rows(0, 30, "cuda"))
    draws = replay.static_draws()
    network = torch.nn.Linear(numbered_steps(0, 1)["observation"].shape[1], 1, device="cuda")
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4)

    def step() -> tuple[Tensor, Tensor]:
        batch = draws.draw()
        error = (network(batch["observation"]) - batch["next", "reward"]).squeeze(1)
        optimizer.zero_grad()
        error.square().mean().backward()
        optimizer.step()
        draws.update_priority(batch, error)
        return batch["index"], error.detach()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        index, error = step()
    for first in range(30, 90, 10):
        replay.extend(rows(first, 10, "cuda"))
        draws.prepare()
        kept = [one.detach().clone() for one in network.parameters()]
        state = replay.sampler.state_dict()
        graph.replay()
        found = [index.clone(), error.clone(), *(one.detach().clone() for one in network.parameters())]
        with torch.no_grad():
            for one, before in zip(network.parameters(), kept, strict=True):
                one.copy_(before)
        replay.sampler.load_state_dict(state)
        expected = [*step(), *(one.detach() for one in network.parameters())]
        torch.testing.assert_close(found, expected)
    assert int(index.max()) >= 30


def test_errors_that_are_not_finite_in_a_graph_are_raised_with_their_call() -> None:
    replay = built("cuda", check_every=2)
    replay.extend(rows(0, 30, "cuda"))
    draws = replay.static_draws()
    error = torch.zeros(16, device="cuda")
    draws.update_priority(draws.draw(), error)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draws.update_priority(draws.draw(), error)
    draws.prepare()
    error.fill_(torch.nan)
    graph.replay()
    with pytest.raises(ValueError, match="call 2 of update_priority brought TD errors"):
        for _ in range(3):
            draws.prepare()


def test_an_empty_buffer_is_not_captured() -> None:
    with pytest.raises(RuntimeError, match="the buffer is empty; call extend first, and capture then"):
        built("cuda").static_draws()
