# SPDX-License-Identifier: Apache-2.0
"""Distributed Parallel Curriculum Experience Replay on half-field soccer: curricula against none.

    python tests/benchmarks/experiment_half_field.py --save                    # five seeds of three methods
    python tests/benchmarks/experiment_half_field.py --methods us drc --seeds 1
    python tests/benchmarks/experiment_half_field.py --fast

MP-DQN with a reward of 5 for a goal and none else; twelve environments in lock-step, two updates for each of their
steps. The measure was fixed before the runs: greedy success on every task at the end. Settings were chosen on seeds 100
and 101: held actions, time-outs that end an episode for good and falling learning rates each brought more greedy
success (policies that kick at nothing for ever became fewer). A process learns several runs side by side: their
networks are stacked, their buffers, environments and random numbers are apart.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes on two cores

import numpy as np
import torch
from curriculum_learning import FAST, Columns, Learner, LearningSettings
from curriculum_runs import Job, Runs, options
from stacked_networks import StackedNetwork, clip_gradients
from tensordict import TensorDict
from torchrl.objectives import SoftUpdate

from lightning_replay.agents import MPDQN
from lightning_replay.agents.multi_pass import MultiPassLoss
from lightning_replay.envs.half_field import GOAL_REWARD, HalfField

READ = ("observation", *(("action", key) for key in ("discrete", "parameters")))
READ += tuple(("next", key) for key in ("observation", "reward", "terminated"))


@dataclass(frozen=True)
class Settings(LearningSettings):
    """Of every run."""

    updates: int = 90_000
    updates_per_signal: int = 4_000
    frame_skip: int = 4
    n_steps: int = 3
    discount: float = 0.97
    time_outs_terminate: bool = True
    hidden_sizes: tuple[int, ...] = (128, 64)
    value_learning_rate: float = 1e-3
    parameter_learning_rate: float = 1e-4
    learning_rate_end: float = 0.05
    target_update_rate: float = 0.005
    gradient_clip: float = 1.0
    exploration_end: float = 0.1
    exploration_rounds: int = 3_000
    parameter_noise: float = 0.1


class SoccerLearner(Learner):
    """MP-DQN, the networks of all runs stacked."""

    def __init__(self, jobs: Sequence[tuple[str, int]], settings: Settings) -> None:
        make = functools.partial(HalfField, frame_skip=settings.frame_skip)
        super().__init__(jobs, make, HalfField.TASKS, GOAL_REWARD, settings)
        self.settings: Settings = settings
        one = self.field.environments[0]
        spaces = MPDQN.sizes_from(one.observation_space, one.action_space)
        size, total = spaces.pop("observation_size"), sum(spaces["parameter_sizes"])
        seeds, hidden = [run.seed for run in self.runs], settings.hidden_sizes
        networks = (
            StackedNetwork([size + total, *hidden, len(spaces["parameter_sizes"])], seeds),
            StackedNetwork([size, *hidden, total], seeds),
        )
        self.loss = MultiPassLoss(
            *networks, **spaces, discount=settings.discount, target_low=0.0, target_high=GOAL_REWARD
        )
        self.targets = SoftUpdate(self.loss, tau=settings.target_update_rate)
        self.networks = [list(network.parameters()) for network in networks]
        rates = (settings.value_learning_rate, settings.parameter_learning_rate)
        self.optimizers = [
            torch.optim.Adam(each, lr=rate, fused=True) for each, rate in zip(self.networks, rates, strict=True)
        ]
        self.decays = [
            torch.optim.lr_scheduler.LinearLR(each, 1.0, settings.learning_rate_end, settings.updates)
            for each in self.optimizers
        ]

    def act(self, observations: np.ndarray, explore: bool) -> Columns:
        """The most valuable action; exploring, its parameters shaken or, by chance, a random one."""
        with torch.no_grad():
            greedy, scaled = self.loss.policy(torch.from_numpy(observations))
            discrete, parameters = greedy.numpy(), self.loss.unscaled(scaled).numpy()
        if explore:
            done = min(1.0, self.rounds_played / self.settings.exploration_rounds)
            rate = 1.0 + (self.settings.exploration_end - 1.0) * done
            low, high = self.loss.low.numpy(), self.loss.high.numpy()
            spread = self.settings.parameter_noise * (high - low) / 2
            for number, run in enumerate(self.runs):
                part = self.rows_of(number)
                parameters[part] += spread * run.random.standard_normal(parameters[part].shape)
                own = np.flatnonzero(run.random.random(self.settings.environments) < rate) + part.start
                discrete[own] = run.random.integers(len(self.loss.masks), size=len(own))
                parameters[own] = run.random.uniform(low, high, (len(own), len(low)))
            parameters = parameters.clip(low, high)
        return {"discrete": discrete, "parameters": parameters}

    def actions(self, columns: Columns) -> list[Any]:
        """The choice, then the parameters of dash, turn and kick."""
        pairs = zip(columns["discrete"].tolist(), columns["parameters"], strict=True)
        return [(choice, joint[:2], joint[2:3], joint[3:]) for choice, joint in pairs]

    def action(self, column: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Discrete action and joint parameters."""
        return {"discrete": column.pop("discrete"), "parameters": column.pop("parameters")}

    def update(self) -> None:
        """One update of every run."""
        batches = [run.replay.sample() for run in self.runs]
        # only what the loss reads, which costs less than joining whole batches
        read = (*READ, "discount") if self.settings.n_steps > 1 else READ
        column = {key: torch.cat([batch.get(key) for batch in batches]) for key in read}
        rows = self.loss(TensorDict(column, [len(column["observation"])]))
        # the sum over runs of the means of their rows: no gradient of a run depends on another's rows
        loss = (rows.get("loss_value") + rows.get("loss_parameters")).sum() / self.settings.batch_size
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for parameters, optimizer in zip(self.networks, self.optimizers, strict=True):
            clip_gradients(parameters, self.settings.gradient_clip)
            optimizer.step()
        for decay in self.decays:
            decay.step()
        self.targets.step()


def play(job: Job) -> list[dict[str, Any]]:
    """Some runs, side by side."""
    return SoccerLearner(job.runs, Settings(**job.settings)).play()


def main() -> None:
    """Plays the runs that are missing and prints the table."""
    chosen = options(str(__doc__).splitlines()[0], ["us", "exp3", "db"], seeds=5, together=8)
    settings = Settings(**FAST) if chosen.fast else Settings()
    runs = Runs("Half-field soccer, one player and no keeper", "half_field", HalfField.TASKS, asdict(settings))
    runs.carry_out(play, chosen)
    print(runs.report())


if __name__ == "__main__":
    main()
