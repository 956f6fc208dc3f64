# SPDX-License-Identifier: Apache-2.0
"""The actors of a sharded replay: started, called without waiting, and started again when they are lost."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError

from lightning_replay.sharded.options import ShardOptions, placement_of
from lightning_replay.sharded.reports import Answer, Counts, Losses, ShardReport

if TYPE_CHECKING:
    from lightning_replay.draw_parts import GroupTotals

logger: logging.Logger = logging.getLogger(__name__)

_MOST_FAILED_STARTS = 3  # in a row, of one shard
_START_TIMEOUT_S = 600.0  # of a process that imports RLlib, on a machine that may be starting many


class _Call(NamedTuple):
    """A call that was not answered yet."""

    answer: ray.ObjectRef[Any]
    steps: int
    td_errors: int
    then: Callable[[Any], None]


class ShardActors:
    """Ray actors, one for each shard, whose methods return an :class:`~lightning_replay.sharded.reports.Answer`.

    :meth:`send` calls a method and returns at once; :meth:`settle` waits for answers. The last report of each shard is
    kept. A shard whose process or node is lost is started again and gets a new epoch; meanwhile, as one that is late,
    it counts as empty. Nothing is waited for from it until it has answered. What is sent to it arrives.

    Args:
        kind: class of the actors.
        arguments: of the class, by number of the shard; called before each start.
        options: of the shards.
        on_report: called with each new report.

    Attributes:
        handles: of the actors; empty before :meth:`start`.
        epochs: int64 ``[S]``, how often each was started; raise them where rows drawn before are gone.
        reports: the last one of each.
        failed_starts: how often in a row each could not be started.
        lost: what went with lost shards.
    """

    def __init__(
        self,
        kind: type,
        arguments: Callable[[int], tuple[Any, ...]],
        options: ShardOptions,
        on_report: Callable[[ShardReport], None] = lambda report: None,
    ) -> None:
        self._kind = kind
        self._arguments = arguments
        self.options: ShardOptions = options
        self._on_report = on_report
        count = options.num_shards
        self.handles: list[Any] = []
        self.epochs: np.ndarray = np.zeros(count, dtype=np.int64)
        self.reports: list[ShardReport] = [ShardReport() for _ in range(count)]
        self.lost: Losses = Losses()
        self._nodes: Sequence[str] = ()
        self._pending: list[deque[_Call]] = [deque() for _ in range(count)]
        self._starting = [False] * count
        self.failed_starts: list[int] = [0] * count
        self._late_with: list[ray.ObjectRef[Any] | None] = [None] * count  # the last answer that was waited for in vain

    def __len__(self) -> int:
        return self.options.num_shards

    @property
    def alive(self) -> list[bool]:
        """Whether each shard can be drawn from: it has started and is not late."""
        return [not (starting or late) for starting, late in zip(self._starting, self._late_with, strict=True)]

    @property
    def rows(self) -> Counter[str]:
        """Rows stored in all shards, by module."""
        return sum((Counter(report.rows) for report in self.reports), Counter())

    @property
    def counts(self) -> Counts:
        """Sums over the life of all shards, lost ones included."""
        total: Counts = Counter(self.lost.counts)
        for report in self.reports:
            total.update(report.counts)
        return total

    def start(self, nodes: Sequence[str] = ()) -> None:
        """Starts the actors and waits for them.

        Args:
            nodes: ids of those to place shards on, as far as there is room; any if there are none.

        Raises:
            RuntimeError: some have not started in time, or cannot be started.
        """
        self._nodes = nodes
        self.handles = [None] * len(self)
        for shard in range(len(self)):
            self._start(shard)
        try:
            have_started = self.wait_for_starts()
        except BaseException:
            self.stop()
            raise
        if not have_started:
            missing = sum(self._starting)
            self.stop()
            raise RuntimeError(
                f"{missing} of {len(self)} shards have not started within {_START_TIMEOUT_S:g} s; each needs "
                f"{self.options.num_cpus_per_shard:g} CPUs, and {ray.available_resources().get('CPU', 0):g} of "
                f"{ray.cluster_resources().get('CPU', 0):g} are free. Lower num_cpus_per_shard, or start Ray with more "
                "CPUs"
            )

    def wait_for_starts(self) -> bool:
        """Waits for shards that are being started; returns whether all have."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while any(self._starting) and (left := deadline - time.monotonic()) > 0:
            first = [calls[0].answer for calls, starting in zip(self._pending, self._starting, strict=True) if starting]
            ray.wait(first, timeout=left)
            self.settle()  # one that was lost is started again, and raises an error after several attempts
        return not any(self._starting)

    def wait_for_any(self) -> None:
        """Waits until one of the shards that are being started or are late has answered everything."""
        last = [calls[-1].answer for calls, alive in zip(self._pending, self.alive, strict=True) if calls and not alive]
        if last:
            ray.wait(last, timeout=_START_TIMEOUT_S)
            self.settle()

    def send(
        self,
        shard: int,
        method: str,
        *arguments: Any,
        steps: int = 0,
        td_errors: int = 0,
        then: Callable[[Any], None] = lambda value: None,
    ) -> ray.ObjectRef[Any]:
        """Calls a method of a shard without waiting; calls of one shard run in order.

        Args:
            shard: number.
            method, arguments: of its class.
            steps, td_errors: sent with the call, which are lost with the shard.
            then: called with the value of the answer by the :meth:`settle` that finds it.

        Returns:
            Reference of the answer.
        """
        answer = getattr(self.handles[shard], method).remote(*arguments)
        self._pending[shard].append(_Call(answer, steps, td_errors, then))
        return answer

    def settle(self, until: Mapping[int, ray.ObjectRef[Any]] | None = None) -> None:
        """Waits for answers, except of shards that are being started or were late before; takes all that have come.

        Args:
            until: by shard, the last answer to wait for, ``{}`` for none; by default the last one of every shard.

        Raises:
            Exception: what a method of a shard has raised, with a note of each further error.
            RuntimeError: a shard was lost and cannot be started again.
        """
        awaited = [self._awaited(shard, until) if alive else [] for shard, alive in enumerate(self.alive)]
        waited = [answer for answers in awaited for answer in answers]
        others = [call.answer for calls in self._pending for call in calls if call.answer not in waited]
        ready: set[ray.ObjectRef[Any]] = set()
        for references, timeout in ((waited, self.options.shard_timeout_s), (others, 0)):
            if references:
                ready.update(ray.wait(references, num_returns=len(references), timeout=timeout)[0])
        errors: list[Exception] = []
        for shard, answers in enumerate(awaited):
            errors += self._take_answers(shard, ready)
            if not ready.issuperset(answers) and not self._starting[shard]:
                self._mark_late(shard, answers[-1])
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"Another shard has raised: {other}")
            raise errors[0]

    def call(self, method: str, arguments: Callable[[int], tuple[Any, ...]] = lambda shard: ()) -> list[Any]:
        """Calls a method of every shard and waits for all, however long they take.

        Args:
            method: name.
            arguments: by number of the shard.

        Raises:
            RayActorError: a shard was lost.
            Exception: what a shard has raised, after all have finished.
        """
        self.settle()
        references = [getattr(handle, method).remote(*arguments(shard)) for shard, handle in enumerate(self.handles)]
        ray.wait(references, num_returns=len(references))
        answers = ray.get(references)
        for shard, answer in enumerate(answers):
            self._keep_report(shard, answer.report)
        return [answer.value for answer in answers]

    def totals(self, module_id: str) -> list[GroupTotals | None]:
        """Returns the totals of a module in each shard, ``None`` where it cannot be drawn from."""
        pairs = zip(self.reports, self.alive, strict=True)
        return [report.totals.get(module_id) if alive else None for report, alive in pairs]

    def stop(self) -> None:
        """Ends the processes."""
        for handle in self.handles:
            if handle is not None:  # which an error in a start leaves
                ray.kill(handle)
        self.handles = []

    def _start(self, shard: int) -> None:
        self.epochs[shard] += 1
        self.handles[shard] = self._actor(shard)
        self._pending[shard].clear()
        self._starting[shard], self._late_with[shard] = True, None
        self.send(shard, "report")

    def _actor(self, shard: int) -> Any:
        actor: Any = ray.remote(num_cpus=self.options.num_cpus_per_shard, max_restarts=0)(self._kind)
        return actor.options(**placement_of(shard, self._nodes)).remote(*self._arguments(shard))

    def _awaited(self, shard: int, until: Mapping[int, ray.ObjectRef[Any]] | None) -> list[ray.ObjectRef[Any]]:
        """Returns the answers of a shard to wait for, as calls run in order: all up to the last one."""
        pending = [call.answer for call in self._pending[shard]]
        if until is None:
            return pending
        last = until.get(shard)
        return pending[: pending.index(last) + 1] if last in pending else []

    def _take_answers(self, shard: int, ready: set[ray.ObjectRef[Any]]) -> list[Exception]:
        """Takes the answers of a shard that have come, in order, and keeps the last report; returns errors."""
        pending = self._pending[shard]
        errors: list[Exception] = []
        while pending and pending[0].answer in ready:
            call = pending[0]
            try:
                answer: Answer | None = ray.get(call.answer)
            except (RayActorError, ObjectLostError) as error:  # an answer that was on the lost node
                self._restart(shard, error)
                return errors
            except Exception as error:
                errors.append(error)
                answer = None
            pending.popleft()
            if self._late_with[shard] == call.answer:
                self._late_with[shard] = None
            if answer is not None:
                call.then(answer.value)
                if self._starting[shard]:  # the counts of a save that it began with are among those lost
                    self.lost.counts.subtract(answer.report.counts)
                self._keep_report(shard, answer.report)
                self._starting[shard], self.failed_starts[shard] = False, 0
        return errors

    def _keep_report(self, shard: int, report: ShardReport) -> None:
        self.reports[shard] = report
        self._on_report(report)

    def _restart(self, shard: int, error: RayError) -> None:
        lost, report, self.reports[shard] = self.lost, self.reports[shard], ShardReport()
        rows = report.num_rows + sum(call.steps for call in self._pending[shard])
        lost.rows += rows
        lost.td_errors += sum(call.td_errors for call in self._pending[shard])
        lost.counts.update(report.counts)
        self.failed_starts[shard] += self._starting[shard]
        if self.failed_starts[shard] >= _MOST_FAILED_STARTS:
            raise RuntimeError(
                f"shard {shard} could not be started in {_MOST_FAILED_STARTS} attempts. If it ran before, its rows are "
                f"lost: restore a checkpoint once the cause is removed. The last error was: {error}"
            ) from error
        logger.warning("shard %d was lost with %d rows, and is started again: %s", shard, rows, error)
        ray.kill(self.handles[shard])
        self._start(shard)

    def _mark_late(self, shard: int, awaited: ray.ObjectRef[Any]) -> None:
        self._late_with[shard] = awaited
        logger.warning(
            "shard %d has not answered for %g s (shard_timeout_s); draws go on without its %d rows until it does",
            shard,
            self.options.shard_timeout_s,
            self.reports[shard].num_rows,
        )
