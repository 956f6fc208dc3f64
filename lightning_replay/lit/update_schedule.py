# SPDX-License-Identifier: Apache-2.0
"""Schedules of updates over environment steps: batches drawn from a replay, or rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from lightning_replay.validation import checked_count, checked_number

__all__ = ["Pace", "RolloutPace"]


class Pace:
    """``updates_due = floor((steps - warmup_steps) * updates_per_env_step)``, counted exactly for any ratio.

    A run that is resumed with another ratio counts by it from the steps and updates of its checkpoint on. The
    arguments are those of :class:`~lightning_replay.lit.ReplayDataModule`.

    Raises:
        ValueError: ``env_steps`` not above ``warmup_steps``, or an argument that is not positive.

    Example:
        >>> pace = Pace(env_steps=20, warmup_steps=8, updates_per_env_step=0.25)
        >>> pace.total_updates, pace.updates_due(15), pace.steps_for(2)
        (3, 1, 16)
    """

    def __init__(self, env_steps: int, warmup_steps: int, updates_per_env_step: float) -> None:
        self.env_steps: int = checked_count("env_steps", env_steps)
        self.warmup_steps: int = checked_count(
            "warmup_steps", warmup_steps
        )  # one row must be stored before the first draw
        if env_steps <= warmup_steps:
            raise ValueError(
                f"env_steps is {env_steps} and warmup_steps {warmup_steps}; env_steps counts the warm-up too and must "
                "be above it. Raise env_steps or lower warmup_steps."
            )
        ratio = checked_number("updates_per_env_step", updates_per_env_step, 1e-6)
        # 0.1 means a tenth, not its nearest binary fraction: an update must not slip by one step
        self._numerator, self._denominator = Fraction(ratio).limit_denominator(1_000_000).as_integer_ratio()
        self._first_step, self._first_update = self.warmup_steps, 0

    @property
    def total_updates(self) -> int:
        return self.updates_due(self.env_steps)

    def updates_due(self, steps: int) -> int:
        """Updates to be done by the time ``steps`` environment steps are stored."""
        return self._first_update + max(0, steps - self._first_step) * self._numerator // self._denominator

    def steps_for(self, update: int) -> int:
        """Environment steps to be stored before update number ``update``, counted from 1; all before the last."""
        if update >= self.total_updates:
            return self.env_steps
        further = update - self._first_update
        return self._first_step - (-further * self._denominator // self._numerator)  # rounded up

    def state_dict(self) -> dict[str, Any]:
        ratio = [self._numerator, self._denominator]
        return {"ratio": ratio, "first_step": self._first_step, "first_update": self._first_update}

    def resume(self, state: Mapping[str, Any], env_steps: int, updates: int) -> None:
        """Continues the schedule of a run from its :meth:`state_dict`, and from these clocks if the ratio is another.

        A run without updates has the warm-up that is asked for now.
        """
        if updates and state["ratio"] == [self._numerator, self._denominator]:
            self._first_step, self._first_update = state["first_step"], state["first_update"]
        elif updates:
            self._first_step, self._first_update = env_steps, updates


class RolloutPace:
    """Rollouts of ``num_envs * rollout_length`` steps; the last is shorter where they do not divide ``env_steps``.

    Environments step together, so a run may take up to ``num_envs - 1`` steps more than ``env_steps``. The arguments
    are those of :class:`~lightning_replay.lit.LevelDataModule`.

    Raises:
        ValueError: a number below 1.

    Example:
        >>> pace = RolloutPace(env_steps=70, num_envs=4, rollout_length=8)
        >>> pace.updates_after(0), [pace.length_after(steps) for steps in (0, 32, 64, 72)]
        (3, [8, 8, 2, 0])
    """

    def __init__(self, env_steps: int, num_envs: int, rollout_length: int) -> None:
        self.env_steps: int = checked_count("env_steps", env_steps)
        self.num_envs: int = checked_count("num_envs", num_envs)
        self.rollout_length: int = checked_count("rollout_length", rollout_length)

    def length_after(self, steps: int) -> int:
        """Steps of each environment in the rollout after ``steps`` environment steps of all; 0 at the end."""
        return min(self.rollout_length, -(-max(0, self.env_steps - steps) // self.num_envs))

    def updates_after(self, steps: int) -> int:
        """Rollouts to come after ``steps`` environment steps."""
        return -(-max(0, self.env_steps - steps) // (self.num_envs * self.rollout_length))
