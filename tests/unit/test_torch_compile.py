# SPDX-License-Identifier: Apache-2.0
"""Training steps that ``torch.compile`` compiles: their replay breaks the graph, and nothing of it is traced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

import lightning_replay
from lightning_replay import PackedStorage, recipes
from lightning_replay.samplers import NeighborhoodMixupSampler, PrioritizedSampler, SequenceSampler, UniformSampler
from lightning_replay.writers import FirstInFirstOutWriter
from tests.recipe_options import built, fitting
from tests.transitions import numbered_steps

PACKAGE = str(Path(lightning_replay.__file__).parent)


def mixed() -> Any:
    sides = [recipes.prioritized(64, 8, seed=seed) for seed in (0, 1)]
    sides[1].extend(numbered_steps(100, 20))
    return recipes.mixed(online=sides[0], offline=sides[1], batch_size=8, seed=0)


def in_torchrl(sampler: Callable[[], Any]) -> Callable[[], Any]:
    torch.manual_seed(0)
    return lambda: TensorDictReplayBuffer(
        storage=PackedStorage(64),
        sampler=sampler(),
        writer=FirstInFirstOutWriter(),
        batch_size=8,
        generator=torch.Generator().manual_seed(0),
    )


BUILT: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: built(name, capacity=64, batch_size=8, seed=0) for name in recipes.known()},
    "mixed": mixed,
    "TorchRL, uniform": in_torchrl(UniformSampler),
    "TorchRL, prioritized": in_torchrl(lambda: PrioritizedSampler(64, backend="torch")),
    "TorchRL, numba": in_torchrl(lambda: PrioritizedSampler(64)),
    "TorchRL, pairs": in_torchrl(lambda: NeighborhoodMixupSampler(base_sampler=PrioritizedSampler(64))),
    "TorchRL, sequences": in_torchrl(lambda: SequenceSampler(length=2, priority_exponent=0.6)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not know how to trace:UserWarning")
@pytest.mark.filterwarnings("ignore:.*functools.lru_cache:UserWarning")
@pytest.mark.parametrize("name", BUILT)
def test_a_compiled_training_step_draws_and_learns_as_without(name: str) -> None:
    traced: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traced.extend(node.stack_trace or "" for node in graph.graph.nodes)
        return graph.forward

    def collect(rows: TensorDict) -> None:
        replay.extend(rows)

    def step() -> tuple[Any, Any]:
        batch = replay.sample()
        loss = (batch["next", "reward"] * 2 + 1).sum()
        batch["td_error"] = torch.arange(float(batch.numel())).view(batch.shape)
        replay.update_tensordict_priority(batch)
        return loss, batch["index"]

    def trained(compiled: Callable[..., Any]) -> list[tuple[Any, Any]]:
        rows = fitting(replay, numbered_steps(0, 40)) if name == "parallel_curriculum" else numbered_steps(0, 40)
        compiled(collect)(rows)
        return [compiled(step)() for _ in range(3)]

    torch._dynamo.reset()
    replay = BUILT[name]()
    expected = trained(lambda function: function)
    replay = BUILT[name]()
    for (loss, index), (other_loss, other_index) in zip(
        expected, trained(lambda function: torch.compile(function, backend=backend)), strict=True
    ):
        assert loss == other_loss
        assert torch.equal(index, other_index)
    assert traced, "the loss is compiled"
    # TorchRL's own buffers are traced, and with them the storage that they read.
    parts = f"{PACKAGE}/samplers" if "TorchRL" in name else PACKAGE
    assert not [stack for stack in traced if parts in stack]
