# SPDX-License-Identifier: Apache-2.0
"""Event tables in two rooms with a network: well and badly chosen events, and potential-based shaping.

    python tests/benchmarks/experiment_two_rooms.py --save          # five seeds, about 15 minutes in two processes
    python tests/benchmarks/experiment_two_rooms.py --fast          # one seed, fewer steps: does it run?

As the SSET paper (Kompella et al. 2022, https://arxiv.org/abs/2211.00576) varies the events: the gap between the rooms
and the goal, the goal alone, and two bad choices, the gap alone and a place beside the start. Reward 1 at the goal, 21
steps away at best; the double DQN of this library, an update of 32 rows every fourth step. Shaping adds the potential
of the gap, or of the distance to the goal, to uniformly drawn rewards.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment_grids import greedy_steps, state_of
from experiment_pictures import block_means, draw_panels
from experiment_rows import Rows
from experiment_runs import Plan, run_experiment
from experiment_tables import Runs, markdown_table, run_all, standard_error, with_error
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives import SoftUpdate

from lightning_replay import recipes
from lightning_replay.agents import DQN
from lightning_replay.agents.off_policy import weighted_mean
from lightning_replay.envs.grids import TwoRooms
from lightning_replay.events import ConditionLike, EventTable, reward_at_least
from lightning_replay.replay import Replay
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.transforms.shaping import ManhattanDistance, OneAt, PotentialShaping

FIRST_SEED = 200
ENV_STEPS, EPISODE_STEPS = 30_000, 500
CAPACITY, TABLE_CAPACITY, HISTORY_LENGTH = 30_000, 10_000, 30
BATCH_SIZE, STEPS_PER_UPDATE, CHECK_EVERY = 32, 4, 500
CHECKS_PER_POINT = 10  # of the picture
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


def event_tables(**conditions: ConditionLike) -> Callable[[int], Replay]:
    """Half of each batch from the default table, the other half from tables of these events in equal parts."""

    def build(seed: int) -> Replay:
        tables = [
            EventTable(name, condition, HISTORY_LENGTH, capacity=TABLE_CAPACITY)
            for name, condition in conditions.items()
        ]
        return recipes.event_tables(CAPACITY, BATCH_SIZE, tables=tables, seed=seed)

    return build


def shaped(potential: Callable[[Tensor], Tensor]) -> Callable[[int], Replay]:
    """Uniform draws whose rewards are shaped."""
    transform = PotentialShaping(potential, DISCOUNT)
    return lambda seed: Replay(
        storage=PackedStorage(CAPACITY), transform=transform.clone(), batch_size=BATCH_SIZE, seed=seed
    )


METHODS: dict[str, Callable[[int], Replay]] = {
    "uniform": lambda seed: recipes.uniform(CAPACITY, BATCH_SIZE, seed=seed),
    "SSET: gap and goal": event_tables(gap=at_gap, goal=reward_at_least(1.0)),
    "SSET: goal only": event_tables(goal=reward_at_least(1.0)),
    "SSET, badly chosen: gap only": event_tables(gap=at_gap),
    "SSET, badly chosen: near the start": event_tables(near_start=near_start),
    "shaping: gap": shaped(OneAt(low=TwoRooms.GAPS[0], high=TwoRooms.GAPS[0], components=[0, 1])),
    "shaping: distance to the goal": shaped(ManhattanDistance(TwoRooms.GOAL, scale=0.05, components=[0, 1])),
}


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


def train(method: str, seed: int, env_steps: int) -> dict[str, Any]:
    """One run: goals reached on the way, the steps of the greedy episode at every check, and the seconds it took."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    env, judge = TwoRooms(max_steps=EPISODE_STEPS), TwoRooms()
    learner, replay, rows = Learner(seed), METHODS[method](seed), Rows(STEPS_PER_UPDATE)
    observation, _ = env.reset()
    goals: list[int] = []
    greedy: list[int | None] = []
    for step in range(env_steps):
        action = learner.explore(env)
        following, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        rows.write(step % STEPS_PER_UPDATE, observation, action, following, reward, terminated, truncated, done)
        if terminated:
            goals.append(step + 1)
        observation = env.reset()[0] if done else following
        if (step + 1) % STEPS_PER_UPDATE == 0:
            replay.extend(rows.steps)
            if step + 1 >= BATCH_SIZE:
                learner.learn(replay.sample())
        if (step + 1) % CHECK_EVERY == 0:
            greedy.append(greedy_steps(learner.greedy(), judge))
    return {"goals": goals, "greedy_steps": greedy, "seconds": time.perf_counter() - started}


def greedy_returns(runs: list[dict[str, Any]]) -> np.ndarray:
    """1 where the greedy episode reached the goal, ``[seeds, checks]``."""
    return np.array([[steps is not None for steps in run["greedy_steps"]] for run in runs], dtype=np.float64)


def page_of(runs: Runs, seeds: range, env_steps: int, minutes: float) -> str:
    """What was seen, as Markdown."""
    header = [
        "method",
        "mean greedy return",
        "in the last fifth",
        "by seed",
        "first goal, by seed",
        "goals",
        "s per run",
    ]
    rows = []
    for method, of_method in runs.items():
        returns = greedy_returns(of_method)
        areas, ends = returns.mean(1), returns[:, -max(1, returns.shape[1] // 5) :].mean(1)
        goals = [len(run["goals"]) for run in of_method]
        rows.append(
            [
                method,
                with_error(float(areas.mean()), standard_error(areas), 2),
                with_error(float(ends.mean()), standard_error(ends), 2),
                " ".join(f"{area:.2f}" for area in areas),
                " ".join(str(run["goals"][0]) if run["goals"] else "none" for run in of_method),
                with_error(float(np.mean(goals)), standard_error(goals), 0),
                f"{np.mean([run['seconds'] for run in of_method]):.1f}",
            ]
        )
    return "\n\n".join(
        [
            "# Two rooms, double DQN",
            f"Seeds {seeds[0]} to {seeds[-1]}, {env_steps:,} steps each, {minutes:.0f} minutes in two processes. "
            "± is one standard error over seeds. The greedy return is 1 where the greedy episode reaches the goal, "
            f"averaged over the checks of a run, one every {CHECK_EVERY} steps. Goals are those of exploring episodes.",
            markdown_table(header, rows),
        ]
    )


def draw_runs(content: dict[str, Any], path: Path) -> None:
    """Greedy returns over the environment steps, means of ten checks: well chosen events, and the other ways."""
    checks = range(CHECK_EVERY, content["env_steps"] + 1, CHECK_EVERY)
    size = min(CHECKS_PER_POINT, len(checks))
    curves = {}
    for method, runs in content["runs"].items():
        curves[method], at = block_means(greedy_returns(runs), checks, size)
    shaping = [method for method in curves if method.startswith("shaping")]
    panels = {
        "event tables": {name: curves[name] for name in curves if name not in shaping},
        "shaping": {name: curves[name] for name in ("uniform", *shaping)},
    }
    title, ylabel = "Two rooms, double DQN", f"greedy return over {size} checks"
    draw_panels(panels, at, path, title, "environment steps", ylabel, ylim=(-0.03, 1.03))


def plan(options: argparse.Namespace) -> Plan:
    """Returns what is run, with ``--fast`` for a short time."""
    env_steps = 2_000 if options.fast else ENV_STEPS
    return Plan(
        {"env_steps": env_steps},
        lambda seeds, kept: run_all(train, METHODS, seeds, env_steps, kept=kept),
        lambda runs, seeds, minutes: page_of(runs, seeds, env_steps, minutes),
    )


if __name__ == "__main__":
    fast = "one seed and 2,000 steps"
    run_experiment("two_rooms", __doc__, plan, draw_runs, seeds=5, first_seed=FIRST_SEED, fast=fast, fast_seeds=1)
