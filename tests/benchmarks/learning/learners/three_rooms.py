# SPDX-License-Identifier: Apache-2.0
"""Three rooms for learning with networks: one-hot observations, the walk to the first goal, events and replays."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import Replay, recipes
from lightning_replay.envs.grids import TabularGrid as RoomGrid
from lightning_replay.envs.grids import ThreeRooms
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.transforms.shaping import OneAt, PotentialShaping
from tests.benchmarks.learning.learners.grids import state_of
from tests.benchmarks.learning.learners.stacked_dqn import flat
from tests.benchmarks.learning.recorder import Recorder

WIDTH, HEIGHT = len(ThreeRooms.MAP[0]), len(ThreeRooms.MAP)
NUM_ACTIONS = 3
NEAR_OPTIMAL_STEPS, GREEDY_LIMIT = 26, 100
# Each state by its number, 4 * (HEIGHT * x + y) + direction: x, y and direction as one-hot vectors side by side
PLACES = [(x, y, direction) for x in range(WIDTH) for y in range(HEIGHT) for direction in range(4)]
COLUMNS = zip((WIDTH, HEIGHT, 4), zip(*PLACES, strict=True), strict=True)
ONE_HOT = torch.cat([torch.eye(size)[list(column)] for size, column in COLUMNS], 1)
COORDINATES = torch.tensor([[x / (WIDTH - 1), y / (HEIGHT - 1), *torch.eye(4)[d]] for x, y, d in PLACES])
STATE_OF_ONE_HOT = torch.cat([4.0 * HEIGHT * torch.arange(WIDTH), 4.0 * torch.arange(HEIGHT), torch.arange(4.0)])
GOAL_DISTANCE = torch.cat(
    [(torch.arange(size) - at).abs() for size, at in zip((WIDTH, HEIGHT), ThreeRooms.GOAL, strict=True)]
).float()


def coordinates(observation: Tensor) -> Tensor:
    """Returns x and y in [0, 1] and the direction as a one-hot vector, ``[..., 6]``, of observations ``[..., 28]``."""
    return COORDINATES[(observation @ STATE_OF_ONE_HOT).long()]


# By name, how many inputs of a network there are, and what makes them of observations.
INPUTS = {"one-hot": (ONE_HOT.shape[1], flat), "coordinates": (COORDINATES.shape[1], coordinates)}


def in_a_gap(steps: TensorDict) -> Tensor:
    """Whether the agent entered a gap, the only floor in a wall's column; bool ``[N]``."""
    observation = steps["next", "observation"]
    return observation[:, [x for x, _ in ThreeRooms.GAPS]].any(1)


def near_start(steps: TensorDict) -> Tensor:
    """Whether the agent entered the cell diagonally below the first; bool ``[N]``."""
    x, y = ThreeRooms.START
    observation = steps["next", "observation"]
    return observation[:, [x + 1, WIDTH + y + 1]].all(1)


def nearness(observation: Tensor) -> Tensor:
    """Returns a potential that falls by 0.05 with each cell of distance to the goal, ``[N]``."""
    return -0.05 * (observation[:, : WIDTH + HEIGHT] @ GOAL_DISTANCE)


GAP_CELL = [ThreeRooms.GAPS[0][0], WIDTH + ThreeRooms.GAPS[0][1]]
CONDITIONS = {"gap": in_a_gap, "goal": reward_at_least(1.0), "near start": near_start}
POTENTIALS = {"gap": OneAt(low=[1.0, 1.0], high=[1.0, 1.0], components=GAP_CELL), "distance": nearness}


def replay_of(settings: dict[str, Any], seed: int) -> Replay:
    """Returns the replay of an arm; ``batch_size`` rows are one draw."""
    capacity, batch_size = settings["capacity"], settings["batch_size"]
    if settings["replay"] == "uniform":
        return recipes.uniform(capacity, batch_size, seed=seed)
    if settings["replay"] == "prioritized":
        exponent = settings["importance_exponent"]
        return recipes.prioritized(capacity, batch_size, importance_exponent=exponent, seed=seed)
    if settings["replay"] == "shaping":
        transform = PotentialShaping(POTENTIALS[settings["potential"]], settings["discount"])
        return Replay(storage=PackedStorage(capacity), transform=transform, batch_size=batch_size, seed=seed)
    history, room, least = settings["history_length"], settings["table_capacity"], settings["table_min_size"]
    return recipes.event_tables(
        capacity,
        batch_size,
        tables=[
            EventTable(name, CONDITIONS[name], history, capacity=room, min_size=least) for name in settings["events"]
        ],
        correction=settings["correction"],
        priority_exponent=settings["priority_exponent"],
        importance_exponent=settings["importance_exponent"],
        seed=seed,
    )


@dataclass(frozen=True)
class Table:
    """Transition table of the environment, ``[S, A]``: faster than the environment, and steps many runs at once.

    Args:
        start: the first state.
        following: the state after the action.
        is_goal: whether the action leads to the goal, which is rewarded with 1 and ends the episode.
    """

    start: int
    following: np.ndarray
    is_goal: np.ndarray

    @classmethod
    def of(cls, env: RoomGrid) -> Table:
        """Returns the table of an environment, from every action in every state."""
        env.reset()
        start = state_of(env)
        following = np.zeros((len(PLACES), NUM_ACTIONS), dtype=np.int64)
        is_goal = np.zeros(following.shape, dtype=bool)
        for state, (x, y, direction) in enumerate(PLACES):
            for action in range(NUM_ACTIONS):
                env.agent_pos, env.agent_dir = (x, y), direction
                if 0 < x < WIDTH - 1 and 0 < y < HEIGHT - 1:
                    is_goal[state, action] = env.step(action)[2]
                following[state, action] = state_of(env)
        return cls(start, following, is_goal)

    def greedy_steps(self, action: np.ndarray, limit: int) -> np.ndarray:
        """Returns the steps ``[R]`` to the goal of R policies, actions ``[R, S]``; ``limit`` if it is not reached."""
        runs = np.arange(len(action))
        state, taken, is_there = np.full(len(runs), self.start), np.full(len(runs), limit), np.zeros(len(runs), bool)
        for step in range(1, limit):
            chosen = action[runs, state]
            taken[self.is_goal[state, chosen] & ~is_there] = step
            is_there |= self.is_goal[state, chosen]
            state = self.following[state, chosen]
        return taken

    def walk_to_goal(self, seed: int, episode_steps: int) -> TensorDict:
        """Returns steps ``[N]`` of random actions, the last of which is the first to reach the goal."""
        generator = random.Random(seed)
        states, actions, state = [], [], self.start
        while not states or not self.is_goal[states[-1], actions[-1]]:
            states.append(state)
            actions.append(generator.randrange(NUM_ACTIONS))
            state = int(self.following[state, actions[-1]]) if len(states) % episode_steps else self.start
        truncated = np.arange(1, len(states) + 1) % episode_steps == 0
        return self.steps_of(np.array(states), np.array(actions), truncated)

    def steps_of(self, state: np.ndarray, action: np.ndarray, truncated: np.ndarray) -> TensorDict:
        """Returns rows of a replay, in the shape of the arrays; a step to the goal is not truncated."""
        terminated = self.is_goal[state, action]
        ends = {"terminated": terminated, "truncated": truncated & ~terminated, "done": truncated | terminated}
        following = {name: torch.from_numpy(flag).unsqueeze(-1) for name, flag in ends.items()}
        following["observation"] = ONE_HOT[torch.from_numpy(self.following[state, action])]
        following["reward"] = following["terminated"].float()
        rows = {"observation": ONE_HOT[torch.from_numpy(state)], "action": torch.from_numpy(action), "next": following}
        # The data module numbers its episodes; a walk that has ended can have the number of its first one.
        rows["trajectory"] = torch.zeros(state.shape, dtype=torch.int64)
        return TensorDict(rows, state.shape)


def filled_replay(table: Table, settings: dict[str, Any], seed: int) -> tuple[Replay, int]:
    """Returns the replay of an arm with the walk to the first goal, and the steps of that walk."""
    replay, walk = replay_of(settings, seed), table.walk_to_goal(seed, settings["episode_steps"])
    for steps in walk.split(1_000):
        replay.extend(steps)
    return replay, len(walk)


class Checks:
    """Records greedy episodes of R runs at checks, and the first check at which each is near-optimal.

    Args:
        table: of the environment.
        out: takes ``greedy_return``, 1 where the goal is reached, and ``near_optimal``.
    """

    def __init__(self, table: Table, out: Recorder) -> None:
        self._table, self._out = table, out
        self._first = np.full(len(out.seeds), -1)

    def add(self, step: int, action: np.ndarray) -> None:
        """Plays the policies, actions ``[R, S]``, from the start."""
        taken = self._table.greedy_steps(action, GREEDY_LIMIT)
        is_near = taken <= NEAR_OPTIMAL_STEPS
        self._first = np.where((self._first < 0) & is_near, step, self._first)
        self._out.record(step, greedy_return=taken < GREEDY_LIMIT, near_optimal=is_near)

    def final(self, end: int) -> dict[str, np.ndarray]:
        """Returns the steps to the first near-optimal check, ``end`` without one, and whether there was one."""
        is_found = self._first >= 0
        return {"steps_to_near_optimal": np.where(is_found, self._first, end), "near_optimal": is_found}
