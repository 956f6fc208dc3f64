# SPDX-License-Identifier: Apache-2.0
"""Starts, calls, and restarts the actors of a sharded replay, and keeps the report that each answer brings."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import ObjectLostError, RayActorError

from lightning_replay.saving.folders import Folder
from lightning_replay.sharded.options import ShardOptions, placement_of

if TYPE_CHECKING:
    from lightning_replay.parts import GroupTotals, ShardDraw


logger: logging.Logger = logging.getLogger(__name__)
Counts = Counter[tuple[str, str]]
#: Returns the arguments of a call for the number of a shard.
Arguments = Callable[[int], tuple[Any, ...]]
#: A shard that fails to start so many times in a row ends the replay.
_MOST_FAILED_STARTS = 3
#: Seconds that a start may take: a process imports RLlib, and a machine may start many processes at once.
START_TIMEOUT_S = 600.0
#: A shard is started again after so many times ``shard_timeout_s`` without an answer.
_HUNG_AFTER = 4
#: Seconds between two looks at the shards that a call waits for.
_LOOK_S = 1.0


class ShardActors:
    """Ray actors, one for each shard, whose methods return an :class:`~lightning_replay.sharded.actors.Answer`.

    :meth:`send` calls a method and returns at once. :meth:`settle` waits for answers. The last report of each shard is
    kept. A shard is started again if its process or node is lost, or if it does not answer for four times
    ``shard_timeout_s``. It then gets a new epoch. Until a starting or late shard answers, it counts as empty, and no
    call waits for it.

    Every call ends: it waits for a shard at most ``shard_timeout_s`` (``save_timeout_s`` in a save or a load), and at
    most ``time_left``. After that an error names the shards.

    Args:
        kind: Class of the actors.
        arguments: Returns the first arguments of the class. Two arguments follow: ``shard_timeout_s / 2``, so that a
            hung process that serves rows makes no shard late, and the folder of a save to begin with.
        options: Options of the shards.
        on_report: Function that receives each new report.
        wait: ``ray.wait``, or a function that lets other threads use this object while it waits.
        time_left: Function that returns the seconds that the present caller waits at most.
    """

    def __init__(
        self,
        kind: type,
        arguments: Arguments,
        options: ShardOptions,
        on_report: Callable[[ShardReport], None] = lambda report: None,
        wait: Callable[..., Any] = ray.wait,
        time_left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._wait = wait
        self._time_left = time_left
        self._on_report = on_report
        self.kind: type = kind
        self._arguments = arguments
        self.options: ShardOptions = options
        count = options.num_shards
        self.handles: list[Any] = []  #: Handles of the actors; empty before they start.
        #: int64 ``[S]``, how often each shard was started. Raise them if the rows of earlier draws are gone.
        self.epochs: np.ndarray = np.zeros(count, dtype=np.int64)
        self.reports: list[ShardReport] = [ShardReport() for _ in range(count)]  #: The last report of each shard.
        self.lost: Losses = Losses()
        #: Folder of each shard in the last save, or ``None`` if no save fits.
        self.last_save: Sequence[Folder] | None = None
        self._nodes: Sequence[str] = ()
        self._pending: list[deque[_Call]] = [deque() for _ in range(count)]
        # The time at which the first pending call of each shard became the first.
        self._since: list[float] = [0.0] * count
        self._starting = [False] * count
        self._failed_starts = [0] * count
        # The last answer that a call waited for in vain.
        self._late_with: list[ray.ObjectRef[Any] | None] = [None] * count

    def __len__(self) -> int:
        return self.options.num_shards

    @property
    def alive(self) -> list[bool]:
        """Whether each shard is neither starting nor late."""
        return [not (starting or late) for starting, late in zip(self._starting, self._late_with, strict=True)]

    def is_late(self, shard: int) -> bool:
        """Returns whether a started shard has not answered in time."""
        return self._late_with[shard] is not None

    @property
    def rows(self) -> Counter[str]:
        """Number of rows of each module, over all shards."""
        return sum((Counter(report.rows) for report in self.reports), Counter())

    @property
    def steps_sent(self) -> int:
        """Number of steps that were sent and not answered yet."""
        return sum(call.steps for calls in self._pending for call in calls)

    @property
    def counts(self) -> Counts:
        """Counters over all shards, including lost shards."""
        # A shard that is started again counts from 0.
        total: Counts = Counter(self.lost.counts)
        for report in self.reports:
            total.update(report.counts)
        return total

    def start(self, nodes: Sequence[str] = ()) -> None:
        """Starts all actors, on ``nodes`` (IDs) as far as these have room, and waits until each has answered."""
        self._nodes = nodes
        self.handles = [None] * len(self)
        for shard in range(len(self)):
            self._start(shard)
        try:
            if not self.wait_for_starts():
                raise RuntimeError(
                    f"{sum(self._starting)} of {len(self)} shards have not started within {START_TIMEOUT_S:g} s; each "
                    f"needs {self.options.num_cpus_per_shard:g} CPUs, and "
                    f"{ray.available_resources().get('CPU', 0):g} of {ray.cluster_resources().get('CPU', 0):g} are "
                    "free. Lower num_cpus_per_shard, or start Ray with more CPUs"
                )
        except BaseException:
            # Actors that nothing refers to would keep their CPUs.
            self.stop()
            raise

    def wait_for_starts(self) -> bool:
        """Waits for starting shards, and returns whether all have started."""
        deadline = time.monotonic() + min(START_TIMEOUT_S, self._time_left())
        while any(self._starting) and (left := deadline - time.monotonic()) > 0:
            first = [calls[0].answer for calls, starting in zip(self._pending, self._starting, strict=True) if starting]
            self._wait(first, timeout=min(left, _LOOK_S))
            # A lost shard is started again here. After several attempts this raises an error.
            self.settle({})
        return not any(self._starting)

    def wait_for_any(self) -> None:
        """Waits until one of the starting or late shards has answered everything."""
        before = self.alive
        while not all(self.alive) and self.alive == before:
            last = [calls[-1].answer for calls, alive in zip(self._pending, before, strict=True) if not alive]
            if self._time_left() <= 0:
                raise TimeoutError(self.unanswered(shard for shard, alive in enumerate(before) if not alive))
            self._wait(last, timeout=min(self._time_left(), _LOOK_S))
            self.settle({})

    def start_lost(self) -> None:
        """Finds the shards that were lost since their last answer, and waits for their restart."""
        for shard in range(len(self)):
            self.send(shard, "report")
        self.settle()
        self.wait_for_starts()
        if missing := [shard for shard, alive in enumerate(self.alive) if not alive]:
            raise TimeoutError(self.unanswered(missing))

    def unanswered(self, shards: Iterable[int] | None = None) -> str:
        """Returns the text of an error for shards that have not answered, by default all with pending calls."""
        if shards is None:
            shards = [shard for shard, calls in enumerate(self._pending) if calls]
        now = time.monotonic()
        verbs = ((shard, "started" if self._starting[shard] else "answered") for shard in shards)
        listed = [f"shard {shard} has not {verb} for {now - self._since[shard]:.3g} s" for shard, verb in verbs]
        return (
            f"{', '.join(listed) or 'a shard has not answered'}: its process is busy or hangs, or its node cannot be "
            f"reached. After {_HUNG_AFTER * self.options.shard_timeout_s:g} s without an answer (four times "
            "shard_timeout_s) it is started again like a lost shard"
        )

    def send(
        self,
        shard: int,
        method: str,
        *arguments: Any,
        limit_s: float = 0.0,
        steps: int = 0,
        td_errors: int = 0,
        then: Callable[[Any], None] = lambda value: None,
        failed: Callable[[Exception], object] | None = None,
    ) -> ray.ObjectRef[Any]:
        """Calls a method of a shard without waiting. Calls of one shard run in order.

        The call may take ``limit_s`` longer than others. If the shard is lost, so are ``steps`` and ``td_errors``.
        The :meth:`settle` that finds the answer calls ``then`` with the value, or ``failed`` with the error. Without
        ``failed`` it raises the error.
        """
        answer = getattr(self.handles[shard], method).remote(*arguments)
        # If a call is pending, the shard works on that call, which has its own time.
        if not self._pending[shard]:
            self._since[shard] = time.monotonic()
        self._pending[shard].append(_Call(answer, limit_s, steps, td_errors, then, failed))
        return answer

    def settle(self, until: Mapping[int, ray.ObjectRef[Any]] | None = None) -> ShardActors:
        """Waits for answers, except from starting or late shards, and takes all answers that have come.

        Args:
            until: Last answer to wait for, by shard. ``{}`` waits for none. By default the last one of every shard.

        Returns:
            This object.

        Raises:
            Exception: A method of a shard has raised it. Each further error is added as a note.
            TimeoutError: The caller's ``time_left`` is over. The error names the shards.
            RuntimeError: A shard was lost and cannot be started again.
        """
        awaited = [self._awaited(shard, until) if alive else [] for shard, alive in enumerate(self.alive)]
        ready: set[ray.ObjectRef[Any]] = set()
        if waited := [answer for answers in awaited for answer in answers]:
            limit_s = max(0.0, min(self.options.shard_timeout_s, self._time_left()))
            ready.update(self._wait(waited, num_returns=len(waited), timeout=limit_s)[0])
        # Answers that were not waited for, such as answers of late shards, are taken if they have come.
        if others := [call.answer for calls in self._pending for call in calls if call.answer not in ready]:
            ready.update(self._wait(others, num_returns=len(others), timeout=0)[0])
        errors = [error for shard in range(len(self)) for error in self._take_answers(shard, ready)]
        # These shards were not lost, but have not given some of the answers.
        rest = {shard: answers for shard, answers in enumerate(awaited) if self._waits_for(shard, answers)}
        if rest and not errors and self._time_left() <= 0:
            raise TimeoutError(self.unanswered(rest))
        for shard, answers in rest.items():
            if self.alive[shard]:
                # The shard is late until it gives this answer.
                self._late_with[shard] = answers[-1]
                logger.warning(
                    f"shard {shard} has not answered for {self.options.shard_timeout_s:g} s (shard_timeout_s); draws "
                    f"go on without its {self.reports[shard].num_rows} rows until it does"
                )
        self._restart_hung()
        if errors:
            raise joined_errors(errors)
        return self

    def send_all(
        self,
        method: str,
        arguments: Arguments = lambda shard: (),
        *,
        limit_s: float = 0.0,
        first: Callable[[int, CallOfAll], None] = lambda shard, sent: None,
    ) -> CallOfAll:
        """Calls a method of every shard without waiting. :meth:`values_of` waits for the answers.

        The call may take ``limit_s``, by default ``shard_timeout_s``. ``first`` is called before a shard is sent the
        call, and again if the shard is lost and is sent the call again.
        """
        limit_s = limit_s or self.options.shard_timeout_s
        is_late = [self.is_late(shard) for shard in range(len(self))]
        sent = CallOfAll(method, arguments, limit_s, first, is_late, self.epochs.copy(), {}, {}, {})
        for shard in range(len(self)):
            self._send_of_all(sent, shard)
        return sent

    def values_of(self, sent: CallOfAll, *, again: bool = False) -> list[Any]:
        """Returns the values of all shards, after their answers have come. Shards that were late before are left out.

        With ``again`` a lost shard is sent the call again.

        Raises:
            Exception: A shard has raised it. It is raised when all shards have finished.
            ShardLostError: A shard was lost, and ``again`` is not set.
            TimeoutError: The named shards have not answered, and do the work later.
        """
        deadline = time.monotonic() + sent.limit_s
        while missing := [shard for shard in sent.answers if shard not in sent.values | sent.errors]:
            for shard in missing:
                if not self._waits_for(shard, [sent.answers[shard]]):
                    if not again:
                        # The error waits until the others have finished, because their files may be removed then.
                        sent.errors[shard] = ShardLostError(f"shard {shard} was lost meanwhile, and is started again")
                        continue
                    sent.is_late[shard] = False
                    self._send_of_all(sent, shard)
            if not (missing := [shard for shard in missing if shard not in sent.errors]):
                break
            if any(self._starting[shard] for shard in missing):
                # A start has its own limit.
                deadline = time.monotonic() + sent.limit_s
            left = min(deadline - time.monotonic(), self._time_left())
            if left <= 0 or all(sent.is_late[shard] for shard in missing):
                raise TimeoutError(self.unanswered(missing))
            self._wait([sent.answers[shard] for shard in missing], timeout=min(left, _LOOK_S))
            self.settle({})
        if sent.errors:
            raise joined_errors(list(sent.errors.values()))
        return [sent.values[shard] for shard in range(len(self))]

    def take_over(self, staged: CallOfAll, restore: Callable[[], None]) -> None:
        """Lets every shard use the save that it has read in ``staged``, calls ``restore``, and waits for all shards.

        Nothing is drawn from a shard until it uses the save. If a shard is lost, it reads its part of the save again.
        """

        def stage(shard: int, sent: CallOfAll) -> None:
            # The shard was lost after it had answered.
            if self.epochs[shard] != staged.epochs[shard]:
                failed = functools.partial(sent.errors.setdefault, shard)
                self.send(shard, staged.method, *staged.arguments(shard), limit_s=staged.limit_s, failed=failed)

        sent = self.send_all("take_over", first=stage)
        # A late shard is not drawn from, and a shard that does not use the save yet must not be drawn from.
        self._late_with = [*sent.answers.values()]
        restore()
        try:
            self.values_of(sent, again=True)
        except TimeoutError as error:
            raise TimeoutError(f"{error}. The save was loaded; this shard uses its part once it answers") from error

    def totals(self, module_id: str) -> list[GroupTotals | None]:
        """Returns the totals of a module that each shard last reported, or ``None`` for starting and late shards."""
        pairs = zip(self.reports, self.alive, strict=True)
        return [report.totals.get(module_id) if alive else None for report, alive in pairs]

    def stop(self) -> None:
        """Ends the actors and their rows."""
        for handle in self.handles:
            # An error in a start leaves None.
            if handle is not None:
                ray.kill(handle)
        self.handles = []

    def _send_of_all(self, sent: CallOfAll, shard: int) -> None:
        sent.first(shard, sent)
        sent.answers[shard] = self.send(
            shard,
            sent.method,
            *sent.arguments(shard),
            limit_s=sent.limit_s,
            then=functools.partial(sent.values.__setitem__, shard),
            failed=functools.partial(sent.errors.setdefault, shard),
        )

    def _start(self, shard: int) -> None:
        # A new epoch: the new process holds none of the rows that were drawn before.
        self.epochs[shard] += 1
        self.handles[shard] = self.new_actor(shard)
        # The lost calls were counted.
        self._pending[shard].clear()
        self._starting[shard] = True
        self._late_with[shard] = None
        # The answer to this call shows that the actor was built.
        self.send(shard, "report")

    def new_actor(self, shard: int) -> Any:
        """Starts the actor of a shard, and returns its handle."""
        actor: Any = ray.remote(num_cpus=self.options.num_cpus_per_shard, max_restarts=0)(self.kind)
        return actor.options(**placement_of(shard, self._nodes)).remote(*self.arguments_of(shard))

    def arguments_of(self, shard: int) -> tuple[Any, ...]:
        """Returns the arguments of the actor of a shard, the folder of its last save among them."""
        folder = None
        if self.last_save is not None and self.epochs[shard] > 1 and self.options.restart_shards == "last_save":
            folder = self.last_save[shard]
        # The files of the save may have been deleted.
        if folder is not None and self._failed_starts[shard]:
            logger.warning(f"shard {shard} could not be started with its save {folder}, and starts empty")
            folder = None
        return (*self._arguments(shard), self.options.shard_timeout_s / 2, folder)

    def _awaited(self, shard: int, until: Mapping[int, ray.ObjectRef[Any]] | None) -> list[ray.ObjectRef[Any]]:
        # The calls of a shard run in order, so the answers up to the last one are pending with it.
        pending = [call.answer for call in self._pending[shard]]
        if until is None:
            return pending
        last = until.get(shard)
        if last not in pending:
            return []
        return pending[: pending.index(last) + 1]

    def _waits_for(self, shard: int, answers: Sequence[ray.ObjectRef[Any]]) -> bool:
        return any(call.answer in answers for call in self._pending[shard])

    def _take_answers(self, shard: int, ready: set[ray.ObjectRef[Any]]) -> list[Exception]:
        # Takes the answers that have come, in order, and returns the errors of methods that nobody handles.
        pending = self._pending[shard]
        errors: list[Exception] = []
        while pending and pending[0].answer in ready:
            call = pending[0]
            try:
                answer: Answer | None = ray.get(call.answer)
            except (RayActorError, ObjectLostError) as error:
                # The answer may have been on the lost node.
                self._restart(shard, error)
                return errors
            except Exception as error:
                # The method raised the error, and the shard goes on.
                (call.failed or errors.append)(error)
                answer = None
            pending.popleft()
            # The next call begins now.
            self._since[shard] = time.monotonic()
            if self._late_with[shard] == call.answer:
                self._late_with[shard] = None
            if answer is not None:
                call.then(answer.value)
                if self._starting[shard]:
                    # The counters of the save that the shard began with are counted among the lost ones.
                    self.lost.counts.subtract(answer.report.counts)
                self.reports[shard] = answer.report
                self._on_report(answer.report)
                self._starting[shard] = False
                self._failed_starts[shard] = 0
        return errors

    def _restart_hung(self) -> None:
        for shard, calls in enumerate(self._pending):
            if not calls:
                continue
            first = calls[0]
            limit_s = first.limit_s + _HUNG_AFTER * self.options.shard_timeout_s
            if self._starting[shard]:
                limit_s = first.limit_s + START_TIMEOUT_S
            if time.monotonic() - self._since[shard] < limit_s:
                continue
            # If this process was stopped itself, the answer may have come.
            has_come = self._wait([first.answer], timeout=_LOOK_S)[0]
            if not has_come and calls and calls[0] is first:
                self._restart(shard, TimeoutError(f"it has not answered for {limit_s:g} s"))

    def _restart(self, shard: int, error: Exception) -> None:
        report = self.reports[shard]
        self.reports[shard] = ShardReport()
        # The rows of its last report, and the rows that it was sent since.
        rows = report.num_rows + sum(call.steps for call in self._pending[shard])
        self.lost.rows += rows
        self.lost.td_errors += sum(call.td_errors for call in self._pending[shard])
        self.lost.counts.update(report.counts)
        self._failed_starts[shard] += self._starting[shard]
        if self._failed_starts[shard] >= _MOST_FAILED_STARTS:
            raise RuntimeError(
                f"shard {shard} could not be started in {_MOST_FAILED_STARTS} attempts. If it ran before, its rows are "
                f"lost: restore a checkpoint once the cause is removed. The last error was: {error}"
            ) from error
        logger.warning("shard %d was lost with %d rows, and is started again: %s", shard, rows, error)
        # A hung process would keep its CPUs.
        ray.kill(self.handles[shard])
        self._start(shard)


def joined_errors(errors: Sequence[Exception]) -> Exception:
    """Returns the first error, with a note of each further one."""
    for other in errors[1:]:
        errors[0].add_note(f"Another shard has raised: {other}")
    return errors[0]


class ShardLostError(RuntimeError):
    """A shard was lost while a call of every shard waited for its answer."""


class CallOfAll(NamedTuple):
    """A call of every shard."""

    method: str
    arguments: Arguments
    limit_s: float
    first: Callable[[int, CallOfAll], None]  #: Function that sends a shard what the call needs.
    is_late: list[bool]  #: Whether each shard was late before the call.
    epochs: np.ndarray  #: int64 ``[S]``, epochs of the shards when they were sent the call.
    answers: dict[int, ray.ObjectRef[Any]]  #: References of the answers, by shard.
    values: dict[int, Any]  #: Values of the answers that have come, by shard.
    errors: dict[int, Exception]  #: Errors that shards have raised, by shard.


class _Call(NamedTuple):
    """A call that the shard has not answered."""

    answer: ray.ObjectRef[Any]
    limit_s: float  #: Seconds that the answer may take longer than others.
    steps: int
    td_errors: int
    then: Callable[[Any], None]
    failed: Callable[[Exception], object] | None


class Answer(NamedTuple):
    """The result of a method of a shard, and what the shard holds afterwards."""

    value: Any
    report: ShardReport


@dataclass
class ShardReport:
    """Contents of a shard in few numbers."""

    #: Totals of each module, by which draws are divided.
    totals: dict[str, GroupTotals] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)  #: Stored rows of each module.
    env_steps_stored: int = 0  #: Environment steps stored, in RLlib.
    counts: Counts = field(default_factory=Counter)  #: Counters over the life of the shard, by module, in RLlib.
    fragments_lost: int = 0  #: Rows or fragments of episodes whose sender was lost before the shard fetched them.
    #: Progress signals of a curriculum since the last report, by module, each with its task.
    signals: dict[str, list[tuple[str, float]]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Stored rows of all modules."""
        return sum(self.rows.values())


class RemoteShardDraw(NamedTuple):
    """Rows that a shard has drawn: their identities, and a reference to the rows themselves."""

    reference: ray.ObjectRef[Any]  #: Reference of the rows, in a form that the actors choose.
    slot: np.ndarray  #: int64 ``[n]`` or ``[n, 2]``, slots of the rows.
    generation: np.ndarray  #: int64, generations of the slots.
    reply: ShardDraw  #: Probabilities of the rows.
    module_id: str | None = None  #: Module of the rows, with several agents.
    stats: Mapping[str, Any] | None = None  #: Statistics of the module's replay in this shard, in some answers.


@dataclass
class Losses:
    """Rows, TD errors, and counters that went with lost shards."""

    rows: int = 0  #: Rows that the shards held, and steps that they had been sent.
    td_errors: int = 0  #: TD errors that the shards had been sent.
    counts: Counts = field(default_factory=Counter)  #: Counters of their last reports.

    def state(self) -> dict[str, Any]:
        """Returns the losses as a save holds them."""
        return {"counts": listed(self.counts), "rows": self.rows, "td_errors": self.td_errors}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self.rows = state["rows"]
        self.td_errors = state["td_errors"]
        self.counts = counts_of(state["counts"])


def listed(counts: Counts) -> list[list[Any]]:
    """Returns counters as a save holds them."""
    return [[*key, amount] for key, amount in counts.items()]


def counts_of(saved: Iterable[Sequence[Any]]) -> Counts:
    """Returns the counters of a save, see :func:`listed`."""
    return Counter({(counter, owner): amount for counter, owner, amount in saved})
