# SPDX-License-Identifier: Apache-2.0
"""Signals that wait for the end of an iteration, sent to this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from rllib_ext import Interruption


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def test_the_first_signal_waits_and_the_second_interrupts(capfd: pytest.CaptureFixture[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), Interruption() as interruption:
        assert not interruption.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.requested and interruption.signal_number == signal.SIGINT
        assert "training ends after this iteration" in capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGINT)


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGINT)
        assert not interruption.requested
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
