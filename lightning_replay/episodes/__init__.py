# SPDX-License-Identifier: Apache-2.0
"""Which rows follow which: links between rows, running episodes, returns over several steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_replay.moved import former_names

__getattr__: Callable[[str], Any] = former_names(__name__)
