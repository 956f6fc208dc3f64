# SPDX-License-Identifier: Apache-2.0
"""The level server of RLlib: a call for each EnvRunner and round beside a call for each episode.

The server is a real Ray actor; EnvRunners are simulated by this process, which shares its two cores with the server. In
a round each of them begins 5 to 11 episodes, and a Learner then sends the values of all of them. Nothing is played in
between: the times are those of the calls alone. Microseconds of an episode.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
from ray import cloudpickle

from lightning_replay.levels import LevelBuffer
from rllib_ext.levels.level_assignment import attach_player, end_round
from rllib_ext.levels.server import Fragment, LevelServer

LEVELS, STEPS, ENVIRONMENTS = 4_000, 50, 2
LEAST, MOST = 5, 11  # episodes of an EnvRunner and round
PACED = 300  # episodes of the EnvRunner whose steps take a millisecond
STEP_S = 0.001


class Counting(LevelServer):
    """Counts its calls."""

    calls = 0

    def draw(self, *arguments: Any) -> list[int]:
        self.calls += 1
        return super().draw(*arguments)

    def seconds(self) -> tuple[float, int]:
        """CPU time, and calls that drew."""
        return time.process_time(), self.calls


def server() -> Any:
    """A new actor."""
    levels = cloudpickle.dumps(LevelBuffer(LEVELS, staleness_weight=0.3, seed=0))
    options = {"environments": 1, "max_lag": 16, "max_pending": 10_000, "flush": False}
    return ray.remote(num_cpus=0)(Counting).remote(levels, spare=tempfile.mkdtemp(), **options)


def one_by_one(actor: Any, episodes: list[int], number: int) -> list[str]:
    """Each EnvRunner waits for the level of an episode before it begins the next."""
    names = [[f"{number}-{runner}-{place}" for place in range(count)] for runner, count in enumerate(episodes)]
    waiting = {actor.draw.remote(runner, "process", own[:1]): (runner, 1) for runner, own in enumerate(names)}
    while waiting:
        (ready,), _ = ray.wait(list(waiting))
        runner, place = waiting.pop(ready)
        ray.get(ready)
        if place < episodes[runner]:
            waiting[actor.draw.remote(runner, "process", names[runner][place : place + 1])] = runner, place + 1
    return [name for own in names for name in own]


class Supplied:
    """EnvRunners that draw ahead."""

    def __init__(self, actor: Any, runners: int) -> None:
        self._runners = [env_runner(actor, number) for number in range(runners)]

    def __call__(self, actor: Any, episodes: list[int], number: int) -> list[str]:
        """All levels of a round."""
        names = []
        for runner in self._runners:
            if runner.level_supply.is_due:
                runner.level_supply.begin_round()
        for runner, count in zip(self._runners, episodes, strict=True):
            for _ in range(count):
                name, level_of = runner.level_supply.take(None)
                assert level_of() >= 0
                names.append(name)
            end_round(env_runner=runner)
        return names


def env_runner(actor: Any, number: int) -> Any:
    """A simulated one."""
    runner = SimpleNamespace(worker_index=number, config=SimpleNamespace(num_envs_per_env_runner=ENVIRONMENTS))
    attach_player(runner, actor)
    return runner


def score(actor: Any, names: list[str], columns: tuple[np.ndarray, np.ndarray]) -> None:
    """An episode of each name."""
    pieces = zip(names, *(np.split(column, len(names)) for column in columns), strict=True)
    ray.get(actor.score.remote([Fragment(name, 0, one[:-1], other, True, False) for name, one, other in pieces]))


def measure(runners: int, ways: list[tuple[Callable[..., list[str]], Any]], rounds: int) -> list[Any]:
    """Calls, microseconds of a draw, of the server's CPU in it and in a score; of an episode, both ways in turns."""
    generator, totals = np.random.default_rng(0), [np.zeros(5) for _ in ways]
    for number in range(rounds + 1):
        episodes = generator.integers(LEAST, MOST + 1, runners).tolist()
        columns = tuple(generator.random((2, sum(episodes) * (STEPS + 1)), np.float32))
        for (draw, actor), total in zip(ways, totals, strict=True):
            before, start = ray.get(actor.seconds.remote()), time.perf_counter()
            names = draw(actor, episodes, number)
            drawn, after = time.perf_counter() - start, ray.get(actor.seconds.remote())
            score(actor, names, columns)
            if number:  # the first one warms up
                scored = ray.get(actor.seconds.remote())[0] - after[0]
                total += len(names), (after[1] - before[1]) * 1e-6, drawn, after[0] - before[0], scored
    return [total[1:] / total[0] * 1e6 for total in totals]


def paced(actor: Any, ahead: bool) -> float:
    """Microseconds that an episode waits for its level, where a step takes a millisecond and a round 100 of them."""
    ray.get(actor.seconds.remote())  # it has started
    generator, runner, waited, names = np.random.default_rng(0), env_runner(actor, 0), 0.0, []
    supply = runner.level_supply
    ends = generator.integers(10, 40, ENVIRONMENTS)
    for step in range(PACED * 25 // ENVIRONMENTS):
        if step and step % 100 == 0:
            end_round(env_runner=runner)
        for environment in np.flatnonzero(ends == step):
            names.append(f"paced-{len(names)}")
            start = time.perf_counter()
            if ahead:
                _, level_of = supply.take(None)
            else:
                ray.get(actor.draw.remote(0, "process", names[-1:]))
            waited += time.perf_counter() - start
            ends[environment] = step + generator.integers(10, 40)
        if supply.is_due and ahead:
            supply.begin_round()
        time.sleep(STEP_S)
        if ahead and (ends > step).all() and names:  # the reset is a step later
            start = time.perf_counter()
            assert level_of() >= 0
            waited += time.perf_counter() - start
    return waited / len(names) * 1e6


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    shown = ("calls", "a draw", "CPU of the server in it", "CPU of the server in a score")
    for runners in (64, 256):
        actor = server()
        old, new = measure(runners, [(one_by_one, server()), (Supplied(actor, runners), actor)], rounds)
        for name, before, after in zip(shown, old, new, strict=True):
            print(
                f"{runners} EnvRunners, {name}: {before:.2f} a call each, {after:.2f} ahead, ratio {before / after:.1f}"
            )
    each, ahead = (paced(server(), is_ahead) for is_ahead in (False, True))
    print(f"an episode waits: {each:.0f} us with a call each, {ahead:.0f} us ahead, ratio {each / ahead:.1f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
