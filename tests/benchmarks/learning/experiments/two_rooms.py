# SPDX-License-Identifier: Apache-2.0
"""Event tables in two rooms with a network: well and badly chosen events, and potential-based shaping."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives import SoftUpdate

from lightning_replay import recipes
from lightning_replay.agents import DQN
from lightning_replay.agents.off_policy import weighted_mean
from lightning_replay.envs.grids import TwoRooms
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.replay import Replay
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.transforms.shaping import ManhattanDistance, OneAt, PotentialShaping
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, last_of, mean_of
from tests.benchmarks.learning.learners.grids import Rows, greedy_steps, state_of
from tests.benchmarks.learning.recorder import Recorder

STEPS_PER_UPDATE, CHECK_EVERY = 4, 500
DISCOUNT, EXPLORATION = 0.99, 0.3
HEIGHT, WIDTH = len(TwoRooms.MAP), len(TwoRooms.MAP[0])
# Observations of all states by number, 4 * (HEIGHT * x + y) + direction, scaled to [0, 1] for the network
SCALE = torch.tensor([1 / (WIDTH - 1), 1 / (HEIGHT - 1), 1.0, 1.0, 1.0, 1.0])
STATES = torch.tensor(
    [
        [x, y, *(float(direction == d) for d in range(4))]
        for x in range(WIDTH)
        for y in range(HEIGHT)
        for direction in range(4)
    ]
)


def at_gap(steps: TensorDict) -> Tensor:
    """The agent came into the gap."""
    return steps["next", "observation"][:, 0] == TwoRooms.GAPS[0][0]


def near_start(steps: TensorDict) -> Tensor:
    """The agent came to the cell diagonally below the first."""
    x, y = TwoRooms.START
    observation = steps["next", "observation"]
    return (observation[:, 0] == x + 1) & (observation[:, 1] == y + 1)


CONDITIONS = {"gap": at_gap, "goal": reward_at_least(1.0), "near_start": near_start}
POTENTIALS = {
    "gap": OneAt(low=TwoRooms.GAPS[0], high=TwoRooms.GAPS[0], components=[0, 1]),
    "distance": ManhattanDistance(TwoRooms.GOAL, scale=0.05, components=[0, 1]),
}


def replay_of(settings: Settings, seed: int) -> Replay:
    """The replay of an arm: with event tables, with shaped rewards, or uniform."""
    capacity, batch_size = settings["capacity"], settings["batch_size"]
    if "events" in settings:
        history, room = settings["history_length"], settings["table_capacity"]
        tables = [EventTable(name, CONDITIONS[name], history, capacity=room) for name in settings["events"]]
        return recipes.event_tables(capacity, batch_size, tables=tables, seed=seed)
    if "potential" in settings:
        transform = PotentialShaping(POTENTIALS[settings["potential"]], DISCOUNT)
        return Replay(storage=PackedStorage(capacity), transform=transform, batch_size=batch_size, seed=seed)
    return recipes.uniform(capacity, batch_size, seed=seed)


class Learner:
    """Our double DQN's network and loss with a loop of their own, which costs less than a trainer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.agent = DQN(6, 3, hidden_sizes=(64, 64), learning_rate=1e-3, discount=DISCOUNT, target_update_rate=0.01)
        self._optimizer = self.agent.configure_optimizers()
        self._target_update = SoftUpdate(self.agent.loss, tau=0.01)
        self._generator = random.Random(seed)

    def explore(self, env: TwoRooms) -> int:
        """A random action now and then, else the best."""
        if self._generator.random() < EXPLORATION:
            return self._generator.randrange(3)
        return int(self.agent.act(STATES[state_of(env)] * SCALE, explore=False))

    def greedy(self) -> Callable[[int], int]:
        """The best action of each state, by number."""
        with torch.no_grad():
            return self.agent.act(STATES * SCALE, explore=False).tolist().__getitem__

    def learn(self, batch: TensorDict) -> None:
        """One update."""
        batch["observation"] *= SCALE
        batch["next", "observation"] *= SCALE
        loss = weighted_mean(self.agent.loss(batch)["loss"], batch)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._target_update.step()


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """The greedy episode at every check, and how many goals were reached on the way."""
    (seed,) = seeds
    env, judge = TwoRooms(max_steps=settings["episode_steps"]), TwoRooms()
    learner, replay, rows = Learner(seed), replay_of(settings, seed), Rows(STEPS_PER_UPDATE)
    observation, _ = env.reset()
    goals = 0
    for step in range(1, settings["env_steps"] + 1):
        action = learner.explore(env)
        following, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        rows.write((step - 1) % STEPS_PER_UPDATE, observation, action, following, reward, terminated, truncated, done)
        goals += terminated
        observation = env.reset()[0] if done else following
        if step % STEPS_PER_UPDATE == 0:
            replay.extend(rows.steps)
            if step >= settings["batch_size"]:
                learner.learn(replay.sample())
        if step % CHECK_EVERY == 0:
            out.record(step, greedy_return=[greedy_steps(learner.greedy(), judge) is not None], goals=[goals])


ARMS: dict[str, Settings] = {
    "uniform": {},
    "event tables: gap and goal": {"events": ["gap", "goal"]},
    "event table: goal": {"events": ["goal"]},
    "badly chosen: gap": {"events": ["gap"]},
    "badly chosen: near the start": {"events": ["near_start"]},
    "shaping: gap": {"potential": "gap"},
    "shaping: distance to the goal": {"potential": "distance"},
}

EXPERIMENTS = (
    Experiment(
        name="two-rooms",
        title="Two rooms, double DQN: event tables and shaping",
        claim="gap and goal, and the goal alone, are better than shaping, uniform draws and badly chosen events "
        "(Kompella et al. 2022, https://arxiv.org/abs/2211.00576).",
        task="Reward 1 at a goal 21 steps away; the library's double DQN with coordinates as inputs, an update of 32 "
        "rows every fourth step. Greedy returns are 1 where the greedy episode reaches the goal.",
        arms=ARMS,
        settings={
            "env_steps": 30_000,
            "episode_steps": 500,
            "capacity": 30_000,
            "table_capacity": 10_000,
            "history_length": 30,
            "batch_size": 32,
        },
        fast={"env_steps": 2_000},
        seeds=range(200, 205),
        pilot_seeds=(),
        measure=mean_of("greedy_return", "greedy return over the run", skip=0, digits=2),
        also=(
            last_of("greedy_return", 12, "in the last fifth", digits=2),
            last_of("goals", 1, "goals reached", digits=0),
        ),
        panels=(
            Panel("greedy_return", "greedy return", [arm for arm in ARMS if "shaping" not in arm], "event tables", 10),
            Panel("greedy_return", "greedy return", ["uniform", *(a for a in ARMS if "shaping" in a)], "shaping", 10),
        ),
        run=run,
        notes="Nobody learns enough here to tell the methods apart: coordinates as inputs and a quarter of an update "
        "per step are the causes, see the experiments on event tables with one-hot inputs.",
    ),
)
