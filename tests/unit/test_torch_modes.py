# SPDX-License-Identifier: Apache-2.0
"""Buffers inside ``torch.inference_mode`` and with another default device: all that happens is what happens without."""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils._device import _device_constructors
from torchrl.data import TensorDictReplayBuffer

import lightning_replay
from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.samplers import ContinuousTransitionSampler, PrioritizedSampler
from lightning_replay.transforms import NStepTransitions
from lightning_replay.writers import FirstInFirstOutWriter
from tests.frame_steps import frame_rows, stacks_of
from tests.recipe_options import built, fitting
from tests.transitions import numbered_steps

MODES = {
    "inference": torch.inference_mode,
    "default device": lambda: torch.device("meta"),  # whose tensors cannot be read, as if all were on another device
}
VERBS = ("build", "first rows", "later rows", "draw", "update", "end", "save", "load")


def buffers() -> dict[str, Callable[[], Replay]]:
    """Every recipe, and options of them that lead to other tensors."""
    options: dict[str, dict[str, Any]] = {name: {} for name in recipes.known()}
    options |= {f"{name}, n_steps": {"n_steps": 3} for name in ("uniform", "prioritized", "event_tables", "mixup")}
    options |= {"neighborhood_mixup, prioritized": {"priority_exponent": 0.6, "update_partners": True}}
    options |= {f"{name}, prioritized": {"priority_exponent": 0.6} for name in ("event_tables", "sequences")}
    options |= {"event_tables, sequences": {"sequence_length": 3, "burn_in": 1}}
    options |= {"uniform, frames": {"frame_stack": 2}, "prioritized, prefetch": {"prefetch": 2}}
    return {name: lambda name=name, given=given: _built(name, given) for name, given in options.items()} | {
        "own parts": lambda: Replay(
            storage=PackedStorage(64),
            sampler=PrioritizedSampler(64, backend="torch"),
            transform=NStepTransitions(3, 0.9),
            batch_size=8,
            seed=0,
        )
    }


def _built(name: str, options: dict[str, Any]) -> Replay:
    return built(name.partition(",")[0], capacity=64, batch_size=8, seed=0, **options)


BUFFERS = buffers()


def steps_for(name: str, replay: Replay, first: int, count: int) -> TensorDict:
    if "frames" in name:
        return frame_rows(stacks_of(range(first, first + count + 1), 2))
    return fitting(replay, numbered_steps(first, count, done_every=10))


@cache
def life(name: str, where: str, mode: Callable[[], Any]) -> list[TensorDict]:
    """Returns the batches of a buffer's life, of which the verb ``where`` is called in the mode."""

    def here(verb: str) -> Any:
        return mode() if where in (verb, "all") else nullcontext()

    with here("build"):
        replay, other = BUFFERS[name](), BUFFERS[name]()
    given = [steps_for(name, replay, first, count) for first, count in ((0, 24), (24, 24), (48, 1), (49, 30))]
    with here("first rows"):
        replay.extend(given[0])
    with here("later rows"):
        replay.extend(given[1])
        replay.add(given[2][0])
        replay.extend_columns(dict(given[3].items(True, True)))
    batches = []
    for _ in range(3):
        with here("draw"):
            batches.append(replay.sample())
        errors = torch.arange(float(batches[-1].numel())).view(batches[-1].shape)
        with here("update"):
            if replay.takes_feedback:
                replay.update_priority(batches[-1], errors)
    with here("end"):
        replay.end_episodes()
    with here("save"):
        state = replay.state_dict()
    with here("load"):
        other.load_state_dict(state)
    replay.extend(given[0])
    other.extend(given[0])
    return [*batches, replay.sample(), other.sample()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BUFFERS)
def test_a_mode_of_torch_changes_nothing_wherever_it_is_on(name: str, mode: str) -> None:
    expected = life(name, "never", nullcontext)
    for where in (*VERBS, "all"):
        batches = life(name, where, MODES[mode])
        for n, (batch, other) in enumerate(zip(batches, expected, strict=True)):
            assert (batch == other).all(), f"batch {n}, with the mode around {where}"
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


def test_every_tensor_of_the_core_names_its_device() -> None:
    names = {constructor.__name__ for constructor in _device_constructors()}
    package = Path(lightning_replay.__file__).parent
    without = []
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0] in ("lit", "agents", "sharded"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or any(keyword.arg == "device" for keyword in node.keywords):
                continue
            function = node.func
            is_torch = isinstance(function, ast.Attribute) and ast.unparse(function.value) == "torch"
            if is_torch and function.attr in names:
                without.append(f"{path.relative_to(package)}:{node.lineno}: {ast.unparse(node)}")
    assert not without, "\n".join(["with torch.set_default_device these would be elsewhere; give device=", *without])
