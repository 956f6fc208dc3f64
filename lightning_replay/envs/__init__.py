# SPDX-License-Identifier: Apache-2.0
"""Environments of the published experiments; importing this module registers them with Gymnasium."""

from __future__ import annotations

import gymnasium


def register_envs() -> None:
    """Registers every environment of this package; Gymnasium calls it where the package is installed."""
    del gymnasium
