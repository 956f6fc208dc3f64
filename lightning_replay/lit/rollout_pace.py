# SPDX-License-Identifier: Apache-2.0
"""How many rollouts a run of so many environment steps has, and how long the last one is."""

from __future__ import annotations

from lightning_replay.validation import checked_count

__all__ = ["RolloutPace"]


class RolloutPace:
    """Rollouts of ``num_envs * rollout_length`` steps; the last is shorter where they do not divide ``env_steps``.

    Environments step together, so a run may take up to ``num_envs - 1`` steps more than asked for.

    Args:
        env_steps: environment steps of the whole run.
        num_envs: environments that step together.
        rollout_length: steps of each in one rollout.

    Raises:
        ValueError: a number below 1.

    Example:
        >>> pace = RolloutPace(env_steps=70, num_envs=4, rollout_length=8)
        >>> pace.updates_after(0), [pace.length_after(steps) for steps in (0, 32, 64, 72)]
        (3, [8, 8, 2, 0])
    """

    def __init__(self, env_steps: int, num_envs: int, rollout_length: int) -> None:
        self.env_steps = checked_count("env_steps", env_steps)
        self.num_envs = checked_count("num_envs", num_envs)
        self.rollout_length = checked_count("rollout_length", rollout_length)

    def length_after(self, steps: int) -> int:
        """Steps of each environment in the rollout after ``steps`` environment steps of all; 0 at the end."""
        return min(self.rollout_length, -(-max(0, self.env_steps - steps) // self.num_envs))

    def updates_after(self, steps: int) -> int:
        """Rollouts to come after ``steps`` environment steps."""
        return -(-max(0, self.env_steps - steps) // (self.num_envs * self.rollout_length))
