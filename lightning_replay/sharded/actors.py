# SPDX-License-Identifier: Apache-2.0
"""The actors of a sharded replay: started, called without waiting, restarted; every answer brings a report."""

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
Arguments = Callable[[int], tuple[Any, ...]]  # by number of the shard
_MOST_FAILED_STARTS = 3  # in a row, of one shard
#: Seconds that a start may take: of a process that imports RLlib, on a machine that may be starting many.
START_TIMEOUT_S = 600.0
_HUNG_AFTER = 4  # times shard_timeout_s without an answer, a shard is started again
_LOOK_S = 1.0  # between looks at what has become of shards that are waited for


class ShardActors:
    """Ray actors, one for each shard, whose methods return an :class:`~lightning_replay.sharded.actors.Answer`.

    :meth:`send` calls a method and returns at once; :meth:`settle` waits for answers. The last report of each shard is
    kept. A shard whose process or node is lost, or that has given no answer for four times ``shard_timeout_s``, is
    started again and gets a new epoch; meanwhile, as one that is late, it counts as empty, and is not waited for.

    No call waits without an end: for a shard no longer than ``shard_timeout_s`` (in a save or a load
    ``save_timeout_s``), and no longer than ``time_left``, after which an error names the shards.

    Args:
        kind: class of the actors.
        arguments: of the class, before ``shard_timeout_s / 2``, so that a process that hangs, from which rows are
            fetched, makes no shard late, and the folder to begin with.
        options: of the shards.
        on_report: called with each new report.
        wait: ``ray.wait``, or a function that lets other threads use this object meanwhile.
        time_left: returns the seconds that the present caller waits at most.
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
        self._wait, self._time_left, self._on_report = wait, time_left, on_report
        self.kind: type = kind
        self._arguments = arguments
        self.options: ShardOptions = options
        count = options.num_shards
        self.handles: list[Any] = []  # of the actors; empty before they start
        #: int64 ``[S]``, how often each was started; raise them where rows drawn before are gone.
        self.epochs: np.ndarray = np.zeros(count, dtype=np.int64)
        self.reports: list[ShardReport] = [ShardReport() for _ in range(count)]  # the last one of each
        self.lost: Losses = Losses()
        #: The folder of each in the last save, ``None`` if it has none that fits.
        self.last_save: Sequence[Folder] | None = None
        self._nodes: Sequence[str] = ()
        self._pending: list[deque[_Call]] = [deque() for _ in range(count)]
        self._since: list[float] = [0.0] * count  # when the first call in each of these became the first
        self._starting = [False] * count
        self._failed_starts = [0] * count  # in a row
        self._late_with: list[ray.ObjectRef[Any] | None] = [None] * count  # the last answer that was waited for in vain

    def __len__(self) -> int:
        return self.options.num_shards

    @property
    def alive(self) -> list[bool]:
        return [not (starting or late) for starting, late in zip(self._starting, self._late_with, strict=True)]

    def is_late(self, shard: int) -> bool:  # one that is being started is not
        return self._late_with[shard] is not None

    @property
    def rows(self) -> Counter[str]:
        return sum((Counter(report.rows) for report in self.reports), Counter())

    @property
    def counts(self) -> Counts:
        total: Counts = Counter(self.lost.counts)  # a shard that is started again counts from 0
        for report in self.reports:
            total.update(report.counts)
        return total

    def start(self, nodes: Sequence[str] = ()) -> None:
        self._nodes = nodes  # ids; preferred as far as there is room
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
        except BaseException:  # actors that nothing refers to any more would keep their CPUs
            self.stop()
            raise

    def wait_for_starts(self) -> bool:
        deadline = time.monotonic() + min(START_TIMEOUT_S, self._time_left())
        while any(self._starting) and (left := deadline - time.monotonic()) > 0:
            first = [calls[0].answer for calls, starting in zip(self._pending, self._starting, strict=True) if starting]
            self._wait(first, timeout=min(left, _LOOK_S))
            self.settle({})  # one that was lost is started again, and raises an error after several attempts
        return not any(self._starting)

    def wait_for_any(self) -> None:
        # Until one of the shards that are being started or are late has answered everything.
        before = self.alive
        while not all(self.alive) and self.alive == before:
            last = [calls[-1].answer for calls, alive in zip(self._pending, before, strict=True) if not alive]
            if self._time_left() <= 0:
                raise TimeoutError(self.unanswered(shard for shard, alive in enumerate(before) if not alive))
            self._wait(last, timeout=min(self._time_left(), _LOOK_S))
            self.settle({})

    def start_lost(self) -> None:
        # A call finds out which shards were lost since they last answered.
        for shard in range(len(self)):
            self.send(shard, "report")
        self.settle()
        self.wait_for_starts()
        if missing := [shard for shard, alive in enumerate(self.alive) if not alive]:
            raise TimeoutError(self.unanswered(missing))

    def unanswered(self, shards: Iterable[int] | None = None) -> str:
        if shards is None:
            shards = [shard for shard, calls in enumerate(self._pending) if calls]
        now = time.monotonic()
        verbs = ((shard, "started" if self._starting[shard] else "answered") for shard in shards)
        listed = [f"shard {shard} has not {verb} for {now - self._since[shard]:.3g} s" for shard, verb in verbs]
        return (
            f"{', '.join(listed) or 'a shard has not answered'}: its process is busy or hangs, or its node cannot be "
            f"reached. After {_HUNG_AFTER * self.options.shard_timeout_s:g} s without an answer (four times "
            "shard_timeout_s) it is started again as one that is lost"
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
        """Calls a method of a shard without waiting; calls of one shard run in order.

        It may take ``limit_s`` longer than others; ``steps`` and ``td_errors`` are lost with the shard. The
        :meth:`settle` that finds the answer calls ``then``, or ``failed`` with an error, which it raises otherwise.
        """
        answer = getattr(self.handles[shard], method).remote(*arguments)
        if not self._pending[shard]:  # else the shard is at work on an earlier call, which has its own time
            self._since[shard] = time.monotonic()
        self._pending[shard].append(_Call(answer, limit_s, steps, td_errors, then, failed))
        return answer

    def settle(self, until: Mapping[int, ray.ObjectRef[Any]] | None = None) -> ShardActors:
        """Waits for answers, except of shards that are being started or were late before; takes all that have come.

        ``until`` has by shard the last answer to wait for, ``{}`` for none; by default the last one of every shard.
        Returns this object.

        Raises:
            Exception: what a method of a shard has raised, with a note of each further error.
            TimeoutError: the caller waits no longer, see ``time_left``; it names the shards.
            RuntimeError: a shard was lost and cannot be started again.
        """
        awaited = [self._awaited(shard, until) if alive else [] for shard, alive in enumerate(self.alive)]
        ready: set[ray.ObjectRef[Any]] = set()
        if waited := [answer for answers in awaited for answer in answers]:
            limit_s = max(0.0, min(self.options.shard_timeout_s, self._time_left()))
            ready.update(self._wait(waited, num_returns=len(waited), timeout=limit_s)[0])
        # Answers that were not waited for, such as those of late shards, are taken if they have come.
        if others := [call.answer for calls in self._pending for call in calls if call.answer not in ready]:
            ready.update(self._wait(others, num_returns=len(others), timeout=0)[0])
        errors = [error for shard in range(len(self)) for error in self._take_answers(shard, ready)]
        # Some of these answers were not given, and the shard was not lost since.
        rest = {shard: answers for shard, answers in enumerate(awaited) if self._waits_for(shard, answers)}
        if rest and not errors and self._time_left() <= 0:
            raise TimeoutError(self.unanswered(rest))
        for shard, answers in rest.items():
            if self.alive[shard]:  # late from now on, until it has given this answer
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
        # It may take limit_s, by default shard_timeout_s. `first` is called before a shard is sent the call, now and
        # when it was lost and is sent it again.
        limit_s = limit_s or self.options.shard_timeout_s
        is_late = [self.is_late(shard) for shard in range(len(self))]
        sent = CallOfAll(method, arguments, limit_s, first, is_late, self.epochs.copy(), {}, {}, {})
        for shard in range(len(self)):
            self._send_of_all(sent, shard)
        return sent

    def values_of(self, sent: CallOfAll, *, again: bool = False) -> list[Any]:
        """Waits for the answers of all shards, except of those that were late before; returns their values.

        Raises, once all have finished, what a shard has raised, or ``ShardLostError``; with ``again`` the call is sent
        anew to a shard that was lost. ``TimeoutError`` names those that do what they were sent later.
        """
        deadline = time.monotonic() + sent.limit_s
        while missing := [shard for shard in sent.answers if shard not in sent.values | sent.errors]:
            for shard in missing:
                if not self._waits_for(shard, [sent.answers[shard]]):
                    if not again:  # an error once the others have finished: what they write may be removed then
                        sent.errors[shard] = ShardLostError(f"shard {shard} was lost meanwhile, and is started again")
                        continue
                    sent.is_late[shard] = False
                    self._send_of_all(sent, shard)
            if not (missing := [shard for shard in missing if shard not in sent.errors]):
                break
            if any(self._starting[shard] for shard in missing):
                deadline = time.monotonic() + sent.limit_s  # the start has a limit of its own
            left = min(deadline - time.monotonic(), self._time_left())
            if left <= 0 or all(sent.is_late[shard] for shard in missing):
                raise TimeoutError(self.unanswered(missing))
            self._wait([sent.answers[shard] for shard in missing], timeout=min(left, _LOOK_S))
            self.settle({})
        if sent.errors:
            raise joined_errors(list(sent.errors.values()))
        return [sent.values[shard] for shard in range(len(self))]

    def take_over(self, staged: CallOfAll, restore: Callable[[], None]) -> None:
        """Lets every shard use the save that it has read in ``staged``, calls ``restore``, and waits until all do.

        Nothing is drawn from a shard until it does. One that is lost meanwhile reads its part of the save again.
        """

        def stage(shard: int, sent: CallOfAll) -> None:
            if self.epochs[shard] != staged.epochs[shard]:  # it was lost after it had answered
                failed = functools.partial(sent.errors.setdefault, shard)
                self.send(shard, staged.method, *staged.arguments(shard), limit_s=staged.limit_s, failed=failed)

        sent = self.send_all("take_over", first=stage)
        # Late until it has answered: nothing is drawn from a shard that does not use the save yet.
        self._late_with = [*sent.answers.values()]
        restore()
        try:
            self.values_of(sent, again=True)
        except TimeoutError as error:
            raise TimeoutError(f"{error}. The save was loaded; this shard uses its part once it answers") from error

    def totals(self, module_id: str) -> list[GroupTotals | None]:
        pairs = zip(self.reports, self.alive, strict=True)
        return [report.totals.get(module_id) if alive else None for report, alive in pairs]

    def stop(self) -> None:
        for handle in self.handles:
            if handle is not None:  # which an error in a start leaves
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
        self.epochs[shard] += 1  # identities of rows that were drawn before are none of this process
        self.handles[shard] = self.new_actor(shard)
        self._pending[shard].clear()  # what was sent is lost with the process, and was counted
        self._starting[shard], self._late_with[shard] = True, None
        self.send(shard, "report")  # its answer shows that the actor was built

    def new_actor(self, shard: int) -> Any:
        actor: Any = ray.remote(num_cpus=self.options.num_cpus_per_shard, max_restarts=0)(self.kind)
        return actor.options(**placement_of(shard, self._nodes)).remote(*self.arguments_of(shard))

    def arguments_of(self, shard: int) -> tuple[Any, ...]:
        folder = None
        if self.last_save is not None and self.epochs[shard] > 1 and self.options.restart_shards == "last_save":
            folder = self.last_save[shard]
        if folder is not None and self._failed_starts[shard]:  # as its files were deleted
            logger.warning(f"shard {shard} could not be started with its save {folder}, and starts empty")
            folder = None
        return (*self._arguments(shard), self.options.shard_timeout_s / 2, folder)

    def _awaited(self, shard: int, until: Mapping[int, ray.ObjectRef[Any]] | None) -> list[ray.ObjectRef[Any]]:
        # Calls run in order: all answers up to the last one.
        pending = [call.answer for call in self._pending[shard]]
        if until is None:
            return pending
        last = until.get(shard)
        return pending[: pending.index(last) + 1] if last in pending else []

    def _waits_for(self, shard: int, answers: Sequence[ray.ObjectRef[Any]]) -> bool:
        return any(call.answer in answers for call in self._pending[shard])

    def _take_answers(self, shard: int, ready: set[ray.ObjectRef[Any]]) -> list[Exception]:
        # Takes those that have come, in order; returns what the methods have raised.
        pending = self._pending[shard]
        errors: list[Exception] = []
        while pending and pending[0].answer in ready:
            call = pending[0]
            try:
                answer: Answer | None = ray.get(call.answer)
            except (RayActorError, ObjectLostError) as error:  # an answer that was on the lost node
                self._restart(shard, error)
                return errors
            except Exception as error:  # of the method: the shard itself goes on
                (errors.append if call.failed is None else call.failed)(error)
                answer = None
            pending.popleft()
            self._since[shard] = time.monotonic()  # of the next call, which begins now
            if self._late_with[shard] == call.answer:
                self._late_with[shard] = None
            if answer is not None:
                call.then(answer.value)
                if self._starting[shard]:  # the counts of a save that it began with are among those lost
                    self.lost.counts.subtract(answer.report.counts)
                self.reports[shard] = answer.report
                self._on_report(answer.report)
                self._starting[shard], self._failed_starts[shard] = False, 0
        return errors

    def _restart_hung(self) -> None:
        for shard, calls in enumerate(self._pending):
            if not calls:
                continue
            first = calls[0]
            limit_s = START_TIMEOUT_S if self._starting[shard] else _HUNG_AFTER * self.options.shard_timeout_s
            if time.monotonic() - self._since[shard] < limit_s + first.limit_s:
                continue
            # This process may have been stopped itself, and the answer wait to be read.
            has_come = self._wait([first.answer], timeout=_LOOK_S)[0]
            if not has_come and calls and calls[0] is first:
                self._restart(shard, TimeoutError(f"it has not answered for {limit_s + first.limit_s:g} s"))

    def _restart(self, shard: int, error: Exception) -> None:
        report, self.reports[shard] = self.reports[shard], ShardReport()
        # What it held by its last report, and what it was sent since.
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
        ray.kill(self.handles[shard])  # one that hangs would keep its CPUs
        self._start(shard)


def joined_errors(errors: Sequence[Exception]) -> Exception:
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
    first: Callable[[int, CallOfAll], None]  # sends a shard what the call needs
    is_late: list[bool]  # whether each shard was late already
    epochs: np.ndarray  # of the shards that were sent it, int64 [S]
    answers: dict[int, ray.ObjectRef[Any]]  # by shard
    values: dict[int, Any]  # what was answered so far, by shard
    errors: dict[int, Exception]


class _Call(NamedTuple):
    """A call that was not answered yet."""

    answer: ray.ObjectRef[Any]
    limit_s: float  # that its answer may take beyond that of others
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

    totals: dict[str, GroupTotals] = field(default_factory=dict)  # of each module, by which draws are divided
    rows: dict[str, int] = field(default_factory=dict)  # stored by each module
    env_steps_stored: int = 0  # in RLlib, as the next one
    counts: Counts = field(default_factory=Counter)  # sums over the life of the shard, by module
    fragments_lost: int = 0  # rows or fragments of episodes whose sender was lost before they could be fetched
    #: Progress signals of a curriculum since the last report, by module; each with its task.
    signals: dict[str, list[tuple[str, float]]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(self.rows.values())


class RemoteShardDraw(NamedTuple):
    """Rows that a shard has drawn: their identities, and a reference to the rows themselves."""

    reference: ray.ObjectRef[Any]  # of the rows, in a form of the actors' own
    slot: np.ndarray  # int64 [n] or [n, 2], where the rows are stored
    generation: np.ndarray
    reply: ShardDraw  # how likely they were
    module_id: str | None = None  # where there are several agents
    stats: Mapping[str, Any] | None = None  # of the module's replay in this shard, in some of the answers


@dataclass
class Losses:
    """Rows, TD errors and counts that went with lost shards."""

    rows: int = 0  # that they held, and steps that they had been sent
    td_errors: int = 0  # of their rows, also those that they had been sent
    counts: Counts = field(default_factory=Counter)  # of their last reports

    def state(self) -> dict[str, Any]:
        return {"counts": listed(self.counts), "rows": self.rows, "td_errors": self.td_errors}

    def load(self, state: Mapping[str, Any]) -> None:
        self.rows, self.td_errors = state["rows"], state["td_errors"]
        self.counts = counts_of(state["counts"])


def listed(counts: Counts) -> list[list[Any]]:  # as they are saved
    return [[*key, amount] for key, amount in counts.items()]


def counts_of(saved: Iterable[Sequence[Any]]) -> Counts:
    return Counter({(counter, owner): amount for counter, owner, amount in saved})
