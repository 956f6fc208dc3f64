# SPDX-License-Identifier: Apache-2.0
"""Buffers inside ``torch.inference_mode`` and with another default device: all that happens is what happens without."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors
from torchrl.data import TensorDictReplayBuffer

import lightning_replay
from lightning_replay import PackedStorage
from lightning_replay.samplers import ContinuousTransitionSampler, PrioritizedSampler
from lightning_replay.writers import FirstInFirstOutWriter
from tests.lives import BUFFERS, VERBS, life
from tests.transitions import numbered_steps


@contextmanager
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES = {
    "default dtype": double,
    "inference": torch.inference_mode,
    "default device": lambda: torch.device("meta"),  # whose tensors cannot be read, as if all were on another device
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BUFFERS)
def test_a_mode_of_torch_changes_nothing_wherever_it_is_on(name: str, mode: str) -> None:
    expected = life(name, "never", nullcontext)
    # A tensor of inference mode is refused outside of it, so that each call may fail for itself. The others change
    # what a call builds: all of it at once, and for each buffer another call.
    each = VERBS if mode == "inference" else (VERBS[[*BUFFERS].index(name) % len(VERBS)],)
    for where in (*each, "all"):
        batches = life(name, where, MODES[mode])
        for n, (batch, other) in enumerate(zip(batches, expected, strict=True)):
            assert (batch == other).all(), f"batch {n}, with the mode around {where}"
            assert {key: column.dtype for key, column in batch.items(True, True)} == {
                key: column.dtype for key, column in other.items(True, True)
            }, f"batch {n}, with the mode around {where}"
            trained = batch["next", "reward"] * torch.ones(1, requires_grad=True)
            trained.sum().backward()  # which no tensor of inference mode allows


@pytest.mark.parametrize("sampler", [lambda: PrioritizedSampler(64), ContinuousTransitionSampler])
def test_parts_in_torchrl_buffers_take_rows_after_those_of_inference_mode(sampler: Callable[[], Any]) -> None:
    replay = TensorDictReplayBuffer(
        storage=PackedStorage(64), sampler=sampler(), writer=FirstInFirstOutWriter(), batch_size=8
    )
    with torch.inference_mode():
        replay.extend(numbered_steps(0, 24))
    replay.extend(numbered_steps(24, 1))
    replay.extend(numbered_steps(25, 24))
    assert len(replay) == 49
    assert replay.sample()["observation"].shape[0] == 8


FLOATING = {"empty", "full", "linspace", "ones", "rand", "randn", "zeros"}  # whose default is torch's default dtype


@pytest.mark.slow
def test_every_tensor_of_the_core_names_its_device_and_its_dtype() -> None:
    names = {constructor.__name__ for constructor in _device_constructors()}
    package = Path(lightning_replay.__file__).parent
    without: dict[str, list[str]] = {"device": [], "dtype": []}
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0] in ("lit", "agents", "sharded"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            is_torch = isinstance(function, ast.Attribute) and ast.unparse(function.value) == "torch"
            given = {keyword.arg for keyword in node.keywords}
            for option, constructors in (("device", names), ("dtype", FLOATING)):
                if is_torch and function.attr in constructors and option not in given:
                    without[option].append(f"{path.relative_to(package)}:{node.lineno}: {ast.unparse(node)}")
    assert not any(without.values()), f"torch's defaults would change these; give the options: {without}"
