# SPDX-License-Identifier: Apache-2.0
"""RecipeBuffer beside Stable-Baselines3's own buffers: a step stored, a batch drawn, and both as algorithms call them.

Each piece of work prints the ratio to Stable-Baselines3's time. Steps of one environment wait in a RecipeBuffer until
the next draw, so that a step costs least between draws, and most if each step is followed by a draw.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from peers import arguments
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv
from timing import Table

from lightning_replay.sb3 import RecipeBuffer

CALLS = 200  # of one turn
LIMITS = {  # of the time of Stable-Baselines3
    "add": {"uniform": 2.0, "prioritized": 2.8},
    "sample 256": {"uniform": 1.0, "prioritized": 1.5},
    "add hindsight": {"hindsight": 1.5},
    "sample 32 hindsight": {"hindsight": 0.7},
}
Buffers = dict[str, Any]
Steps = list[tuple[Any, ...]]


def half_cheetah_buffers(capacity: int) -> tuple[Buffers, Steps]:
    """Returns buffers for the spaces of HalfCheetah, and steps of one environment with a time limit after 200."""
    given = (capacity, spaces.Box(-1, 1, (17,), np.float32), spaces.Box(-1, 1, (6,), np.float32), "cpu")
    buffers: Buffers = {"Stable-Baselines3": ReplayBuffer(*given)}
    for recipe in ("uniform", "prioritized"):
        buffers[recipe] = RecipeBuffer(*given, recipe=recipe)
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(1001, 1, 17)).astype(np.float32)
    actions = rng.uniform(-1, 1, (1000, 1, 6)).astype(np.float32)
    steps: Steps = []
    for place in range(1000):
        is_late = place % 200 == 199
        infos = [{"TimeLimit.truncated": is_late}]
        steps.append((seen[place], seen[place + 1], actions[place], np.ones(1), np.array([is_late]), infos))
    return buffers, steps


def goal_buffers(capacity: int) -> tuple[Buffers, Steps]:
    """Returns hindsight buffers for a task of flipping bits, and steps of it."""

    def make() -> Any:
        return BitFlippingEnv(n_bits=6, continuous=False, max_steps=6)

    envs = DummyVecEnv([make])
    given = (capacity, envs.observation_space, envs.action_space)
    buffers: Buffers = {
        "Stable-Baselines3": HerReplayBuffer(*given, envs, device="cpu", n_sampled_goal=4),
        "hindsight": RecipeBuffer(*given, "cpu", recipe="hindsight", env=make()),
    }
    steps: Steps = []
    seen = envs.reset()
    for place in range(600):
        action = np.array([place % 6])
        following, reward, done, infos = envs.step(action)
        last = infos[0].get("terminal_observation")
        after = following if last is None else {key: part[None] for key, part in last.items()}
        steps.append((*({key: np.copy(part) for key, part in one.items()} for one in (seen, after)), action))
        steps[-1] += (np.copy(reward), np.copy(done), infos)
        seen = following
    return buffers, steps


def microseconds(work: Callable[[int], object]) -> float:
    """Returns the CPU time of a call, over a turn of calls."""
    start = time.process_time()
    for call in range(CALLS):
        work(call)
    return (time.process_time() - start) / CALLS * 1e6


def measure(table: Table, name: str, work: Callable[[Any, int], object], buffers: Buffers, rounds: int) -> None:
    """Measures one piece of work in turns, and prints the ratios to Stable-Baselines3."""
    times: dict[str, list[float]] = {key: [] for key in buffers}
    for _ in range(rounds):
        for key, buffer in buffers.items():
            times[key].append(microseconds(lambda call, buffer=buffer: work(buffer, call)))
    table.keep(name, times)
    found = table.times[name]
    for key in (key for key in buffers if key != "Stable-Baselines3"):
        ratio = found[key] / found["Stable-Baselines3"]
        if key in LIMITS.get(name, {}):
            table.at_most(f"{name}: {key} / Stable-Baselines3", ratio, LIMITS[name][key])
        else:
            print(f"           {name}: {key} / Stable-Baselines3: {ratio:.3g}", flush=True)


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    options = arguments(__doc__)
    table = Table("Stable-Baselines3")
    capacity = min(options.rows, 20_000)
    for suffix, batch_size, (buffers, steps) in (
        ("", 256, half_cheetah_buffers(capacity)),
        (" hindsight", 32, goal_buffers(capacity)),
    ):

        def add(buffer: Any, call: int, steps: Steps = steps) -> None:
            buffer.add(*steps[call % len(steps)])

        def draw(buffer: Any, call: int, batch_size: int = batch_size) -> None:
            buffer.sample(batch_size)
            buffer._drawn = None  # No training step follows that returns TD errors.

        def step(buffer: Any, call: int, add: Any = add, draw: Any = draw) -> None:
            add(buffer, call)
            draw(buffer, call)

        def four_steps(buffer: Any, call: int, add: Any = add, draw: Any = draw) -> None:
            for place in range(4):
                add(buffer, 4 * call + place)
            draw(buffer, call)

        for buffer in buffers.values():
            # Ends of the first 64 episodes are compared, which later steps do not pay.
            for place in range(15 * len(steps)):
                add(buffer, place)
            draw(buffer, 0)
        measure(table, f"add{suffix}", add, buffers, options.rounds)
        measure(table, f"sample {batch_size}{suffix}", draw, buffers, options.rounds)
        measure(table, f"add and sample {batch_size}{suffix}", step, buffers, options.rounds)
        measure(table, f"4 adds and sample {batch_size}{suffix}", four_steps, buffers, options.rounds)
    table.finish(save=options.save, name="sb3")


if __name__ == "__main__":
    main()
