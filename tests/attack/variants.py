# SPDX-License-Identifier: Apache-2.0
"""Every recipe with the options that change what is stored, drawn and saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay import recipes
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.replay import Replay
from lightning_replay.saving.spec import rebuildable
from lightning_replay.writers import OldestLeaves, SmallestReturnLeaves, StochasticSurprise
from tests.attack.worlds import World
from tests.frame_steps import WRIST
from tests.recipe_options import ROW_RECIPES, required_options

TASKS = ["target", "near"]
DISCOUNT = 0.5
MIXING = ("mixup", "neighborhood_mixup", "continuous_transition", "s4rl", "noisy")


@rebuildable
class HighReward:
    """The event of a high reward; raises at a reward that no step of a :class:`World` has."""

    def __call__(self, steps: TensorDictBase) -> Tensor:
        reward = steps["next", "reward"]
        if (reward == 1000.0).any():
            raise ValueError("a condition that raises")
        return reward >= 6.0

    def __repr__(self) -> str:
        return "HighReward()"  # in messages, which are compared


@dataclass(frozen=True)
class Variant:
    """A recipe and its options; see :data:`VARIANTS`."""

    recipe: str
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        options = (f"{name}={value.__name__ if callable(value) else repr(value)}" for name, value in self.options)
        return f"{self.recipe}({', '.join(options)})"

    @property
    def chosen(self) -> dict[str, Any]:
        return dict(self.options)

    @property
    def has_frames(self) -> bool:
        return "frame_stack" in self.chosen

    @property
    def n_steps(self) -> int:
        return self.chosen.get("n_steps", 1)

    @property
    def is_mixed(self) -> bool:
        return self.recipe in MIXING

    @property
    def is_ring(self) -> bool:
        """Whether the newest rows are held, as many as there is room for."""
        return self.recipe not in ("event_tables", "parallel_curriculum", "surprise_retention")

    @property
    def has_functions(self) -> bool:
        """Whether functions of the user see new rows, such as :class:`HighReward`."""
        return self.recipe in ("event_tables", "reverse_sweep") or "initial_surprise" in self.chosen

    @property
    def learns_surprise(self) -> bool:
        """Whether rows are kept by surprise and on-policyness."""
        return self.recipe == "surprise_retention" and "rule" not in self.chosen

    def build(self, capacity: int, batch_size: int, seed: int, memmap: Path | None = None) -> Replay:
        options = self.chosen | {"batch_size": batch_size, "seed": seed, "discount": DISCOUNT}
        if self.recipe == "parallel_curriculum":
            options |= {"tasks": TASKS, "capacity_per_task": capacity, "min_size": 1}
        else:
            options["capacity"] = capacity
        if self.recipe == "event_tables":
            tables = [
                EventTable("high", condition=HighReward(), history_length=3, capacity=8, min_size=1),
                EventTable("goal", condition=reward_at_least(7.0), history_length=1, capacity=5, min_size=1),
            ]
            options = {"tables": tables, "min_size": 1, "max_trajectories": 3, "forget_stale": True} | options
        if self.recipe in ("hindsight", "groups"):
            options = required_options(self.recipe, capacity) | options
        if self.recipe == "reverse_sweep":
            options["goal"] = HighReward()
        if "rule" in options:
            options["rule"] = options["rule"]()
        if options.pop("in_file", False):
            options["memmap"] = str(memmap)
        return recipes.by_name(self.recipe)(**options)

    def world(self, seed: int) -> World:
        tasks = len(TASKS) if self.recipe == "parallel_curriculum" else 0
        return World(seed, tasks=tasks, has_frames=self.has_frames, has_wrist="image_key" in self.chosen)


def _variants() -> list[Variant]:
    found = []

    def add(recipe: str, **options: Any) -> None:
        found.append(Variant(recipe, tuple(options.items())))

    for recipe in ROW_RECIPES:
        add(recipe)
        add(recipe, n_steps=3, prefetch=2)
        add(recipe, in_file=True)
    for recipe in ("uniform", "prioritized", "reverse_sweep", "event_tables", "parallel_curriculum"):
        add(recipe, frame_stack=2, frame_capacity=30, n_steps=3)
    add("surprise_retention", frame_stack=2, frame_capacity=30, n_steps=3)
    add("prioritized", frame_stack=2, image_key=["pixels", WRIST], frame_capacity=30, n_steps=3)
    for rule in (OldestLeaves, SmallestReturnLeaves, StochasticSurprise):
        add("surprise_retention", rule=rule, always_admit=rule is StochasticSurprise)
    for n_steps in (1, 3):
        add("surprise_retention", initial_surprise=rewards_as_surprise, always_admit=True, prefetch=1, n_steps=n_steps)
    for recipe in ("neighborhood_mixup", "event_tables", "parallel_curriculum"):
        add(recipe, priority_exponent=0.7, prefetch=1)
    add("neighborhood_mixup", priority_exponent=0.7, update_partners=True, n_steps=3)
    for correction in ("mixture", "continuous"):
        add("event_tables", correction=correction, n_steps=3)
    return found


def rewards_as_surprise(rows: TensorDictBase) -> Tensor:
    """The surprise of new rows; raises at a reward that no step of a :class:`World` has."""
    reward = rows["next", "reward"].flatten()
    if (reward >= 100.0).any():
        raise ValueError("an initial surprise that raises")
    return reward


VARIANTS = _variants()
