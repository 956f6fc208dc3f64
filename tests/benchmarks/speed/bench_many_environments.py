# SPDX-License-Identifier: Apache-2.0
"""One step of 4,096 and of 16,384 environments inserted at once, beside TorchRL's plain buffer and a ring by hand."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from timing import Table, microseconds
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.transforms import NStepTransitions

OBSERVATION, GOAL, ACTION = 98, 3, 29
STORED_STEPS = 16  # of each environment
# The event table has slots for 93 steps of each environment. A first write to new memory takes several times as long.
WARM_UP_STEPS = 96
ENDS = 0.005  # share of the episodes that terminate in a step, and of those that are truncated
# Kinds with a limit, which is a share of TorchRL's time at the first number of environments.
LIMITED = (
    "uniform",
    "prioritized",
    "returns of 3 steps",
    "sequences of 8",
    "event table, histories of 20",
    "hindsight",
)
LIMIT = 1.0
RING_LIMIT = 3.0  # of the ring's time, for returns of 3 steps
IS_NEAR = reward_at_least(-0.7)  # of three of 100 steps
GROWTH_LIMIT = 4.4  # from each number of environments to four times as many


def steps(num_envs: int, *, has_goals: bool) -> Iterator[TensorDict]:
    """Steps of environments whose episodes end at random; each episode has a number of its own."""
    generator = torch.Generator().manual_seed(0)
    seen, trajectory = torch.randn(num_envs, OBSERVATION, generator=generator), torch.arange(num_envs)
    while True:
        after = torch.randn(num_envs, OBSERVATION, generator=generator)
        chance = torch.rand(num_envs, 1, generator=generator)
        terminated, truncated = chance < ENDS, (chance >= ENDS) & (chance < 2 * ENDS)
        done = terminated | truncated
        following = {"observation": _observation(after, has_goals), "terminated": terminated, "truncated": truncated}
        reward = closeness(after[:, -2 * GOAL : -GOAL].numpy(), seen[:, -GOAL:].numpy(), {})
        following |= {"reward": torch.from_numpy(reward).unsqueeze(1), "done": done}
        columns = {"observation": _observation(seen, has_goals), "trajectory": trajectory, "next": following}
        yield TensorDict(columns | {"action": torch.randn(num_envs, ACTION, generator=generator)}, [num_envs])
        seen = torch.where(done, torch.randn(num_envs, OBSERVATION, generator=generator), after)
        trajectory = torch.where(done.flatten(), trajectory.max() + done.flatten().cumsum(0), trajectory)


def _observation(numbers: torch.Tensor, has_goals: bool) -> Any:
    if not has_goals:
        return numbers
    names = ("observation", "achieved_goal", "desired_goal")
    parts = numbers.split((OBSERVATION - 2 * GOAL, GOAL, GOAL), 1)
    return {name: part.contiguous() for name, part in zip(names, parts, strict=True)}


class Ring:
    """Columns written at a head: what an insert costs at least."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._head, self._rows = capacity, 0, None

    def extend(self, rows: TensorDict) -> None:
        """Writes rows, whose number divides the capacity."""
        if self._rows is None:
            size = self._capacity
            self._rows = rows.apply(lambda column: column.new_zeros(size, *column.shape[1:]), batch_size=[size])
        self._rows[self._head : self._head + len(rows)] = rows
        self._head = (self._head + len(rows)) % self._capacity


def closeness(achieved: np.ndarray, desired: np.ndarray, info: dict[str, Any]) -> np.ndarray:
    """Rewards for goals."""
    return -np.linalg.norm(achieved - desired, axis=-1)


def contenders(num_envs: int) -> dict[str, dict[str, Any]]:
    """Buffers by the kind of rows that they get."""
    capacity = num_envs * STORED_STEPS
    event = EventTable("near", IS_NEAR, history_length=20, capacity=num_envs)
    plain = {
        "ring": Ring(capacity),
        "torchrl": TensorDictReplayBuffer(storage=LazyTensorStorage(capacity)),
        "uniform": recipes.uniform(capacity),
        "prioritized": recipes.prioritized(capacity),
        "returns of 3 steps": recipes.uniform(capacity, n_steps=3),
        "returns of 3 steps, formed before": Replay(
            storage=PackedStorage(capacity), transform=NStepTransitions(3, 0.99)
        ),
        "sequences of 8": recipes.sequences(capacity, length=8),
        "event table, histories of 20": recipes.event_tables(capacity, tables=[event], max_trajectories=4 * num_envs),
        "reverse sweep": recipes.reverse_sweep(capacity, goal=IS_NEAR),
        "continuous transitions": recipes.continuous_transition(capacity),
    }
    goals = {
        "torchrl": TensorDictReplayBuffer(storage=LazyTensorStorage(capacity)),
        "hindsight": recipes.hindsight(capacity, reward=closeness),
    }
    return {"": plain, ", with goals": goals}


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="measured steps")
    parser.add_argument("--environments", type=int, default=4_096, help="of the smaller of both sizes")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    table = Table("Many environments")
    sizes = (options.environments, 4 * options.environments)
    for kind in ("", ", with goals"):
        works = [f"{size:,} environments{kind}" for size in sizes]
        for work, size in zip(works, sizes, strict=True):
            stream = steps(size, has_goals=bool(kind))
            table.keep(work, _times(contenders(size)[kind], stream, options.rounds))
        _judge(table, *works)
    table.finish(save=options.save, name="many_environments")


def _times(buffers: dict[str, Any], stream: Iterator[TensorDict], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each insert into each buffer, once all slots of the buffers were written."""
    samples: dict[str, list[float]] = {name: [] for name in buffers}
    names = list(buffers)
    for number, rows in enumerate(itertools.islice(stream, WARM_UP_STEPS + rounds)):
        # The first buffer finds the rows in the caches, so each is the first in turn.
        first = number % len(names)
        for name in names[first:] + names[:first]:
            time = microseconds(lambda buffer=buffers[name], rows=rows: buffer.extend(rows))
            if number >= WARM_UP_STEPS:
                samples[name].append(time)
    return samples


def _judge(table: Table, few: str, many: str) -> None:
    times = table.times[few]
    for name in times:
        if name in LIMITED:
            table.at_most(f"{few}: {name} over torchrl", times[name] / times["torchrl"], LIMIT)
        elif name != "torchrl":
            print(f"           {few}: {name} over torchrl: {times[name] / times['torchrl']:.3g}")
    if "ring" in times:
        name = "returns of 3 steps"
        table.at_most(f"{few}: {name} over ring", times[name] / times["ring"], RING_LIMIT)
    for name, time in times.items():
        table.at_most(f"{many} over {few}: {name}", table.times[many][name] / time, GROWTH_LIMIT)


if __name__ == "__main__":
    main()
