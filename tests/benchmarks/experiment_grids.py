# SPDX-License-Identifier: Apache-2.0
"""What the experiments on grids share: the number of a state, the greedy episode."""

from __future__ import annotations

from collections.abc import Callable

from lightning_replay.envs.grids import RoomGrid


def state_of(env: RoomGrid) -> int:
    """The number of the state the environment is in: 4 * (height * x + y) + direction."""
    x, y = env.agent_pos
    return int(x * env.height + y) * 4 + env.agent_dir


def greedy_steps(action_of: Callable[[int], int], env: RoomGrid) -> int | None:
    """Steps of the episode to the goal; nothing where it comes back to a state, and so goes round for ever.

    Args:
        action_of: the action taken in each state, always the same.
        env: for this alone.
    """
    env.reset()
    seen: set[int] = set()
    while (state := state_of(env)) not in seen:
        seen.add(state)
        if env.step(action_of(state))[2]:
            return len(seen)
    return None
