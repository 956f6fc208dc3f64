# SPDX-License-Identifier: Apache-2.0
"""Distributed Parallel Curriculum Experience Replay on half-field soccer: curricula against none."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.objectives import SoftUpdate

from lightning_replay.agents import MPDQN
from lightning_replay.agents.multi_pass import MultiPassLoss
from lightning_replay.envs.half_field import GOAL_REWARD, HalfField
from tests.benchmarks.learning import experiment
from tests.benchmarks.learning.experiment import Experiment, Panel, last_of, mean_of
from tests.benchmarks.learning.learners.curriculum_learning import ARMS, FAST, Columns, Learner, LearningSettings
from tests.benchmarks.learning.learners.stacked_networks import StackedNetwork, clip_gradients
from tests.benchmarks.learning.recorder import Recorder

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


def run(settings: experiment.Settings, seeds: Sequence[int], out: Recorder) -> None:
    """The runs of one scheduler, stacked."""
    own = {name: value for name, value in settings.items() if name != "scheduler"}
    SoccerLearner([(settings["scheduler"], seed) for seed in seeds], Settings(**own)).play(out)


EXPERIMENTS = (
    Experiment(
        name="half-field",
        title="Half-field soccer, one player and no keeper: curricula",
        claim="with batches from several tasks the target is learned, without a curriculum it is not (Distributed "
        "Parallel Curriculum Experience Replay; 99.5 % goals in half-field offense).",
        task="MP-DQN with a reward of 5 for a goal and none else; twelve environments in lock-step, two updates for "
        "each of their steps. Greedy success on every task, the target being the farthest. Settings were chosen on the "
        "pilot seeds: held actions, time-outs that end an episode for good and falling learning rates each brought "
        "more greedy success (policies that kick at nothing for ever became fewer).",
        arms=ARMS,
        settings=asdict(Settings()),
        fast=FAST,
        seeds=range(5),
        pilot_seeds=(100, 101),
        measure=last_of("target", 1, "success on the target at the end", digits=2),
        also=(
            mean_of("target", "over the run", skip=0, digits=2),
            *(last_of(task, 1, f"{task} at the end", digits=2) for task in HalfField.TASKS[1:]),
        ),
        panels=[Panel(task, "greedy success", title=f"task {task}") for task in HalfField.TASKS],
        xlabel="updates",
        seeds_together=5,
        run=run,
    ),
)
