# SPDX-License-Identifier: Apache-2.0
"""A replay of any recipe, whose rows are divided over Ray actors and shared by several processes."""

from __future__ import annotations

import copy
import functools
import hashlib
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import ray
import torch
from pyarrow.fs import FileSystem
from ray.exceptions import ActorAlreadyExistsError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from lightning_replay import forking
from lightning_replay.divided_draws import Divider
from lightning_replay.episodes.beginnings import Beginnings
from lightning_replay.feedback import own_td_error, parse_td_errors, td_error_of
from lightning_replay.options import ABOVE_ZERO, check_kind, checked_count, checked_local_path, checked_number
from lightning_replay.parts import WriterHooks, as_replay_writer, wrong_shape
from lightning_replay.replay import SIGNALS, Replay
from lightning_replay.saving.folders import Folder
from lightning_replay.sharded.actors import START_TIMEOUT_S
from lightning_replay.sharded.coordinator import HAS_STOPPED, Coordinator, NotYet
from lightning_replay.sharded.draws import DrawnRows, batch_of, check_td_errors
from lightning_replay.sharded.options import ReplayOptions, check_room
from lightning_replay.sharded.rate_limiter import RateLimiter
from lightning_replay.sharded.rows import SLOT_BITS, Columns, RowRouter, columns_of, layout_of, row_ids_of
from lightning_replay.storage.columns import TransitionCheck, normalized, rows_of_columns
from lightning_replay.training_replay import TrainingReplay

NAMESPACE = "lightning_replay"
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.02
#: Threads of the coordinator, which is the number of callers that can wait at once.
_THREADS = 32
#: At most so many seconds of a call are left for the coordinator's own error, which names the shard.
_GRACE_S = 5.0
#: Seconds for an answer after the time of a call is over, such as the last look at a shard.
_LEAST_S = 0.5
#: A draw fails after so many draws in a row whose rows were lost.
_MOST_REDRAWS = 10
#: Seconds after which a process that waits for its rows looks at their shard.
_LOOK_S = 1.0


def _of_template(name: str) -> Any:
    # The template is built like the replays of the shards, but holds no rows.
    return property(attrgetter(f"_template.{name}"))


class ShardedReplay(TrainingReplay):
    """A replay whose rows are divided over Ray actors ("shards"), and which draws like one replay of all rows.

    Use it in place of a :class:`~lightning_replay.Replay`: :meth:`extend`, :meth:`sample`, :meth:`update_priority`. You
    can pass it to TorchRL's ``RayCollector`` as ``replay_buffer``, and to
    :class:`~lightning_replay.lit.ReplayDataModule`. Send other processes this object, or the result of
    :meth:`for_rank`. Each process puts rows into Ray's object store for the shards, and fetches the rows of its
    batches. One more actor, the coordinator, only moves identities, masses, and TD errors. It divides draws by a
    :class:`~lightning_replay.divided_draws.Divider`. ``docs/scaling.md`` lists what is local to a shard.

    Whole episodes are stored in one shard. If several environments are interleaved, rows need ``trajectory`` or
    ``("collector", "traj_ids")``. Without such a column, all rows of one process count as one environment in order, and
    get a column ``trajectory``. In each further process that fills the replay, a multiple of 2^40 is added to the
    numbers of trajectories, so that the numbers differ.

    A lost shard is started again, empty or with its last save, and training goes on. ``stats`` counts the losses. The
    coordinator and the shards end with the process that built the replay, or with :meth:`stop`.

    Args:
        recipe: Name of a recipe in :mod:`lightning_replay.recipes`.
        num_shards: Actors that hold the rows.
        name: Name by which another process finds this replay. If a replay of this name runs in the cluster, you get a
            connection to it, and its ``seed`` and objects stay. ``None`` builds a new replay.
        samples_per_insert: Rows drawn for each inserted row: :meth:`extend` and :meth:`sample` wait for each other, see
            :class:`~lightning_replay.sharded.rate_limiter.RateLimiter`. ``None`` leaves the ratio free.
        error_buffer: Rows by which draws may be ahead or behind. It is at least ``batch_size`` and
            ``samples_per_insert``.
        wait_timeout_s: Seconds after which a call that waits for shards or processes raises ``TimeoutError``, which
            names them. A save and a load have ``save_timeout_s`` instead.
        options: Options of the recipe, with the capacities and the ``batch_size`` of all shards together, and options
            of :class:`~lightning_replay.sharded.options.ShardOptions`.

    Sampled keys:
        index: int64 ``[B]`` (``[B, 2]`` for pairs), the shard times 2^40 plus the slot.
        generation: int64, the key of the replay, the starts of the shard, and the generation of the slot in one number.
        priority_weight: float32 ``[B]``, with a prioritized recipe.

    Raises:
        ValueError: The recipe is unknown, there are more shards than rows, or no node has room for a shard. The
            ``error_buffer`` is too small, or a running replay of this name has other options.
        TypeError: An option is unknown, or draws of the recipe cannot be divided.
        RuntimeError: Ray is not running, or shards have not started in time.

    Example::

        ray.init(num_cpus=8)
        with ShardedReplay("prioritized", num_shards=4, capacity=1_000_000, batch_size=256) as replay:
            replay.extend(transitions)
            batch = replay.sample()
            replay.update_priority(batch, td_error)
    """

    is_shared = True
    service_backend = "ray"  #: TorchRL's ``RayCollector`` accepts a replay by this attribute.

    def __init__(
        self,
        recipe: str,
        num_shards: int = 4,
        *,
        name: str | None = None,
        samples_per_insert: float | None = None,
        error_buffer: float = 0.0,
        wait_timeout_s: float = 300.0,
        **options: Any,
    ) -> None:
        check_kind("name", name, str | None, "a name, or None")
        limits: dict[str, Any] = {"samples_per_insert": samples_per_insert, "error_buffer": error_buffer}
        self._options = ReplayOptions.checked(recipe, {**options, "num_shards": num_shards}, limits)
        # Bad options are refused here, and not in an actor.
        if self._template.parts.ragged is not None:
            raise ValueError(
                "ragged is given, and the parts of a batch from several shards would be padded to different lengths; "
                "pad these columns before they are stored, and leave ragged out"
            )
        Divider(self._template.sampler)
        self.batch_size: int = self._template.batch_size
        RateLimiter(**limits, batch_size=self.batch_size)
        wait_timeout_s = checked_number("wait_timeout_s", wait_timeout_s, ABOVE_ZERO)
        _check_process()
        if not ray.is_initialized():
            raise RuntimeError("Ray is not running here; call ray.init(num_cpus=...) before building a ShardedReplay")
        self.name: str = name or f"replay-{uuid.uuid4().hex}"
        self._connection = Connection.start(self.name, wait_timeout_s, self._options)
        self._key = self._connection.call("key_for", self._options)
        self._rank: tuple[int, int] | None = None
        self._clocks: dict[str, int] = {}
        self._draws_since_update = 0
        self._router: RowRouter | None = None
        # The rows of a call that has timed out.
        self._unanswered: _Sent | None = None
        # Beginnings are compared here, because each shard sees only some of the episodes.
        self._beginnings = Beginnings(False, is_silent=not self._options.of_recipe.get("check_continuity", True))
        self._check = TransitionCheck(self._options.of_recipe.get("check_finite", True))

    @functools.cached_property
    def _template(self) -> Replay:
        return self._options.template()

    @property
    def wait_timeout_s(self) -> float:
        """Seconds after which a call that waits raises ``TimeoutError``."""
        return self._connection.wait_timeout_s

    @property
    def capacity(self) -> int:
        """Transitions that all shards together can hold."""
        given = self._options.capacities
        return given.get("capacity", given.get("capacity_per_task", 0) * max(1, len(self.tasks)))

    @property
    def sampler_name(self) -> str:
        """Name of the samplers' class.

        :meta private:
        """
        return f"{self._template.sampler_name} of {self._options.shards.num_shards} shards"

    tasks: Any = _of_template("tasks")
    returns: Any = _of_template("returns")
    #: Whether rows are drawn by priority.
    #:
    #: :meta private:
    is_prioritized: Any = _of_template("is_prioritized")
    priority_key: Any = _of_template("priority_key")  #: Column of TD errors for :meth:`update_tensordict_priority`.
    #: Whether :meth:`update_priority` changes draws or eviction.
    #:
    #: :meta private:
    takes_feedback: Any = _of_template("takes_feedback")

    @property
    def awaits_priorities(self) -> bool:
        """Whether something takes feedback and this process has given none since its last draw.

        :meta private:
        """
        return self.takes_feedback and self._draws_since_update > 0

    @property
    def write_count(self) -> int:
        """Rows given by all processes so far."""
        return self._connection.call("num_inserted")

    def __len__(self) -> int:
        """Rows stored, after every shard has stored the rows that it was sent."""
        return self._connection.call("num_rows")

    def for_rank(self, rank: int, world_size: int) -> ShardedReplay:
        """Returns this replay for one of several processes that train together, such as the ranks of DDP.

        Each :meth:`sample` of a rank returns its ``batch_size / world_size`` rows of one batch. The batch is drawn for
        all ranks when every rank has requested it, so weights, shares of event tables, and the task of a curriculum
        come from one draw. The draw knows the TD errors that ranks gave before their requests. Call this method in
        every rank before the first rank draws, because it discards earlier requests.

        Args:
            rank: Rank of this process, from 0 on.
            world_size: Number of processes.

        Raises:
            ValueError: The rank does not exist, or the batch size is not a multiple of ``world_size``.
        """
        checked_count("world_size", world_size, of="processes")
        if checked_count("rank", rank, 0) >= world_size:
            raise ValueError(f"rank is {rank} of {world_size} processes; ranks are 0 to {world_size - 1}")
        if self.batch_size % world_size:
            raise ValueError(
                f"batch_size is {self.batch_size}, and {world_size} processes cannot draw equal shares of it; give a "
                f"multiple of {world_size}"
            )
        shared = self.client()
        number = self._connection.call("enter_rank", rank, world_size)
        shared._rank = (rank, world_size)
        shared._router = RowRouter(self._options.shards.num_shards, number)
        return shared

    def client(self) -> ShardedReplay:
        """Returns this replay for another process that fills it or draws whole batches.

        :meta private:
        """
        copied = copy.copy(self)
        copied.__dict__ |= {"_router": None, "_rank": None, "_clocks": {}, "_draws_since_update": 0}
        copied._connection = copy.copy(self._connection)
        return copied

    def clients(self, num_clients: int) -> list[ShardedReplay]:
        """Returns :meth:`client` for several processes. TorchRL's ``RayCollector`` gives one to each collector.

        :meta private:
        """
        return [self.client() for _ in range(num_clients)]

    def add(self, data: TensorDictBase) -> Tensor:
        """Stores one transition of batch size ``[]``. See :meth:`extend`."""
        return self.extend(data.unsqueeze(0))

    def extend_columns(self, columns: Mapping[NestedKey, Tensor | np.ndarray]) -> Tensor:
        """Stores transitions given column by column, like :meth:`~lightning_replay.Replay.extend_columns`."""
        return self.extend(rows_of_columns(columns))

    def extend(self, tensordicts: TensorDictBase) -> Tensor:
        """Stores transitions, and returns when the shards have stored them.

        Args:
            tensordicts: TensorDict ``[N]``, as for :meth:`~lightning_replay.Replay.extend`.

        Returns:
            int64, the indices of the stored rows, shard after shard. Rows that were lost with their shard are missing,
            and counted.

        Raises:
            TypeError, ValueError: The rows are refused, as by :meth:`~lightning_replay.Replay.extend`. Only shards
                whose part of the recipe accepts their rows store them.
            TimeoutError: Draws are behind (see ``samples_per_insert``), or a shard has not answered. A call with the
                same rows goes on waiting, and stores the rows once.
            RuntimeError: The replay has stopped.
        """
        _check_process()
        if not isinstance(tensordicts, TensorDictBase):
            raise TypeError(f"extend takes a TensorDict of transitions [N]; got {type(tensordicts).__name__}")
        if 0 in tensordicts.shape:
            raise wrong_shape(tensordicts)
        rows = normalized(tensordicts)
        if rows.ndim != 1:
            raise wrong_shape(rows)
        # All rows may be padding.
        if not len(rows):
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        columns = columns_of(rows)
        self._check(columns)
        # The rows of a call that timed out are on their way. If they are given again, they are not sent twice.
        sent = self._unanswered
        self._unanswered = None
        if sent is None or sent.digest != _digest(columns):
            sent = self._send(columns)
        deadline = time.monotonic() + self.wait_timeout_s
        try:
            stored = {shard: self._answer(shard, answer, deadline) for shard, answer in sent.answers.items()}
        except (TimeoutError, KeyboardInterrupt):
            # The rows are on their way, and further rows of their episodes follow them.
            self._router = sent.router
            self._unanswered = sent._replace(digest=_digest(columns))
            raise
        errors = [slots for slots in stored.values() if isinstance(slots, Exception)]
        # If some rows were stored, later rows of their episodes follow them.
        if len(errors) < len(stored):
            self._router = sent.router
        if errors:
            raise errors[0]
        self._beginnings = self._beginnings.after([*columns.values()], columns)
        self._beginnings.warn()
        return torch.from_numpy(np.concatenate([(shard << SLOT_BITS) + slots for shard, slots in stored.items()]))

    def _send(self, columns: Columns) -> _Sent:
        if self._router is None:
            self._router = RowRouter(self._options.shards.num_shards, self._connection.call("new_writer"))
        routed, router = self._router.route(columns)
        # Rows go to the shards through the object store, and the coordinator gets their references.
        parts = [(shard, [ray.put(own)], len(next(iter(own.values())))) for shard, own in routed.items()]
        answers = self._connection.call("extend", parts, layout_of(next(iter(routed.values()))), self._clocks)
        return _Sent(dict(zip(routed, answers, strict=True)), parts, router, b"")

    def _answer(self, shard: int, answer: ray.ObjectRef[Any], deadline: float) -> Any:
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            try:
                # Slots, or the error of rows that were refused.
                return ray.get(answer, timeout=min(_LOOK_S, left_s)).value
            except GetTimeoutError:
                found = self._connection.call("look_at", shard, timeout_s=max(left_s - _LOOK_S, 0.0))
                if left_s <= _LOOK_S:
                    raise TimeoutError(
                        f"{found}. The rows are on their way to it; give the same ones again to wait for them, or go "
                        "on with the next"
                    ) from None
            except RayError:
                # The shard was lost, and the coordinator counts its rows.
                return np.zeros(0, dtype=np.int64)

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """Draws a batch. A rank gets its share of a batch.

        Args:
            batch_size: Rows, if not the replay's own number. Ranks, and replays with ``samples_per_insert``, cannot
                choose it.

        Returns:
            TensorDict ``[B]``, on the CPU. If rows are lost with their shard before they are fetched, a further draw
            replaces them.

        Raises:
            RuntimeError: The replay is empty or has stopped.
            ValueError: ``batch_size`` cannot be chosen here.
            TimeoutError: Inserts are behind, other ranks have not requested the batch, or shards have not answered.
        """
        deadline = time.monotonic() + self.wait_timeout_s
        own = self.batch_size
        if self._rank is not None:
            own //= self._rank[1]
        if batch_size is not None and batch_size != own:
            checked_count("batch_size", batch_size, of="transitions")
            if self._rank is not None or self._options.limits["samples_per_insert"] is not None:
                raise ValueError(
                    f"batch_size is {batch_size}; a rank, and a replay with samples_per_insert, draw the batches "
                    f"that the replay was built for, here {own} rows. Leave it out"
                )
            own = batch_size
        # The coordinator answers with identities and references, and this process fetches the rows.
        request: tuple[Any, ...] = ("draw", own)
        if self._rank is not None:
            request = ("draw_share", *self._rank)
        drawn: DrawnRows = self._connection.call(*request, self._clocks)
        timeout_s = min(self._options.shards.shard_timeout_s, self.wait_timeout_s)
        blocks = drawn.fetch(timeout_s)
        redraws = 0
        # Rows may be lost with their shard before they are fetched.
        while missing := own - sum(len(block["index",]) for block in blocks):
            redraws += 1
            if redraws > _MOST_REDRAWS:
                raise RuntimeError(f"rows of the batch were lost with their shards, {_MOST_REDRAWS} times in a row")
            left_s = max(deadline - time.monotonic(), 0.0)
            blocks += self._connection.call("draw", missing, {}, False, timeout_s=left_s).fetch(timeout_s)
        self._draws_since_update += 1
        return batch_of(blocks)

    def update_priority(
        self,
        index: Tensor | TensorDictBase,
        td_error: Tensor | None = None,
        *,
        generation: Tensor | None = None,
        **signals: Any,
    ) -> None:
        """Sends TD errors to their rows, without waiting for the shards.

        Args:
            index: Batch that this replay has drawn in any process, or its ``index``.
            td_error: Signed TD errors, ``[B]`` or ``[B, 1]``, also accepted as ``priority``. If a batch comes without
                them and without ``signals``, its column ``priority_key`` is read. TD errors of rows that have left, or
                of a lost shard, are dropped.
            generation: The batch's ``generation``, if ``index`` is not a batch.
            signals: Further feedback, as for :meth:`~lightning_replay.Replay.update_priority`.

        Raises:
            TypeError: TD errors, ``index``, or ``generation`` are missing, or a signal has an unknown name.
            ValueError: The number of TD errors differs from the number of rows, TD errors are not finite, the writer
                refuses a signal, or the rows belong to another replay. Nothing is changed. If only a shard refuses the
                feedback, the next call of this object raises the error.
        """
        writer = as_replay_writer(self._template.writer)
        td_error = own_td_error(index, td_error, signals, self.priority_key)
        feedback = checked_feedback(index, td_error, generation, signals, self._key, writer)
        self._draws_since_update = 0
        # Without such a part the feedback is only checked.
        if self.takes_feedback:
            self._connection.call("update", *feedback)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Sends the TD errors in ``data[priority_key]`` to the rows of ``data["index"]``."""
        Replay.update_tensordict_priority(self, data)  # type: ignore[arg-type]

    def end_episodes(self, trajectories: Iterable[int] | None = None) -> None:
        """Ends running episodes of this process. ``None`` ends all of them.

        See :meth:`~lightning_replay.Replay.end_episodes`.

        Raises:
            TimeoutError: A shard has not answered. The shard runs the call once it answers.
        """
        if self._router is not None:
            numbers = None
            if trajectories is not None:
                numbers = np.fromiter(trajectories, dtype=np.int64)
            self._connection.call("end_episodes", self._router.writer, self._router.ended(numbers))

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clocks of schedules and ages from the next call on.

        Otherwise the clocks count given rows and draws.
        """
        for name, reading in (("env_steps", env_steps), ("updates", updates)):
            if reading is not None:
                self._clocks[name] = checked_count(name, reading, 0)

    def progress(self, task: str, value: float) -> None:
        """Passes a progress signal of a task to the curriculum."""
        self._connection.call("progress", task, value)

    def actor_tasks(self, num_actors: int) -> list[int]:
        """Returns the task of each actor of a curriculum."""
        return self._connection.call("actor_tasks", num_actors)

    def seed(self, seed: int) -> None:
        """Seeds the draws of all shards.

        Raises:
            TimeoutError: A shard has not answered. The shard runs the call once it answers.
        """
        self._connection.call("seed", checked_count("seed", seed, 0))

    def generator_fingerprint(self) -> bytes:
        """Returns bytes that change with each draw.

        :meta private:
        """
        return self._connection.call("generator_fingerprint")

    def stats(self) -> dict[str, Any]:
        """Returns the statistics of all shards.

        The keys are the keys of :func:`~lightning_replay.sharded.coordinator.stats_of`, ``num_rows_inserted`` and
        ``num_draws`` so far, and ``rate_limiter`` with its counts.
        """
        return self._connection.call("stats")

    def save(
        self, path: str | Path, *, previous: str | Path | None = None, filesystem: FileSystem | None = None
    ) -> None:
        """Saves every shard into a folder in ``path``, and the state of the draws. The manifest is written last.

        Args:
            path: Directory, or a URI such as ``s3://bucket/first``. Files of shards on nodes that do not see a
                directory pass through the node of the process that built this replay.
            previous: Earlier save in another directory. Files that have not changed since are linked to its files.
            filesystem: File system of pyarrow that holds ``path``.

        Raises:
            RuntimeError: A shard was lost during the save. An earlier save at ``path`` is unchanged after any error.
            TimeoutError: The named shard has not answered, or has not finished within ``save_timeout_s``.
            ValueError: Each node has its own file system of this kind.
        """
        before = None
        if previous is not None:
            before = checked_local_path("previous", previous).absolute()
        timeout_s = self._options.shards.save_timeout_s
        self._connection.call("save", Folder.of_user(path, filesystem), before, timeout_s=timeout_s)

    def load(self, path: str | Path, *, filesystem: FileSystem | None = None) -> None:
        """Restores a save into this replay: the same rows, and the same next draws.

        If the save has another number of shards, or is a save of a :class:`~lightning_replay.Replay`, whole episodes
        are dealt out again with their priorities, each rounded once more. A shard that gets too many rows keeps the
        newest. Each shard reads the saved shards one after the other. TD errors of earlier batches are dropped.

        Args:
            path: Directory or URI of the save.
            filesystem: File system of pyarrow that holds ``path``.

        Raises:
            FileNotFoundError, DamagedFileError: The save is missing or damaged.
            ValueError: The save has another recipe or other options, or its number of shards differs and its rows are
                kept by importance. Nothing is loaded.
            RuntimeError: A shard was lost while it read the save. Nothing is loaded.
            TimeoutError: The named shard has not answered, or has not finished within ``save_timeout_s``.
        """
        timeout_s = self._options.shards.save_timeout_s
        self._connection.call("load", Folder.of_user(path, filesystem), timeout_s=timeout_s)
        # The save does not know the episodes that run here, so new episodes get the number of a new writer.
        self._unanswered = None
        self._draws_since_update = 0
        if self._rank is None:
            self._router = None

    def stop(self) -> None:
        """Ends the shards and their rows, for all processes."""
        self._connection.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # Other processes may still use a replay that this process found by its name.
        if self._connection.is_owner:
            self.stop()

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self) | {"_unanswered": None}
        # The copy builds its own template.
        state.pop("_template", None)
        # The copy is another writer of trajectories, except for a rank.
        if self._rank is None:
            state["_router"] = None
        return state


class _Sent(NamedTuple):
    """Rows of one call that were sent to their shards."""

    answers: dict[int, ray.ObjectRef[Any]]  #: References of the answers, by shard.
    parts: list[tuple[int, list[ray.ObjectRef[Any]], int]]  #: References that keep the rows in the object store.
    router: RowRouter  #: Router for further rows.
    digest: bytes  #: Digest of the rows; empty before the call has timed out.


def _digest(columns: Columns) -> bytes:
    digest = hashlib.blake2b(repr(layout_of(columns)).encode(), digest_size=20)
    for key in sorted(columns):
        digest.update(columns[key].tobytes())
    return digest.digest()


def checked_feedback(
    index: Tensor | TensorDictBase,
    td_error: Tensor | None,
    generation: Tensor | None,
    signals: dict[str, Any],
    key: int,
    writer: WriterHooks,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Returns index, generation, TD errors ``[B]``, and signals by name as arrays.

    As much as possible is refused here, because the error of a shard comes with a later call. Raises ``TypeError`` and
    ``ValueError`` as :meth:`ShardedReplay.update_priority` documents.
    """
    index, td_error, generation = parse_td_errors(index, td_error_of(td_error, signals, SIGNALS), generation)
    if generation is None:
        raise TypeError("update_priority got no generation; give the batch, or generation=batch['generation']")
    if td_error is None:
        raise TypeError("update_priority got no td_error; give one for each row of the batch")
    errors = td_error.cpu().float().reshape(-1).numpy()
    check_td_errors(errors, len(index))
    given = {}
    # Other writers ignore signals.
    if writer.needs_feedback:
        writer.read_feedback(len(index), torch.from_numpy(errors), signals)
        given = {name: torch.as_tensor(value).detach().cpu().numpy() for name, value in signals.items()}
    numbers = index.cpu().numpy()
    generations = generation.cpu().numpy()
    if len(generations) != len(index):
        raise ValueError(f"generation has {len(generations)} rows and index {len(index)}; give those of one batch")
    others = np.count_nonzero(row_ids_of(numbers, generations).key != key)
    if others:
        raise ValueError(
            f"{others} of {len(index)} rows were not drawn from this sharded replay; give it the batches that its own "
            "sample() returned. No priority was changed"
        )
    return numbers, generations, errors, given


def _check_process() -> None:
    if forking.inherits_ray:
        raise RuntimeError(
            "this process was forked from one that uses Ray, which Ray does not support. Start processes by "
            'spawning them, with Lightning strategy="ddp_spawn" or "ddp"'
        )


class Connection:
    """Calls methods of a coordinator, from any process of the cluster and any that can reach it.

    The coordinator ends with the process that started it. A connection that is sent to another process finds the
    coordinator by its name. If Ray is not running in that process, the connection starts it first.
    """

    def __init__(self, name: str, wait_timeout_s: float, actor: Any = None) -> None:
        self._name = name
        self.wait_timeout_s: float = wait_timeout_s  #: Seconds after which a call raises an error.
        self._caller = uuid.uuid4().hex
        self._actor = actor
        self._address: str = ray.get_runtime_context().gcs_address
        self._has_stopped = False
        self.is_owner = False  #: Whether this process has started the coordinator.

    @classmethod
    def start(cls, name: str, wait_timeout_s: float, options: ReplayOptions) -> Connection:
        """Connects to the coordinator of a name. If it does not run, starts it and its shards."""
        with suppress(ValueError):
            return cls(name, wait_timeout_s, ray.get_actor(name, namespace=NAMESPACE))
        check_room(options.shards)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        actor: Any = ray.remote(num_cpus=0, max_restarts=0)(Coordinator)
        actor = actor.options(name=name, namespace=NAMESPACE, scheduling_strategy=here, max_concurrency=_THREADS)
        try:
            handle = actor.remote(options)
        except ActorAlreadyExistsError:
            # Another process has just started it.
            return cls(name, wait_timeout_s)
        connection = cls(name, wait_timeout_s, handle)
        try:
            connection.call("start", timeout_s=2 * START_TIMEOUT_S)
        except BaseException:
            ray.kill(handle)
            raise
        connection.is_owner = True
        return connection

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Calls a method until it returns another result than :class:`~lightning_replay.sharded.coordinator.NotYet`."""
        limit_s = self.wait_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        pause = _FIRST_PAUSE_S
        while isinstance(result := self._call(method, arguments, deadline - time.monotonic()), NotYet):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{result.reason}, and this has not changed for {limit_s:g} s (wait_timeout_s). {result.remedy}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return result

    def _call(self, method: str, arguments: tuple[Any, ...], left_s: float) -> Any:
        left_s = max(left_s, _LEAST_S)
        answer = self._handle().call.remote(self._caller, method, left_s - min(_GRACE_S, left_s / 2), arguments)
        try:
            return ray.get(answer, timeout=left_s)
        except GetTimeoutError:
            raise TimeoutError(
                f"the coordinator of this sharded replay has not answered for {left_s:.3g} s: its process "
                "hangs, or its node cannot be reached. Build another replay and load a save into it if that lasts"
            ) from None
        except RayTaskError as error:
            cause: Exception = error
            # The error of a shard is wrapped twice.
            while isinstance(cause, RayTaskError):
                cause = cause.cause
            raise cause from None
        except RayActorError as error:
            raise RuntimeError(HAS_STOPPED) from error

    def stop(self) -> None:
        """Ends the coordinator, and its shards with it."""
        if self._has_stopped:
            return
        try:
            with suppress(TimeoutError):
                self.call("stop")
            ray.kill(self._handle())
        except RuntimeError:
            # Another process has ended them.
            pass
        self._has_stopped = True

    def __getstate__(self) -> dict[str, Any]:
        # Another process is another caller, because errors of feedback go to the caller that gave it.
        return {**vars(self), "_actor": None, "_caller": uuid.uuid4().hex, "is_owner": False}

    def _handle(self) -> Any:
        if self._has_stopped:
            raise RuntimeError(HAS_STOPPED)
        _check_process()
        # An object that was sent here finds the coordinator by its name.
        if self._actor is None:
            if not ray.is_initialized():
                ray.init(address=self._address, log_to_driver=False)
            try:
                self._actor = ray.get_actor(self._name, namespace=NAMESPACE)
            except ValueError as error:
                raise RuntimeError(HAS_STOPPED) from error
        return self._actor
