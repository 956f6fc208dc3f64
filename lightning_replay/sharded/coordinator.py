# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that divides the draws of a sharded replay over its shards, for one training process or several."""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray

from lightning_replay.divided_draws import Divider
from lightning_replay.saving.folders import Folder
from lightning_replay.sharded.actors import ShardActors
from lightning_replay.sharded.draws import DividedDraws, DrawnRows
from lightning_replay.sharded.options import ReplayOptions
from lightning_replay.sharded.rate_limiter import RateLimiter
from lightning_replay.sharded.rows import NUM_KEYS, Layout, check_layout
from lightning_replay.sharded.saves import NAMES, SavedShards, first_state, load_shards, manifest_of, write_shards
from lightning_replay.sharded.shard import MODULE, ReplayShard

_REMEDY_FOR_RATIO = "Insert and draw in several processes, or in turn; or raise error_buffer or wait_timeout_s"
HAS_STOPPED = (
    "this sharded replay has stopped: stop() was called, or the process that built it has ended. Build another one, "
    "and load a save into it"
)
_FIRST_RANK = 1 << 16  # ranks number trajectories from here on, other processes from 0


class Coordinator:
    """Owns the shards of one replay and divides its draws and inserts; no row passes through it.

    Calls come through :meth:`call`, each in a thread, and one at a time runs; while it waits for shards, others do.
    """

    def __init__(self, options: ReplayOptions) -> None:
        self._lock = threading.Lock()
        self._idle, self._at_work = threading.Condition(self._lock), set[str]()
        self._call = threading.local()  # of each thread: its caller, and when that one waits no longer
        self._kept: dict[str, Exception] = {}  # errors of feedback, by the caller that gave it
        self._has_started = self._has_stopped = False
        self.options: ReplayOptions = options
        self._key = secrets.randbelow(NUM_KEYS)
        self._template = options.template()
        self._batch_size = self._template.batch_size
        count, seed = options.shards.num_shards, options.of_recipe["seed"]
        self.shards: ShardActors = ShardActors(
            ReplayShard,
            lambda shard: (options.recipe, options.of_recipe, shard, count),
            options.shards,
            wait=self._wait,
            time_left=self._time_left,
        )
        self.draws: DividedDraws = DividedDraws(
            self.shards, lambda module: Divider(self._template.sampler, seed=seed), self._clocks_of, key=self._key
        )
        self._limiter = RateLimiter(**options.limits, batch_size=self._batch_size)
        self._layout: Layout | None = None
        self._num_writers = self._num_draws = self._num_inserted = 0
        self._clocks: dict[str, int] = {}
        self._world_size = 1
        self._requests: set[int] = set()  # ranks that wait for the next batch
        self._shares: dict[int, DrawnRows] = {}  # of the last one, by rank, those that were not taken

    def call(self, caller: str, method: str, timeout_s: float, arguments: tuple[Any, ...]) -> Any:
        """Calls a method for the process ``caller``, or raises what a shard has raised for its earlier feedback."""
        with self._lock:
            self._check_running()
            self._call.caller, self._call.deadline = caller, time.monotonic() + timeout_s
            # Not in the middle of an extend, whose rows are on their way.
            if method not in ("stop", "look_at") and caller in self._kept:
                raise self._kept.pop(caller)
            if method != "start" and not self._has_started:
                return NotYet("the shards of this replay have not started", "See whether there are CPUs for them")
            return getattr(self, method)(*arguments)

    def start(self) -> None:
        self.shards.start()
        self._has_started = True

    def key_for(self, options: ReplayOptions) -> int:
        options.check_same(self.options)
        return self._key  # which batches carry, so that feedback of another replay is refused

    def new_writer(self) -> int:
        # For a process that numbers trajectories; no other has it.
        self._num_writers += 1
        return self._num_writers - 1

    def enter_rank(self, rank: int, world_size: int) -> int:
        # Discards shares not taken yet; returns the rank's number as a writer.
        with self._alone("draw"):
            self._world_size = world_size
            self._requests.clear()
            self._shares.clear()
        return _FIRST_RANK + rank

    def extend(self, parts: Sequence[tuple[int, list[ray.ObjectRef[Any]], int]], layout: Layout) -> list[Any] | NotYet:
        self.shards.settle({})  # an insert waits for no shard
        if layout != self._layout and self._layout is not None and not sum(self.shards.settle().rows.values()):
            self._layout = None  # as a shard has refused the first rows
        self._layout = check_layout(layout, self._layout)
        if late := [shard for shard, _, _ in parts if self.shards.is_late(shard)]:
            return NotYet(self.shards.unanswered(late), "Nothing was stored. Give the rows again later")
        if not self._limiter.may_insert(self._num_inserted, pending=0):
            return NotYet(self._limiter.reached("inserted"), _REMEDY_FOR_RATIO)
        answers = []
        for shard, reference, rows in parts:  # the reference in a list, or Ray would fetch the rows to this process
            self._limiter.insert(rows, size=self._num_inserted)
            self._num_inserted += rows
            answers.append(self.shards.send(shard, "extend", reference, self.draws.largest(shard), steps=rows))
        return answers

    def look_at(self, shard: int) -> str:
        with suppress(TimeoutError):  # the caller waits no longer
            self.shards.settle()
        return self.shards.unanswered([shard])

    def draw(self, batch_size: int, clocks: Mapping[str, int], is_counted: bool = True) -> DrawnRows | NotYet:
        # Not counted in the ratio where it replaces rows of a draw that were lost with their shard.
        with self._alone("draw"):
            return self._draw(batch_size, clocks, is_counted)

    def _draw(self, batch_size: int, clocks: Mapping[str, int], is_counted: bool = True) -> DrawnRows | NotYet:
        is_limited = is_counted and self._limiter.samples_per_insert is not None
        if is_limited and not self._limiter.may_sample(self._num_inserted):
            return NotYet(self._limiter.reached("drawn"), _REMEDY_FOR_RATIO)
        # Rows may be on their way, or in late shards, which the draw waits for.
        if not self.shards.rows and not self.shards.settle().rows and all(self.shards.alive):
            raise RuntimeError("the sharded replay is empty; call extend before sample")
        self._clocks |= clocks
        batch = self.draws.draw(batch_size)[MODULE]
        self._num_draws += 1
        if is_counted:
            self._limiter.sample()
        return DrawnRows(batch.blocks, batch.columns)

    def _clocks_of(self, draws_before: int) -> dict[str, int]:
        env_steps = self._clocks.get("env_steps", self._num_inserted)
        return {"env_steps": env_steps, "updates": self._clocks.get("updates", self._num_draws + 1) + draws_before}

    def draw_share(self, rank: int, world_size: int, clocks: Mapping[str, int]) -> DrawnRows | NotYet:
        with self._alone("draw"):
            if (share := self._shares.pop(rank, None)) is not None:  # another rank has drawn it meanwhile
                return share
            if world_size != self._world_size:
                raise ValueError(
                    f"rank {rank} shares draws with {world_size} ranks, and {self._world_size} entered since; call "
                    "for_rank in every rank before the first of them draws"
                )
            # The last rank to request the batch draws it, with the TD errors that the others gave before.
            self._requests.add(rank)
            if missing := sorted(set(range(world_size)) - self._requests):
                return NotYet(
                    f"ranks {missing} of {world_size} have not requested the next batch",
                    "Every rank must make the same number of draws; look for one that has ended or hangs",
                )
            drawn = self._draw(self._batch_size, clocks)
            if isinstance(drawn, NotYet):
                return drawn
            ends = np.linspace(0, len(drawn), world_size + 1).astype(int).tolist()
            self._shares = {one: drawn.cut(*ends[one : one + 2]) for one in range(world_size)}
            self._requests.clear()
            return self._shares.pop(rank)

    def update(self, index: np.ndarray, generation: np.ndarray, td_errors: np.ndarray, signals: Any) -> None:
        # What the shards refuse, the caller's next call raises.
        failed = functools.partial(self._kept.setdefault, self._call.caller)
        self.draws.update(MODULE, index, generation, td_errors, signals, failed)

    def end_episodes(self, writer: int, trajectories: np.ndarray | None) -> None:
        self._call_of_all("end_episodes", writer, trajectories)

    def num_rows(self) -> int:
        return sum(self.shards.settle().rows.values())

    def num_inserted(self) -> int:
        return self._num_inserted

    def progress(self, task: str, value: float) -> None:
        self._template.progress(task, value)

    def actor_tasks(self, num_actors: int) -> list[int]:
        return self._template.actor_tasks(num_actors)

    def seed(self, seed: int) -> None:
        self._template.seed(seed)
        self.draws.divider(MODULE).reseed(seed)
        self.options.of_recipe["seed"] = seed  # of shards that are started again, too
        self._call_of_all("seed", seed)

    def _call_of_all(self, method: str, *arguments: Any) -> None:
        # Also of one that is lost meanwhile and started again.
        sent = self.shards.send_all(method, lambda shard: arguments)
        try:
            self.shards.values_of(sent, again=True)
        except TimeoutError as error:
            raise TimeoutError(f"{error}. It does what it was sent ({method}) once it answers") from error

    def stats(self) -> dict[str, Any]:
        limits = self._limiter.stats()
        counts = {"num_rows_inserted": self._num_inserted, "num_draws": self._num_draws}
        return {**stats_of(self.shards, self.draws), **counts, "rate_limiter": limits}

    def save(self, folder: Folder, previous: Path | None) -> None:
        with self._alone("save"):
            write_shards(self.shards, folder, NAMES, self._state, self._options_in_saves(), previous)

    def load(self, folder: Folder) -> None:
        """Replaces everything by a save of the same recipe and options; after an error nothing is changed."""
        with self._alone("save"):
            saved = SavedShards.read(folder, NAMES, manifest_of)
            is_of_shards, here = saved.state is not None, self._options_in_saves()
            there = {name: saved.manifest.get(name) for name in here}
            if is_of_shards and there != here:  # else its rows are checked as they are stored
                raise ValueError(
                    f"{folder} holds a sharded replay of {there}, and this one is of {here}. Build one with the "
                    "options of the save to load it. Nothing was loaded"
                )

            def restore(staged: list[Any]) -> None:
                self.shards.epochs += 1  # TD errors of rows that were drawn before belong to none of these
                self._restore(saved.state or first_state(staged))
                if not is_of_shards:
                    self.shards.last_save = None

            load_shards(self.shards, folder, saved, is_of_shards)(restore)

    def _options_in_saves(self) -> dict[str, Any]:
        return {"recipe": self.options.recipe, "capacities": self.options.capacities}

    def _state(self) -> dict[str, Any]:
        return {
            "draws": self.draws.state_dict(),
            "limiter": self._limiter.state_dict(),
            "losses": self.shards.lost.state(),
            "counts": [self._num_writers, self._num_draws, self._num_inserted],
            "layout": self._layout,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.draws.load_state_dict(state["draws"])
        self._limiter.load_state_dict(state["limiter"])
        self.shards.lost.load(state["losses"])
        num_writers, self._num_draws, self._num_inserted = state["counts"]
        self._num_writers = max(self._num_writers, num_writers)  # numbers given since are in use
        self._layout, self._clocks = state["layout"], {}
        self._requests.clear()
        self._shares.clear()

    def generator_fingerprint(self) -> bytes:
        return repr((self._num_draws, self.draws.divider(MODULE).state_dict()["generator"].sum().item())).encode()

    def stop(self) -> None:
        # This process ends a moment later. Until then calls of other processes come, and some wait here.
        self._has_stopped = True
        self.shards.stop()

    def _check_running(self) -> None:
        if self._has_stopped:
            raise RuntimeError(HAS_STOPPED)

    def _time_left(self) -> float:
        return float(self._call.deadline - time.monotonic())

    def _wait(self, references: list[Any], *, num_returns: int = 1, timeout: float) -> Any:
        if timeout <= 0:
            return ray.wait(references, num_returns=num_returns, timeout=0)
        self._lock.release()  # while it waits, other calls run
        try:
            found = ray.wait(references, num_returns=num_returns, timeout=timeout)
        finally:
            self._lock.acquire()
        self._check_running()
        return found

    @contextmanager
    def _alone(self, work: str) -> Iterator[None]:
        # While it waits, other calls run.
        if not self._idle.wait_for(lambda: work not in self._at_work, timeout=max(self._time_left(), 0.0)):
            raise TimeoutError(f"another process's {work} has not ended: {self.shards.unanswered()}")
        self._check_running()
        self._at_work.add(work)
        try:
            yield
        finally:
            self._at_work.remove(work)
            self._idle.notify_all()


class NotYet(NamedTuple):
    """The answer to a call that has to wait and is to be repeated."""

    # For the error if that takes too long.
    reason: str
    remedy: str


def stats_of(shards: ShardActors, draws: DividedDraws) -> dict[str, Any]:
    """Returns what the shards hold and what was lost, after everything sent has been answered.

    * ``num_shards``, ``num_rows`` and ``bytes`` stored;
    * of each shard ``rows``, ``mass`` (what its rows are drawn in proportion to), ``alive`` and ``epochs`` (how often
      it was started; of a ``ShardedReplay`` saves that were loaded count as well);
    * ``draws_in_flight``, which the shards have made ahead;
    * ``rows_lost`` with shards, and steps that these had been sent;
    * ``td_errors_dropped`` because their shard was lost, ``stale_updates_dropped`` because their row had left;
    * ``fragments_lost`` with EnvRunners before a shard had fetched them.

    Shards that are late or are being started are left out of ``bytes`` and ``stale_updates_dropped``.
    """
    answers: list[dict[str, dict[str, Any]]] = []
    for shard in range(len(shards.handles)):
        shards.send(shard, "stats", then=answers.append)
    shards.settle()
    replays = [stats for answer in answers for stats in answer.values()]
    rows = [report.num_rows for report in shards.reports]
    return {
        "num_shards": len(shards),
        "num_rows": sum(rows),
        "rows": rows,
        "mass": [float(sum(total.mass.sum() for total in report.totals.values())) for report in shards.reports],
        "alive": shards.alive,
        "epochs": shards.epochs.tolist(),
        "draws_in_flight": len(draws.in_flight),
        "rows_lost": shards.lost.rows,
        "td_errors_dropped": shards.lost.td_errors,
        "stale_updates_dropped": sum(one["stale_updates_dropped"] for one in replays),
        "fragments_lost": sum(report.fragments_lost for report in shards.reports),
        "bytes": sum(one["nbytes"] for one in replays),
    }
