# SPDX-License-Identifier: Apache-2.0
"""Whether this library may act on forks and on its import of TorchRL. ``docs/process.md`` describes both."""

from __future__ import annotations

import os

are_on: bool = os.environ.get("LIGHTNING_REPLAY_HOOKS", "1") != "0"  #: Whether the hooks act.


def turn_off() -> None:
    """Turns the hooks of this process off, as ``LIGHTNING_REPLAY_HOOKS=0`` in its environment does.

    Locks of replays are still replaced in forked processes, which would otherwise wait forever.

    Example:
        >>> from lightning_replay import hooks
        >>> hooks.turn_off()
        >>> hooks.are_on
        False
        >>> hooks.are_on = True
    """
    global are_on
    are_on = False
