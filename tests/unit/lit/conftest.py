# SPDX-License-Identifier: Apache-2.0
"""Fixtures of runs that are stopped."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator

import pytest

# Ray Tune leaves a handler of SIGUSR1 behind, and Lightning keeps handlers that it finds.
DEFAULT = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_DFL,
}


@pytest.fixture
def default_handlers() -> Iterator[None]:
    """Those of a program that was just started, whatever runs the tests; every run must leave them as they were."""
    before = [signal.signal(number, handler) for number, handler in DEFAULT.items()]
    yield
    after = [signal.signal(number, handler) for number, handler in zip(DEFAULT, before, strict=True)]
    assert after == list(DEFAULT.values())


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.INFO):
        yield lambda: [one.getMessage() for one in caplog.records if "aved" in one.getMessage()]
