# SPDX-License-Identifier: Apache-2.0
"""T11: choosing a level and recording a score, 64 actors in turn, up to a million levels."""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Mapping
from itertools import count, cycle

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from timing import Burst, Table, Work, burst_of, microseconds

from lightning_replay.levels import Greedy, LevelBuffer, Proportional, Rank
from lightning_replay.levels.scores import L1ValueLoss, Learnability, Score

ACTORS, STEPS = 64, 16
SIZES = (1_000, 10_000, 100_000, 1_000_000)
CAPACITY = 4_000
TARGET_SIZE = 100_000
UNBOUNDED, FREE = f"unbounded, {CAPACITY:,} levels", ", free score"
FINITE_LIMIT, UNBOUNDED_LIMIT, BATCH_LIMIT = 100.0, 300.0, 5.0
BATCH, OUTCOMES = 4_096, 8
IN_BATCHES = f"{TARGET_SIZE:,} levels in batches of {BATCH:,}"
PRIORITIZATIONS = {"rank": Rank, "proportional": Proportional, "greedy": Greedy}


class NumpyLevels:
    """The obvious way, as published implementations have it: all probabilities of all levels for every choice."""

    def __init__(self, levels: int, score_temperature: float = 0.1, staleness_weight: float = 0.1) -> None:
        self.score, self.timestamp, self.episodes = np.zeros(levels), np.zeros(levels), 0
        self._temperature, self._staleness_weight = score_temperature, staleness_weight
        self._generator = np.random.default_rng(0)

    def next_level(self, actor: int) -> int:
        """By rank of the scores, and by staleness."""
        self.episodes += 1
        rank = np.empty(len(self.score))
        rank[np.argsort(-self.score)] = np.arange(1, len(self.score) + 1)
        weight = (1.0 / rank) ** (1.0 / self._temperature)
        staleness = self.episodes - self.timestamp
        probability = (1 - self._staleness_weight) * weight / weight.sum()
        probability += self._staleness_weight * staleness / staleness.sum()
        level = int(self._generator.choice(len(probability), p=probability / probability.sum()))
        self.timestamp[level] = self.episodes
        return level

    def update(self, actor: int, level_id: int, steps: TensorDictBase, episode_done: bool) -> None:
        """A score that costs nothing, so that this is bookkeeping alone."""
        self.score[level_id] = self._generator.random()


def work_of(levels: int) -> str:
    """How the table calls it."""
    return f"{levels:,} levels"


def segments() -> list[TensorDict]:
    """Episodes of 16 steps, different from each other."""
    generator = torch.Generator().manual_seed(0)
    ended = torch.zeros(STEPS, dtype=torch.bool)
    ended[-1] = True
    made = []
    for _ in range(256):
        value = torch.rand(STEPS + 1, generator=generator)
        value[-1] = 0.0
        reward = torch.rand(STEPS, generator=generator)
        following = {"reward": reward, "state_value": value[1:], "terminated": ended, "done": ended}
        following["truncated"] = torch.zeros_like(ended)
        columns = {"state_value": value[:-1], "next": TensorDict(following, batch_size=[STEPS])}
        made.append(TensorDict(columns, batch_size=[STEPS]))
    return made


def free_score() -> Score:
    """Random scores that cost nothing."""
    values = cycle(np.random.default_rng(0).random(4096).tolist())
    return lambda steps: next(values)


def rising_score() -> Score:
    """Each above the one before, so that every candidate to a full buffer replaces a level."""
    values = count(1)
    return lambda steps: float(next(values))


class Actors:
    """64 actors that play in turn: a level of the one whose turn it is gets its score, and the actor its next level."""

    def __init__(self, levels: LevelBuffer | NumpyLevels) -> None:
        self._levels = levels
        self._played, self._turn = cycle(segments()), cycle(range(ACTORS))
        self._playing = [levels.next_level(actor) for actor in range(ACTORS)]

    def episode(self) -> None:
        """The piece of work of T11."""
        actor = next(self._turn)
        self._levels.update(actor, self._playing[actor], next(self._played), True)
        self._playing[actor] = self._levels.next_level(actor)


def visited(levels: LevelBuffer, count: int) -> LevelBuffer:
    """The same, after an episode of each level."""
    steps = segments()[0]
    for level_id in range(count):
        levels.start(0, level_id)
        levels.update(0, level_id, steps, True)
    return levels


def filled(levels: int | None, capacity: int | None, count: int, free: Callable[[], Score]) -> dict[str, LevelBuffer]:
    """Buffers of the same scores, each prioritization with the default score and with one that costs nothing.

    Args:
        levels: how many are known; ``None`` for levels without end, half of whose episodes are on new ones.
        capacity: without ``levels``.
        count: of levels that were visited.
        free: makes a score that costs nothing.
    """
    state = visited(LevelBuffer(levels, capacity=capacity, score=free_score(), seed=0), count).state_dict()
    made = {}
    for name, rule in PRIORITIZATIONS.items():
        made[name] = LevelBuffer(levels, capacity=capacity, prioritization=rule(), seed=0)
        made[name + FREE] = LevelBuffer(levels, capacity=capacity, score=free(), prioritization=rule(), seed=0)
    for buffer in made.values():
        buffer.load_state_dict(state)
    return made


def mean_of(work: Work) -> Burst:
    """Mean microseconds of a call: a new level costs more than a replayed one, so that a median says little."""

    def burst(calls: int) -> float:
        return microseconds(lambda: [work() for _ in range(calls)]) / calls

    return burst


def in_batches() -> dict[str, Burst]:
    """A level of a batch that is drawn and recorded, and an episode with the same score; all levels have a score."""
    made = []
    for _ in range(2):
        made.append(LevelBuffer(TARGET_SIZE, score=Learnability(OUTCOMES, success=0.5 * STEPS), seed=0))
        made[-1].record(torch.arange(TARGET_SIZE), torch.rand(TARGET_SIZE, generator=torch.Generator().manual_seed(0)))
    levels, outcomes = made[0], torch.rand(BATCH, OUTCOMES, generator=torch.Generator().manual_seed(0)).round()
    batch = mean_of(lambda: levels.record(levels.next_levels(BATCH), outcomes=outcomes))
    return {"batch": lambda calls: batch(8) / BATCH, "one by one": mean_of(Actors(made[1]).episode)}


def bursts(levels: Mapping[str, LevelBuffer | NumpyLevels]) -> dict[str, Burst]:
    """An episode of each."""
    return {name: mean_of(Actors(buffer).episode) for name, buffer in levels.items()}


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    # the temperature is what is measured
    warnings.filterwarnings("ignore", message=".*took the same level as the replay before")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    table = Table(f"one episode of {STEPS} steps: its score, and the next level; {ACTORS} actors, microseconds")
    for levels in options.sizes:
        work = work_of(levels)
        made = filled(levels, None, levels, free_score)
        table.measure(work, bursts({**made, "numpy": NumpyLevels(levels)}), rounds=options.rounds)
        times = table.times[work]
        print(f"        numpy over rank with a free score: {times['numpy'] / times['rank' + FREE]:.2f}")
    table.measure(IN_BATCHES, in_batches(), rounds=options.rounds)
    score, played = L1ValueLoss(discount=0.999, gae_lambda=0.95), cycle(segments())
    table.measure("the score alone", {"L1 value loss": burst_of(lambda: score(next(played)))}, rounds=options.rounds)
    for state, capacity, free in (("filling", 25 * CAPACITY, free_score), ("full", CAPACITY, rising_score)):
        made = filled(None, capacity, CAPACITY, free)
        table.measure(f"{UNBOUNDED}, {state}", bursts(made), rounds=options.rounds)
        for name, buffer in made.items():
            print(f"        {name}: {buffer.table.replaced:,} replaced, {buffer.table.refused:,} refused")
    judge(table, options.sizes)
    table.finish(save=options.save, name="levels")


def judge(table: Table, sizes: list[int]) -> None:
    """Compares with the targets."""
    small, large = min(sizes), max(sizes)
    logarithms = math.log(large) / math.log(small)
    taken = table.times[IN_BATCHES]["batch"]
    table.at_most(f"T11 {IN_BATCHES}: microseconds for each level on this machine", taken, BATCH_LIMIT)
    for name in PRIORITIZATIONS:
        if TARGET_SIZE in sizes:
            taken = table.times[work_of(TARGET_SIZE)][name]
            table.at_most(f"T11 {name}, {TARGET_SIZE:,} levels: microseconds on this machine, now", taken, FINITE_LIMIT)
        growth, with_score = (
            table.times[work_of(large)][f"{name}{score}"] / table.times[work_of(small)][f"{name}{score}"]
            for score in (FREE, "")
        )
        table.at_most(f"T11 {name}: {large:,} levels over {small:,}, bookkeeping alone", growth, logarithms)
        print(f"        with the score: {with_score:.2f}")
        for state in ("filling", "full"):
            taken = table.times[f"{UNBOUNDED}, {state}"][name]
            table.at_most(f"T11 {name}, {UNBOUNDED}, {state}: microseconds on this machine", taken, UNBOUNDED_LIMIT)


if __name__ == "__main__":
    main()
