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
    """Owns the shards of one replay and divides its draws and inserts. No row passes through it.

    Calls come through :meth:`call`, each in a thread. One call runs at a time. While it waits for shards, other calls
    run.
    """

    def __init__(self, options: ReplayOptions) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._at_work: set[str] = set()
        # The caller of each thread, and the time until which it waits.
        self._call = threading.local()
        # Errors of feedback, by the caller that gave it.
        self._kept: dict[str, Exception] = {}
        self._has_started = self._has_stopped = False
        self.options: ReplayOptions = options
        self._key = secrets.randbelow(NUM_KEYS)
        self._template = options.template()
        self._batch_size = self._template.batch_size
        count = options.shards.num_shards
        seed = options.of_recipe["seed"]
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
        # Ranks that wait for the next batch.
        self._requests: set[int] = set()
        # Shares of the last batch that their ranks have not taken.
        self._shares: dict[int, DrawnRows] = {}

    def call(self, caller: str, method: str, timeout_s: float, arguments: tuple[Any, ...]) -> Any:
        """Calls a method for the process ``caller``, or raises the error of a shard for its earlier feedback."""
        with self._lock:
            self._check_running()
            self._call.caller = caller
            self._call.deadline = time.monotonic() + timeout_s
            # The error waits until the rows of an extend are stored.
            if method not in ("stop", "look_at") and caller in self._kept:
                raise self._kept.pop(caller)
            if method != "start" and not self._has_started:
                return NotYet("the shards of this replay have not started", "See whether there are CPUs for them")
            return getattr(self, method)(*arguments)

    def start(self) -> None:
        """Starts the shards, and waits for them."""
        self.shards.start()
        self._has_started = True

    def key_for(self, options: ReplayOptions) -> int:
        """Returns the number in all batches of this replay, by which feedback of another replay is refused.

        Raises:
            ValueError: The caller's options differ from the options of the running replay.
        """
        options.check_same(self.options)
        return self._key

    def new_writer(self) -> int:
        """Returns a number that no other process that fills this replay has."""
        self._num_writers += 1
        return self._num_writers - 1

    def enter_rank(self, rank: int, world_size: int) -> int:
        """Discards shares that no rank has taken, and returns the rank's number as a writer."""
        with self._alone("draw"):
            self._world_size = world_size
            self._requests.clear()
            self._shares.clear()
        return _FIRST_RANK + rank

    def extend(
        self, parts: Sequence[tuple[int, list[ray.ObjectRef[Any]], int]], layout: Layout, clocks: Mapping[str, int]
    ) -> list[Any] | NotYet:
        """Sends references of rows to their shards, and returns the references of the answers.

        Args:
            parts: Shard, reference of its rows, and their number, for each shard.
            layout: Layout of the rows, which must be that of the first rows.
            clocks: Readings that the caller has set.
        """
        # An insert waits for no shard.
        self.shards.settle({})
        if layout != self._layout and self._layout is not None and not sum(self.shards.settle().rows.values()):
            # A shard has refused the first rows.
            self._layout = None
        self._layout = check_layout(layout, self._layout)
        if late := [shard for shard, _, _ in parts if self.shards.is_late(shard)]:
            return NotYet(self.shards.unanswered(late), "Nothing was stored. Give the rows again later")
        if not self._limiter.may_insert(self._num_inserted, pending=0):
            return NotYet(self._limiter.reached("inserted"), _REMEDY_FOR_RATIO)
        answers = []
        self._clocks |= clocks
        # The ages of new rows count from the clocks of all shards.
        readings = {"env_steps": self._num_inserted, "updates": self._num_draws} | self._clocks
        # The reference stands in a list, because Ray would fetch the rows to this process otherwise.
        for shard, reference, rows in parts:
            self._limiter.insert(rows, size=self._num_inserted)
            self._num_inserted += rows
            largest = self.draws.largest(shard)
            answers.append(self.shards.send(shard, "extend", reference, largest, readings, steps=rows))
        return answers

    def look_at(self, shard: int) -> str:
        """Returns the text of an error about a shard, after a look at its answers."""
        with suppress(TimeoutError):
            self.shards.settle()
        return self.shards.unanswered([shard])

    def draw(self, batch_size: int, clocks: Mapping[str, int], is_counted: bool = True) -> DrawnRows | NotYet:
        """Draws rows for one process. A draw that replaces lost rows is not counted in the ratio."""
        with self._alone("draw"):
            return self._draw(batch_size, clocks, is_counted)

    def _draw(self, batch_size: int, clocks: Mapping[str, int], is_counted: bool = True) -> DrawnRows | NotYet:
        is_limited = is_counted and self._limiter.samples_per_insert is not None
        if is_limited and not self._limiter.may_sample(self._num_inserted):
            return NotYet(self._limiter.reached("drawn"), _REMEDY_FOR_RATIO)
        # Rows may be on their way, or in late shards. The draw waits for both.
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
        """Returns the share of a rank, of a batch that the last rank to request it draws for all."""
        with self._alone("draw"):
            share = self._shares.pop(rank, None)
            if share is not None:
                return share
            if world_size != self._world_size:
                raise ValueError(
                    f"rank {rank} shares draws with {world_size} ranks, and {self._world_size} entered since; call "
                    "for_rank in every rank before the first of them draws"
                )
            # The last rank draws the batch, so that the TD errors of all ranks are in it.
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
            self._shares = {number: drawn.rows(*ends[number : number + 2]) for number in range(world_size)}
            self._requests.clear()
            return self._shares.pop(rank)

    def update(
        self,
        index: np.ndarray,
        generation: np.ndarray,
        td_errors: np.ndarray,
        signals: Mapping[str, np.ndarray],
    ) -> None:
        """Sends TD errors to their rows. If a shard refuses them, the caller's next call raises its error."""
        failed = functools.partial(self._kept.setdefault, self._call.caller)
        self.draws.update(MODULE, index, generation, td_errors, signals, failed)

    def end_episodes(self, writer: int, trajectories: np.ndarray | None) -> None:
        """Ends running episodes of a writer in every shard. ``None`` ends all of them."""
        self._call_of_all("end_episodes", writer, trajectories)

    def num_rows(self) -> int:
        """Returns the number of stored rows, after all answers."""
        return sum(self.shards.settle().rows.values())

    def num_inserted(self) -> int:
        """Returns the number of rows that processes have given."""
        return self._num_inserted

    def progress(self, task: str, value: float) -> None:
        """Passes a progress signal to the curriculum."""
        self._template.progress(task, value)

    def actor_tasks(self, num_actors: int) -> list[int]:
        """Returns the task of each actor of a curriculum."""
        return self._template.actor_tasks(num_actors)

    def seed(self, seed: int) -> None:
        """Seeds the draws and every shard."""
        self._template.seed(seed)
        self.draws.divider(MODULE).reseed(seed)
        # Shards that are started again use this seed.
        self.options.of_recipe["seed"] = seed
        self._call_of_all("seed", seed)

    def _call_of_all(self, method: str, *arguments: Any) -> None:
        # A shard that is lost and started again is sent the call again.
        sent = self.shards.send_all(method, lambda shard: arguments)
        try:
            self.shards.values_of(sent, again=True)
        except TimeoutError as error:
            raise TimeoutError(f"{error}. The shard runs {method} once it answers") from error

    def stats(self) -> dict[str, Any]:
        """Returns the statistics that :meth:`ShardedReplay.stats` documents."""
        limits = self._limiter.stats()
        counts = {"num_rows_inserted": self._num_inserted, "num_draws": self._num_draws}
        return {**stats_of(self.shards, self.draws), **counts, "rate_limiter": limits}

    def save(self, folder: Folder, previous: Path | None) -> None:
        """Lets every shard write its rows, and writes the state of the draws and the manifest."""
        with self._alone("save"):
            write_shards(self.shards, folder, NAMES, self._state, self._options_in_saves(), previous)

    def load(self, folder: Folder) -> None:
        """Replaces everything by a save of the same recipe and options. After an error nothing is changed."""
        with self._alone("save"):
            saved = SavedShards.read(folder, NAMES, manifest_of)
            is_of_shards = saved.state is not None
            here = self._options_in_saves()
            there = {name: saved.manifest.get(name) for name in here}
            # The rows of a save without shards are checked when they are stored.
            if is_of_shards and there != here:
                raise ValueError(
                    f"{folder} holds a sharded replay of {there}, and this one is of {here}. Build one with the "
                    "options of the save to load it. Nothing was loaded"
                )

            def restore(staged: list[Any]) -> None:
                # TD errors of earlier draws belong to none of the loaded rows.
                self.shards.epochs += 1
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
        # Running processes go on to use their numbers.
        self._num_writers = max(self._num_writers, num_writers)
        self._layout = state["layout"]
        self._clocks = {}
        self._requests.clear()
        self._shares.clear()

    def generator_fingerprint(self) -> bytes:
        """Returns bytes that change with each draw."""
        return repr((self._num_draws, self.draws.divider(MODULE).state_dict()["generator"].sum().item())).encode()

    def stop(self) -> None:
        """Ends the shards. This process ends a moment later, and refuses the calls that come until then."""
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
        # Other calls run while this one waits.
        self._lock.release()
        try:
            found = ray.wait(references, num_returns=num_returns, timeout=timeout)
        finally:
            self._lock.acquire()
        self._check_running()
        return found

    @contextmanager
    def _alone(self, work: str) -> Iterator[None]:
        # Other calls run while this one waits.
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
    """The answer to a call that must wait: the caller repeats the call."""

    reason: str  #: First sentence of the error if the call waits too long.
    remedy: str  #: Advice of the error.


def stats_of(shards: ShardActors, draws: DividedDraws) -> dict[str, Any]:
    """Returns the contents of the shards and the losses, after all answers have come.

    * ``num_shards``, ``num_rows``, and ``bytes`` count all shards together.
    * ``rows``, ``mass``, ``alive``, and ``epochs`` list one value for each shard. Rows are drawn in proportion to
      ``mass``. ``epochs`` counts the starts of a shard, and the saves that a ``ShardedReplay`` loaded.
    * ``draws_in_flight`` counts the draws that the shards have made ahead.
    * ``rows_lost`` counts rows that were lost with shards, and rows that these shards had been sent.
    * ``td_errors_dropped`` counts TD errors whose shard was lost.
    * ``stale_updates_dropped`` counts TD errors whose row had left.
    * ``fragments_lost`` counts fragments that were lost with EnvRunners before a shard had fetched them.

    Late and starting shards are left out of ``bytes`` and ``stale_updates_dropped``.
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
        "stale_updates_dropped": sum(stats["stale_updates_dropped"] for stats in replays),
        "fragments_lost": sum(report.fragments_lost for report in shards.reports),
        "bytes": sum(stats["nbytes"] for stats in replays),
    }
