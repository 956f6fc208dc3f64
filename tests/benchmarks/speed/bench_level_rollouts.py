# SPDX-License-Identifier: Apache-2.0
"""Scores of a rollout's levels, read and stored as a whole, beside updates one by one: up to 4,096 actors."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from tensordict import TensorDict

from lightning_replay.levels import LevelBuffer, segments, update_rollout

SHAPES, SIZES, MEAN_LENGTH = ((256, 64), (4096, 16)), (1_000, 100_000), 16
Update = Callable[[LevelBuffer, TensorDict, torch.Tensor], None]


def one_by_one(levels: LevelBuffer, rollout: TensorDict, level_id: torch.Tensor) -> None:
    """A call of ``update`` for each piece of an episode."""
    for actor, level, steps, done in segments(rollout, level_id):
        levels.update(actor, level, steps, done)


def played(levels: LevelBuffer, actors: int, steps: int, seed: int) -> tuple[TensorDict, torch.Tensor, int]:
    """A rollout, the level of each of its steps, and how many episodes ended."""
    generator = torch.Generator().manual_seed(seed)
    done = torch.rand(actors, steps, generator=generator) < 1 / MEAN_LENGTH
    level_id = torch.zeros(actors, steps, dtype=torch.int64)
    for actor, ends in enumerate(done.tolist()):
        level = levels.next_level(actor)
        for step, ended in enumerate(ends):
            level_id[actor, step] = level
            level = levels.next_level(actor) if ended else level
    value, following, reward = torch.rand(3, actors, steps, generator=generator)
    ends = {"terminated": done, "truncated": torch.zeros_like(done), "done": done}
    columns = {"state_value": value, "next": {"reward": reward, "state_value": following, **ends}}
    return TensorDict(columns, [actors, steps]), level_id, int(done.sum())


def microseconds_per_episode(update: Update, size: int, actors: int, steps: int, seed: int) -> float:
    """Processor time of a rollout over its finished episodes; half of the levels have a score before."""
    levels = LevelBuffer(size, score_temperature=1.0, seed=seed)
    levels.record(torch.arange(size // 2), torch.rand(size // 2, generator=torch.Generator().manual_seed(seed)))
    rollout, level_id, ended = played(levels, actors, steps, seed)
    gc.collect()
    begun = time.process_time()
    update(levels, rollout, level_id)
    return 1e6 * (time.process_time() - begun) / ended


def main() -> None:
    """Measures and prints; both ways in turn."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print("microseconds of processor time per finished episode, L1 value loss included; medians")
    for actors, steps in SHAPES:
        for size in SIZES:
            times: dict[str, list[float]] = {"one by one": [], "as a whole": []}
            for seed in range(options.rounds):
                for name, update in (("one by one", one_by_one), ("as a whole", update_rollout)):
                    times[name].append(microseconds_per_episode(update, size, actors, steps, seed))
            found = ", ".join(f"{name} {statistics.median(each):.1f}" for name, each in times.items())
            print(f"[{actors:,}, {steps}], {size:,} levels: {found}", flush=True)


if __name__ == "__main__":
    main()
