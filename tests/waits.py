# SPDX-License-Identifier: Apache-2.0
"""Waits and kernels of the calls of a replay whose rows are on a pretended device, as JSON: ``python -m tests.waits``.

A process of its own, because PyTorch has a pretended device for the rest of a process.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_replay import recipes
from lightning_replay.collecting import VectorSteps
from lightning_replay.envs.pendulums import Pendulums
from lightning_replay.replay import Replay
from tests import pretended_device

ENVS = 16


def closeness(achieved: Tensor, desired: Tensor, info: dict[str, Any]) -> Tensor:
    """Rewards, by torch."""
    return -(achieved - desired).norm(dim=-1)


def is_close(achieved: Tensor, desired: Tensor, info: dict[str, Any]) -> Tensor:
    """Flags of ends, by torch."""
    return closeness(achieved, desired, info) > -0.5


CALLS = ("extend", "sample", "update_priority")
#: What a case is built by: a recipe and its options.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "uniform": ("uniform", {}),
    "prioritized": ("prioritized", {}),
    "n-step": ("uniform", {"n_steps": 3}),
    "prioritized n-step": ("prioritized", {"n_steps": 3}),
    "hindsight": (
        "hindsight",
        {"reward": closeness, "terminated": is_close, "achieved_key": "observation", "desired_key": "observation"}
        | {"n_steps": 3, "strategy": "episode"},
    ),
    "observations once": ("uniform", {"observations": "once"}),
    "sequences": ("sequences", {"length": 4, "overlap": 2}),
}


class Steps:
    """Steps of environments side by side, of which some are truncated and some terminated."""

    def __init__(self) -> None:
        self.generator: torch.Generator = torch.Generator().manual_seed(0)
        self.observation: Tensor = torch.randn(ENVS, 4, generator=self.generator)

    def next(self) -> dict[Any, Tensor]:
        """Columns of one step ``[ENVS, ...]``, on the pretended device."""
        following = torch.randn(ENVS, 4, generator=self.generator)
        chance = torch.rand(ENVS, 1, generator=self.generator)
        columns: dict[Any, Tensor] = {
            "observation": self.observation,
            "action": torch.randn(ENVS, 2, generator=self.generator),
            "trajectory": torch.arange(ENVS),
            ("next", "observation"): following,
            ("next", "reward"): chance,
            ("next", "terminated"): chance < 0.1,
            ("next", "truncated"): chance > 0.9,
            ("next", "done"): (chance < 0.1) | (chance > 0.9),
        }
        self.observation = torch.where(columns["next", "done"], torch.randn(ENVS, 4), following)
        return {key: pretended_device.there(value) for key, value in columns.items()}


def measured(calls: pretended_device.Calls, found: dict[str, Any], name: str, work: Any) -> Any:
    """Runs a call and adds what it did."""
    calls.waits.clear()
    calls.kernels = calls.copies = 0
    result = work()
    entry = found.setdefault(name, {"waits": {}, "kernels": 0, "copies": 0})
    entry["waits"] |= calls.waits
    entry["kernels"] = max(entry["kernels"], calls.kernels)
    entry["copies"] = max(entry["copies"], calls.copies)
    return result


def counts(recipe: str, options: dict[str, Any], *, check_every: int = 1_000, draws_on: str = "device") -> Any:
    """What the calls did once the buffer is in use, around the end of its ring and with rows that were replaced."""
    found: dict[str, Any] = {}
    steps = Steps()
    with pretended_device.counted() as calls:
        device = str(pretended_device.device())
        deferred = {"check_every": check_every} if draws_on == "device" else {}
        given = {"capacity": 10 * ENVS - 5, "batch_size": 32, "device": device, "draws_on": draws_on, "seed": 0}
        replay: Replay = recipes.by_name(recipe)(**given | deferred | options)
        for _ in range(3):
            replay.extend_columns(steps.next())
            if recipe != "sequences":  # Two steps are no sequence.
                replay.update_priority(replay.sample(), pretended_device.there(torch.rand(32)))
        if recipe == "sequences":
            replay.extend_columns(steps.next())
            replay.sample()  # The first sequence is waited for.
        for _ in range(20):
            rows = steps.next()
            measured(calls, found, "extend", lambda: replay.extend_columns(rows))  # noqa: B023
            batch = measured(calls, found, "sample", replay.sample)
            error = pretended_device.there(torch.randn(tuple(batch.shape)))
            measured(calls, found, "update_priority", lambda: replay.update_priority(batch, error))  # noqa: B023
    return found


def static_counts(recipe: str, options: dict[str, Any]) -> Any:
    """What the calls of static draws did."""
    found: dict[str, Any] = {}
    steps = Steps()
    with pretended_device.counted() as calls:
        device = str(pretended_device.device())
        given = {"capacity": 10 * ENVS, "batch_size": 32, "device": device, "draws_on": "device", "seed": 0}
        replay: Replay = recipes.by_name(recipe)(**given | options)
        replay.extend_columns(steps.next())
        draws = replay.static_draws()
        draws.draw()  # which keeps the powers of the discount on the device
        for _ in range(4):
            replay.extend_columns(steps.next())
            measured(calls, found, "prepare", draws.prepare)
            batch = measured(calls, found, "draw", draws.draw)
            error = pretended_device.there(torch.randn(32))
            measured(calls, found, "update_priority", lambda: draws.update_priority(batch, error))  # noqa: B023
    return found


def refusal_of_rows_on_the_cpu() -> str:
    """The refusal of NaN in rows on the CPU, which a buffer on the device gets after others."""
    steps = Steps()
    device = str(pretended_device.device())
    with pretended_device.counted():
        replay = recipes.prioritized(10 * ENVS, 32, device=device, draws_on="device", seed=0)
        for reward in (0.0, torch.nan):
            rows = {key: getattr(value, "inner", value) for key, value in steps.next().items()}
            rows["td_error"] = torch.ones(ENVS)
            rows["next", "reward"] = torch.full((ENVS, 1), reward)
            try:
                replay.extend_columns(rows)
            except ValueError as error:
                return f"{error} Stored: {len(replay)}"
    return ""


class There:
    """Pendulums whose tensors are on the pretended device."""

    num_envs: int = ENVS

    def __init__(self) -> None:
        self.pendulums: Pendulums = Pendulums(ENVS, max_steps=7, staggered=True, noise=0.1)

    def reset(self) -> Any:
        observation, info = self.pendulums.reset(seed=0)
        return tree_map(pretended_device.there, observation), info

    def step(self, action: Tensor) -> Any:
        return tree_map(pretended_device.there, self.pendulums.step(action.inner))  # type: ignore[attr-defined]


def step_counts(**options: Any) -> Any:
    """What the steps of a simulator did, and their inserts."""
    found: dict[str, Any] = {}
    names = {name: name for name in ("observation", "critic_observation")}
    with pretended_device.counted() as calls:
        envs = VectorSteps(There(), observation_columns=names, **options)
        device = str(pretended_device.device())
        replay = recipes.uniform(10 * ENVS, 32, n_steps=3, device=device, draws_on="device", check_every=1_000, seed=0)
        envs.reset()
        for step in range(20):
            action = pretended_device.there(torch.zeros(ENVS, 1))
            measured(calls, found, "step", lambda: envs.step(action))  # noqa: B023
            measured(calls, found, "store", lambda: envs.store(replay))
            if step < 3:
                found.clear()
    return found


def main() -> None:
    """Prints the counts of all cases; of those that wait, with the places."""
    found = {name: counts(*case) for name, case in CASES.items()}
    found["read every 4 calls"] = counts("prioritized", {}, check_every=4)
    found["drawn on the CPU"] = counts("prioritized", {"n_steps": 3}, draws_on="cpu")
    found["static"] = static_counts("prioritized", {"n_steps": 3})
    found["rows on the CPU"] = refusal_of_rows_on_the_cpu()
    found["simulator"] = step_counts()
    found["simulator without last observations"] = step_counts(
        final_observation="absent", without_final_observation="terminate"
    )
    found["simulator with skips"] = step_counts(skip_invalid=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
