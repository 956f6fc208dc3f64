# SPDX-License-Identifier: Apache-2.0
"""Tables of references into one storage, each first in, first out."""

from __future__ import annotations

from lightning_replay.moved import former_names

__getattr__ = former_names(__name__)
