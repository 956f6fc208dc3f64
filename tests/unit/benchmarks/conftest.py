# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def lightning_logs_as_before() -> Iterator[None]:
    """Experiments silence Lightning in their process, in which tests of other folders read its messages."""
    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
