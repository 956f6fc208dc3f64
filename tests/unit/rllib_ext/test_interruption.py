# SPDX-License-Identifier: Apache-2.0
"""Signals that wait for the end of an iteration, sent to this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from rllib_ext import Interruption, interruption


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def test_the_first_signal_waits_and_a_later_one_interrupts(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    waited = False
    with pytest.raises(KeyboardInterrupt), Interruption() as one:
        assert not one.requested
        for _ in range(2):  # as timeout(1) sends it
            os.kill(os.getpid(), signal.SIGINT)
        assert one.requested and one.signal_number == signal.SIGINT
        assert capfd.readouterr().err.count("training ends after this iteration") == 1
        waited = True
        monkeypatch.setattr(interruption, "_ONE_SIGNAL_S", -1.0)
        os.kill(os.getpid(), signal.SIGINT)
    assert waited and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_signal_interrupts_at_once() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), Interruption() as one:
        os.kill(os.getpid(), signal.SIGINT)
        assert one.signal_number == signal.SIGINT
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("SIGTERM was taken for a repetition of SIGINT")


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interruption() as one:
        os.kill(os.getpid(), signal.SIGINT)
        assert not one.requested
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_environments_outlive_ctrl_c_and_obey_sigterm() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    statuses = []
    with Interruption() as one:
        for number in (signal.SIGINT, signal.SIGTERM):
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), number)
                os._exit(0)
            statuses.append(os.waitpid(child, 0)[1])
    assert statuses == [0, signal.SIGTERM] and not one.requested
