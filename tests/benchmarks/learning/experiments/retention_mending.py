# SPDX-License-Identifier: Apache-2.0
"""Retention that discounts surprise that training does not remove, on Breakout with and without sticky actions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay import Replay
from lightning_replay.retention.surprise import on_policyness, squared_td_error
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings
from tests.benchmarks.learning.experiments import retention
from tests.benchmarks.learning.experiments.retention import ALSO, FAST, PAPER, RETURN, SETTINGS, Retention
from tests.benchmarks.learning.learners.stacked_dqn import StackedDQN
from tests.benchmarks.learning.recorder import Recorder

_TINY = 1e-12  # surprise of 0 has a logarithm
_RAISED = 30.0  # so that no logarithm of a surprise is negative


class Draws:
    """Counts the draws of the row in each slot, and keeps the smallest surprise measured of it.

    Args:
        capacity: slots.
    """

    def __init__(self, capacity: int) -> None:
        self.count = np.zeros(capacity, dtype=np.int64)
        self.smallest = np.full(capacity, np.inf, dtype=np.float32)
        self._generation = np.full(capacity, -1, dtype=np.int64)

    def add(self, slots: np.ndarray, generation: np.ndarray, surprise: np.ndarray) -> None:
        """Counts a batch; the count of a slot of a new generation starts over."""
        new = slots[self._generation[slots] != generation]
        self.count[new], self.smallest[new] = 0, np.inf
        self._generation[slots] = generation
        np.add.at(self.count, slots, 1)
        self.smallest[slots] = np.minimum(self.smallest[slots], surprise)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns counts, smallest surprises and generations."""
        return {"count": self.count, "smallest": self.smallest, "generation": self._generation}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restores :meth:`state_dict`."""
        self.count, self.smallest, self._generation = state["count"], state["smallest"], state["generation"]


class MendedRetention(Retention):
    """The paper's product with a mended surprise, by ``mending`` and ``mending_rate`` (r) of the settings.

    * ``draws``: surprise * r ** draws of the row.
    * ``floor``: surprise - (1 - r ** draws) * smallest surprise measured of the row.
    * ``age``: surprise * exp(-age / r). Its logarithm plus the row's number / r has the same order at all times.
    """

    def __init__(self, settings: Settings, agent: StackedDQN) -> None:
        super().__init__(settings, agent)
        self._mending, self._rate = settings["mending"], settings["mending_rate"]
        self._draws: dict[int, Draws] = {}

    def prepare(self, run: int, replay: Replay) -> None:
        """Sets the function for the surprise of new rows."""
        super().prepare(run, replay)
        self._draws[run] = Draws(self._settings["capacity"])

    def surprise(self, run: int, rows: TensorDictBase) -> Tensor:
        """Returns the surprise ``[M]`` of new rows, which have not been drawn."""
        return self._dated(super().surprise(run, rows), rows)

    def feed(self, run: int, replay: Replay, batch: TensorDictBase, td_error: Tensor, values: Tensor) -> None:
        """Updates priorities by the TD errors, and retention by the mended product of surprise and on-policyness."""
        index, generation, surprise = batch["index"], batch["generation"], squared_td_error(td_error)
        slots, draws = index.numpy(), self._draws[run]
        draws.add(slots, generation.numpy(), surprise.numpy())
        if self._mending == "draws":
            surprise = surprise * self._fallen(draws.count[slots])
        elif self._mending == "floor":
            floor = (1.0 - self._fallen(draws.count[slots])) * torch.from_numpy(draws.smallest[slots])
            surprise = (surprise - floor).clamp_min(0.0)
        kept_by = self._dated(surprise * on_policyness(values, batch["action"]), batch)
        replay.update_priority(index, td_error, generation=generation, surprise=kept_by)

    def save(self, folder: Path) -> None:
        """Writes the draws of all runs."""
        torch.save({run: draws.state_dict() for run, draws in self._draws.items()}, folder / "draws.pt")

    def load(self, folder: Path) -> None:
        """Reads what :meth:`save` wrote."""
        for run, state in torch.load(folder / "draws.pt", weights_only=False).items():
            self._draws[run].load_state_dict(state)

    def _fallen(self, draws: np.ndarray) -> Tensor:
        return torch.from_numpy(self._rate**draws).float()

    def _dated(self, surprise: Tensor, rows: TensorDictBase) -> Tensor:
        if self._mending != "age":
            return surprise
        return (surprise + _TINY).log() + rows["number"].flatten() / self._rate + _RAISED


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records what ``retention-breakout`` records."""
    retention.run(settings, seeds, out, MendedRetention if settings["mending"] else Retention)


def mended(mending: str, rate: float) -> Settings:
    """Returns the settings of an arm."""
    return {"rule": "SurpriseOnly", "mending": mending, "mending_rate": rate}


ARMS: dict[str, Settings] = {
    "FIFO": {},
    "retention": {"rule": "SurpriseOnPolicyness"},
    "retention, draws 0.9": mended("draws", 0.9),
}
PLAIN = SETTINGS | {"mending": None, "mending_rate": 0.0}
STICKY = PLAIN | {"sticky_action_probability": 0.1, "n_steps": 5}
COMPARISONS = (
    ("retention, draws 0.9", "retention"),
    ("retention, draws 0.9", "FIFO"),
    ("retention", "FIFO"),
)
PANELS = (
    Panel("episode_return", "mean return of the last 50 episodes"),
    Panel("age", "mean age of kept rows"),
    Panel("terminal_share", "share of kept rows that end an episode"),
)
CLAIM = (
    "of no paper: surprise that is multiplied by 0.9 for every time the row was drawn and learned from is that which "
    "training has not had the chance to remove. The rule without this is the paper's: " + PAPER
)
TASK = (
    "retention, draws 0.9 multiplies the paper's product, surprise times on-policyness, by 0.9 ** draws of the row. "
    "Pilot seeds, with sticky actions alone, chose it among three, each with one setting: it, the surprise less "
    "(1 - 0.9 ** draws) of the smallest measured of the row, and the surprise times exp(-age / 500). Fixed before "
    "these seeds: it becomes a rule of the library if, by the primary measure, it is better than the paper's rule with "
    "sticky actions and worse than FIFO neither with nor without them."
)


def mended_experiment(name: str, title: str, settings: Settings, base: str) -> Experiment:
    """Returns the experiment with these settings, those of the experiment ``base``."""
    return Experiment(
        name=name,
        title=f"MinAtar's Breakout {title}: surprise discounted by draws",
        claim=CLAIM,
        task=f"The setting of `{base}`. {TASK}",
        length="{env_steps:,} steps",
        arms=ARMS,
        settings=settings,
        fast=FAST,
        seeds=range(2_600, 2_620),
        pilot_seeds=range(4),
        measure=RETURN,
        also=ALSO,
        comparisons=COMPARISONS,
        panels=PANELS,
        run=run,
        seeds_together=10,
    )


EXPERIMENTS = (
    mended_experiment(
        "mended-retention-sticky", "with sticky actions and returns of five steps", STICKY, "retention-sticky"
    ),
    mended_experiment("mended-retention", "without sticky actions", PLAIN, "retention-breakout"),
)
