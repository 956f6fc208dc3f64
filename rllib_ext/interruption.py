# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM that end training after the current iteration, so that a checkpoint can be written."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ONE_SIGNAL_S = 1.0  # timeout(1) sends each signal twice at once, to a process and to its group
_HINT = b"interrupted: training ends after this iteration; a second signal, a second later, ends it at once\n"


class Interruption:
    """Records the first Ctrl-C or SIGTERM within the ``with`` block. A second one has its usual effect.

    In the middle of an iteration the buffer and the Learners may disagree, so training could not be resumed from a
    checkpoint of that moment. A signal that is repeated within a second counts once. Outside the main thread Python
    sets no handlers, and signals keep their effect. A forked process ignores Ctrl-C, and SIGTERM ends it.

    Attributes:
        signal_number: of the signal, or ``None`` before it.

    Example:
        >>> with Interruption() as interruption:
        ...     while not interruption.requested:
        ...         break  # result = algorithm.train()
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._received_at = 0.0
        self._process = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            # A signal that is ignored, as in a background job, stays so. A handler from C could not be restored.
            replaced = [number for number in _SIGNALS if signal.getsignal(number) not in (None, signal.SIG_IGN)]
            self._previous = {number: signal.signal(number, self._note) for number in replaced}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    @property
    def requested(self) -> bool:
        """Whether there was a signal, so that training should end."""
        return self.signal_number is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked environment. Ctrl-C reaches it too, but its parent needs it to finish the iteration.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
        elif self.signal_number is None:
            self._received_at = time.monotonic()
            self.signal_number = number
            os.write(2, _HINT)  # print may not be called in a handler: the iteration may be printing
        elif number != self.signal_number or time.monotonic() - self._received_at > _ONE_SIGNAL_S:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
