# SPDX-License-Identifier: Apache-2.0
"""What one row and a thousand cost by every way in: with and without ``done``, by dtype of the reward, flat or not."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium
import numpy as np
import torch
from peers import arguments
from tensordict import TensorDict
from timing import Table

from lightning_replay import recipes
from lightning_replay.collecting import VectorSteps

LIMIT = 1.2  # times the fastest form of the same way
REWARDS = (np.float32, np.float64, np.int64)


def columns_of(count: int, *, has_done: bool, is_flat: bool, reward: type, names_episodes: bool) -> dict[Any, Any]:
    """Returns columns of rows as a loop has them, arrays ``[count, ...]``."""
    shape = (count,) if is_flat else (count, 1)
    observation = np.zeros((count, 4), np.float32)
    columns: dict[Any, Any] = {
        "observation": observation,
        "action": np.zeros(count, np.int64),
        ("next", "observation"): observation.copy(),
        ("next", "reward"): np.zeros(shape, reward),
        ("next", "terminated"): np.zeros(shape, bool),
        ("next", "truncated"): np.zeros(shape, bool),
    }
    if names_episodes:
        columns["trajectory"] = np.zeros(count, np.int64)
    if has_done:
        columns["next", "done"] = np.zeros(shape, bool)
    return columns


def rows_of(columns: dict[Any, Any]) -> TensorDict:
    """Returns columns as a TensorDict."""
    leaves = {key: torch.from_numpy(value) for key, value in columns.items()}
    following = {key[1]: value for key, value in leaves.items() if isinstance(key, tuple)}
    own = {key: value for key, value in leaves.items() if isinstance(key, str)}
    return TensorDict({**own, "next": following}, [len(leaves["action"])])


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    options = arguments(__doc__)
    table = Table("Ways in")
    for count in (1, 1000):
        ways: dict[str, dict[str, Any]] = {"arrays": {}, "tensors": {}, "TensorDict": {}}
        for has_done, is_flat, reward, names_episodes in itertools.product((0, 1), (0, 1), REWARDS, (0, 1)):
            columns = columns_of(
                count,
                has_done=bool(has_done),
                is_flat=bool(is_flat),
                reward=reward,
                names_episodes=bool(names_episodes),
            )
            shape = "[N]" if is_flat else "[N, 1]"
            parts = [shape, reward.__name__, "done" if has_done else "", "trajectory" if names_episodes else ""]
            name = ", ".join(part for part in parts if part)
            tensors = {key: torch.from_numpy(value) for key, value in columns.items()}
            rows = rows_of(columns)
            replays = [recipes.uniform(100_000, 128, seed=0) for _ in ways]
            ways["arrays"][name] = lambda r=replays[0], given=columns: r.extend_columns(given)
            ways["tensors"][name] = lambda r=replays[1], given=tensors: r.extend_columns(given)
            ways["TensorDict"][name] = lambda r=replays[2], given=rows: r.extend(given)
        for way, forms in ways.items():
            work = f"insert {count}, {way}"
            table.measure_in_turns(work, forms, rounds=options.rounds)
            times = table.times[work]
            fastest = min(times.values())
            slowest = max(times, key=times.__getitem__)
            table.at_most(f"{work}: {slowest} over the fastest form", times[slowest] / fastest, LIMIT)
    _measure_a_vector(table, options.rounds)
    table.finish(save=options.save, name="ways_in")


def _measure_a_vector(table: Table, rounds: int) -> None:
    """What ``VectorSteps`` adds to one environment, in steps of which 5 % reset it."""
    plain, wrapped = (gymnasium.make_vec("CartPole-v1", num_envs=1) for _ in range(2))
    steps = VectorSteps(wrapped)
    replay = recipes.uniform(100_000, 128, seed=0)
    plain.reset(seed=0)
    steps.reset(seed=0)
    actions = itertools.cycle([np.array([0]), np.array([1])])

    def stored() -> None:
        steps.step(next(actions))
        steps.store(replay)

    work = "step of one environment"
    table.measure_in_turns(
        work, {"alone": lambda: plain.step(next(actions)), "VectorSteps and store": stored}, rounds=rounds
    )
    times = table.times[work]
    added = times["VectorSteps and store"] - times["alone"]
    table.at_most(f"{work}: VectorSteps and store add, times the environment", added / times["alone"], 15 / 18)


if __name__ == "__main__":
    main()
