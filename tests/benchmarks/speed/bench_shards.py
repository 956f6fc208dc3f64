# SPDX-License-Identifier: Apache-2.0
"""T15: shards beside one buffer in the driver: its CPU time and bytes in a training step, and the latency of sample().

A training step of DQN, batch 32: two fragments of four steps come from an EnvRunner in another process, a batch is
drawn and handed over, a Learner elsewhere takes 8 ms, TD errors come back. Nothing else runs in the driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import statistics
import time
import warnings
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
from peers import arguments
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from timing import Burst, Table

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer
from rllib_ext.sharded.routing import EpisodeReference, Router

BATCH = 32
UPDATE_S = 0.008  # what a gradient step of DQN takes, see bench_rllib.py
FRAGMENTS, LENGTH = 2, 4
OBSERVATIONS = {"CartPole": np.zeros(4, np.float32), "image": np.zeros((84, 84, 4), np.uint8)}
SHARDS = (1, 2, 4)
AHEAD = (0, 1, 2)
WARM_UP = 100  # fragments
COUNTED = 20  # steps whose bytes are counted


class EnvRunner:
    """Puts fragments into the object store, as EnvRunners do."""

    def __init__(self, observation: np.ndarray) -> None:
        self._observation, self._count = observation, 0

    def fragments(self, count: int) -> list[ray.ObjectRef]:
        return [ray.put([self._fragment()]) for _ in range(count)]

    def _fragment(self) -> SingleAgentEpisode:
        self._count += 1
        return SingleAgentEpisode(
            id_=f"e{self._count}",
            observations=[self._observation + self._observation.dtype.type(self._count % 100)] * (LENGTH + 1),
            actions=[0] * LENGTH,
            rewards=[1.0] * LENGTH,
            terminated=True,
            len_lookback_buffer=0,
        ).to_numpy()


class OneBuffer:
    """A buffer in the driver."""

    def __init__(self, env_runner: Any, **options: Any) -> None:
        self.buffer = self._built({"capacity": 10_000, "seed": 0, **options})
        self._env_runner = env_runner
        self._fragments: list[ray.ObjectRef] = []
        self.latencies: list[float] = []
        self.bytes = 0
        self._counts = False
        self._td_errors = np.linspace(0.1, 1.0, BATCH, dtype=np.float32)
        self.prepare(WARM_UP)
        while self._fragments:
            self._add(self._fragments.pop())
        self.burst(10)  # the first draws compile
        self.latencies = []

    def _built(self, options: dict[str, Any]) -> Any:
        return RecipeEpisodeReplayBuffer("prioritized", layout="flagged", **options)

    def _add(self, reference: ray.ObjectRef) -> None:
        """Stores a fragment."""
        episodes = ray.get(reference)
        self._count(episodes)
        self.buffer.add(episodes)

    def _count(self, *objects: Any) -> None:
        if self._counts:
            self.bytes += sum(len(ray.cloudpickle.dumps(one)) for one in objects)

    def prepare(self, fragments: int) -> None:
        """Lets the EnvRunner play."""
        self._fragments += ray.get(self._env_runner.fragments.remote(fragments))

    def step(self) -> None:
        """One training step."""
        for _ in range(FRAGMENTS):
            self._add(self._fragments.pop())
        start = time.perf_counter()
        batch = self.buffer.sample(num_items=BATCH, n_step=1, gamma=0.99)
        self.latencies.append((time.perf_counter() - start) * 1e6)
        self.buffer.get_metrics()
        self._count(batch)
        handed_over = ray.put(batch)
        time.sleep(UPDATE_S)
        self.buffer.update_priorities(self._td_errors)
        del handed_over

    def burst(self, calls: int) -> float:
        """CPU microseconds of a step in all threads of the driver."""
        self.prepare(calls * FRAGMENTS)
        start = time.process_time()
        for _ in range(calls):
            self.step()
        return (time.process_time() - start) / calls * 1e6

    def bytes_of_a_step(self) -> float:
        """Bytes that pass through the driver."""
        self.prepare(COUNTED * FRAGMENTS)
        self.bytes, self._counts = 0, True
        for _ in range(COUNTED):
            self.step()
        self._counts = False
        return self.bytes / COUNTED


class Counted:
    """A handle that keeps the arguments and answers of its calls."""

    def __init__(self, handle: Any, kept: list[Any]) -> None:
        self._handle, self._kept = handle, kept

    def __getattr__(self, name: str) -> Any:
        method, kept = getattr(self._handle, name), self._kept

        class Call:
            def remote(self, *given: Any) -> ray.ObjectRef:
                answer = method.remote(*given)
                kept.append((given, answer))
                return answer

        return Call()


class Shards(OneBuffer):
    """The same divided over shards."""

    def _built(self, options: dict[str, Any]) -> Any:
        self.by_ahead: dict[int, list[float]] = {}
        self._router = Router(options["num_shards"])
        replay = ShardedEpisodeReplayBuffer("prioritized", num_cpus_per_shard=0, **options)
        replay.form_returns(1, 0.99)
        replay.start()
        return replay

    def _add(self, reference: ray.ObjectRef) -> None:
        shard = self._router.shard_of(reference.hex(), LENGTH, ended=True)
        self.buffer.add([EpisodeReference(shard, reference, LENGTH)])

    def _count(self, *objects: Any) -> None:
        """Counts in :meth:`bytes_of_a_step` instead."""

    def ahead(self, num_prefetch: int) -> Burst:
        """A burst with so many draws in flight, whose latencies are kept in :attr:`by_ahead`."""

        def burst(calls: int) -> float:
            shards = self.buffer.shards
            if shards.options.num_prefetch != num_prefetch:
                shards.options = dataclasses.replace(shards.options, num_prefetch=num_prefetch)
                self.buffer.draws.in_flight.clear()
                self.prepare(FRAGMENTS)
                self.step()
                self.latencies = []
            cpu = self.burst(calls)
            self.by_ahead.setdefault(num_prefetch, []).extend(self.latencies)
            self.latencies = []
            return cpu

        return burst

    def bytes_of_a_step(self) -> float:
        """Bytes of calls and answers, and of the references that are handed over."""
        shards, kept = self.buffer.shards, []
        handles = shards.handles
        shards.handles = [Counted(handle, kept) for handle in handles]
        super().bytes_of_a_step()
        shards.settle()
        shards.handles = handles
        total = sum(len(ray.cloudpickle.dumps((given, ray.get(answer)))) for given, answer in kept)
        return total / COUNTED


def measure(table: Table, kind: str, rounds: int) -> None:
    """Measures one kind of observation."""
    env_runner = ray.remote(num_cpus=0)(EnvRunner).remote(OBSERVATIONS[kind])
    one = OneBuffer(env_runner)
    divided = {count: Shards(env_runner, num_shards=count) for count in SHARDS}
    bursts: dict[str, Burst] = {"one buffer": one.burst}
    for count, shards in divided.items():
        for ahead in AHEAD:
            bursts[named(count, ahead)] = shards.ahead(ahead)
    work = f"driver CPU of a training step, {kind}"
    table.measure(work, bursts, rounds=rounds, seconds=0.1)
    latencies = {"one buffer": one.latencies}
    latencies |= {named(count, ahead): divided[count].by_ahead[ahead] for count in SHARDS for ahead in AHEAD}
    for name, of in (("median", statistics.median), ("p95", lambda values: float(np.quantile(values, 0.95)))):
        table.times[f"sample(), {name}, {kind}"] = found = {which: of(values) for which, values in latencies.items()}
        row = "  ".join(f"{which} {value:.0f}" for which, value in found.items())
        print(f"sample(), {name}, {kind}: {row}  (us)")
    for count in SHARDS:
        cpu, median = table.times[work], table.times[f"sample(), median, {kind}"]
        over = cpu[named(count, 0)] / cpu["one buffer"]
        print(f"  {named(count, 0)}: {over:.2f} times the driver's CPU of one buffer")
        waited = median[named(count, 1)] / median[named(count, 0)]
        table.at_most(f"T15 sample() of {named(count, 1)} over none ahead, {kind}", waited, 0.5)
    passed = {"one buffer": one.bytes_of_a_step()}
    passed |= {named(count, 0): divided[count].bytes_of_a_step() for count in SHARDS}
    print(f"bytes through the driver, {kind}: " + "  ".join(f"{name} {value:,.0f}" for name, value in passed.items()))
    if kind == "image":
        for count in SHARDS:
            share = passed[named(count, 0)] / passed["one buffer"]
            table.at_most(f"T15 bytes through the driver, {named(count, 0)} over one buffer, image", share, 0.02)
    for shards in divided.values():
        shards.buffer.stop()
    ray.kill(env_runner)


def named(count: int, ahead: int) -> str:
    """The name of a contender."""
    return f"{count} shard{'s' * (count > 1)}" + (f", {ahead} ahead" if ahead else "")


def main() -> None:
    """Measures and prints."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    options = arguments(__doc__)
    table = Table("Shards: DQN's training step in the driver, batch 32")
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    for kind in OBSERVATIONS:
        measure(table, kind, options.rounds)
    table.finish(save=options.save, name="shards")
    ray.shutdown()


if __name__ == "__main__":
    main()
