# SPDX-License-Identifier: Apache-2.0
"""Which rows follow which: links between rows, running episodes, returns over several steps."""

from __future__ import annotations

from lightning_replay.moved import former_names

__getattr__ = former_names(__name__)
