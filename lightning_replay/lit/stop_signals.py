# SPDX-License-Identifier: Apache-2.0
"""Deferred SIGINT and SIGTERM, so that a run stops with a state that can be saved."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, NoReturn

from lightning.pytorch.utilities.exceptions import SIGTERMException

__all__ = ["StopSignals"]

SIGTERM_STATUS = 128 + signal.SIGTERM  # of a process, as shells and schedulers read it
_HINT = b"\nStopping after the training step in progress. A second signal does not wait for it.\n"


class StopSignals:
    """Defers the first SIGINT or SIGTERM to :meth:`raise_pending`; the second one interrupts at once.

    Raises ``KeyboardInterrupt`` for SIGINT and Lightning's ``SIGTERMException`` for SIGTERM, after calling the former
    handlers, Lightning's among them; a process that does not catch the latter exits with status 143. A SIGINT that the
    program handles itself or ignores keeps its effect. Python runs handlers in the main thread only; in another thread
    this class does nothing.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._pending: int | None = None
        self._process = 0

    def install(self) -> None:
        self._pending = None
        self._process = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._receive)
        if signal.getsignal(signal.SIGTERM) not in (None, signal.SIG_IGN):
            self._previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._receive)

    def remove(self) -> None:
        """Restores the handlers, except those that were replaced since."""
        while self._previous:
            number, handler = self._previous.popitem()
            if signal.getsignal(number) == self._receive:
                signal.signal(number, handler)

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def raise_pending(self) -> None:
        """Raises the exception of the deferred signal, if there is one."""
        if self._pending is not None:
            self._raise(self._pending, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked environment. Ctrl-C reaches it too, but its parent needs it to finish the step.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        elif self._pending is None:
            self._pending = number
            os.write(2, _HINT)  # print may not be called in a handler: the step may be printing
        else:
            self._raise(number, frame)

    def _raise(self, number: int, frame: FrameType | None) -> NoReturn:
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SIGTERMException(SIGTERM_STATUS)
