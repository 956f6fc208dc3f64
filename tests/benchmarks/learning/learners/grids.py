# SPDX-License-Identifier: Apache-2.0
"""Numbers of the states of a grid, and greedy episodes in it."""

from __future__ import annotations

from collections.abc import Callable

from lightning_replay.envs.grids import TabularGrid as RoomGrid


def state_of(env: RoomGrid) -> int:
    """Returns the number of the environment's state: 4 * (height * x + y) + direction."""
    x, y = env.agent_pos
    return int(x * env.height + y) * 4 + env.agent_dir


def greedy_steps(action_of: Callable[[int], int], env: RoomGrid) -> int | None:
    """Plays an episode; returns its steps to the goal, or ``None`` if it returns to a state, since it then cycles.

    Args:
        action_of: the action taken in each state, always the same.
        env: is reset.
    """
    env.reset()
    seen: set[int] = set()
    while (state := state_of(env)) not in seen:
        seen.add(state)
        if env.step(action_of(state))[2]:
            return len(seen)
    return None
