# SPDX-License-Identifier: Apache-2.0
"""Event tables in three rooms with a table of values: steps from the first goal to a near-optimal policy."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from tensordict import TensorDict

from lightning_replay import recipes
from lightning_replay.envs.grids import ThreeRooms
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.replay import Replay
from lightning_replay.samplers.reverse_sweep import ReverseSweepSampler
from lightning_replay.storage.packed import PackedStorage
from tests.benchmarks.learning.experiment import Experiment, Measure, Panel, Settings, mean_of, steps_to
from tests.benchmarks.learning.learners.grids import greedy_steps, state_of
from tests.benchmarks.learning.learners.rows import Rows
from tests.benchmarks.learning.recorder import Recorder

STEPS_PER_UPDATE, CHECK_EVERY = 4, 250
DISCOUNT, LEARNING_RATE, EXPLORATION = 0.99, 0.1, 0.3
NEAR_OPTIMAL_STEPS = 26
HEIGHT = len(ThreeRooms.MAP)
NUM_STATES, NUM_ACTIONS = len(ThreeRooms.MAP[0]) * HEIGHT * 4, 3
STATE_OF_OBSERVATION = torch.tensor([HEIGHT * 4.0, 4.0, 0.0, 1.0, 2.0, 3.0])

Values = list[list[float]]


def in_a_gap(steps: TensorDict) -> torch.Tensor:
    """Whether the agent entered a gap, the only floor in a wall's column; bool ``[N]``."""
    x = steps["next", "observation"][:, 0]
    return (x == ThreeRooms.GAPS[0][0]) | (x == ThreeRooms.GAPS[1][0])


CONDITIONS = {"gap": in_a_gap, "goal": reward_at_least(1.0)}


def replay_of(settings: Settings, seed: int) -> Replay:
    """Returns the replay of an arm."""
    capacity, batch_size = settings["capacity"], settings["batch_size"]
    if settings["replay"] == "uniform":
        return recipes.uniform(capacity, batch_size, seed=seed)
    if settings["replay"] == "prioritized":
        return recipes.prioritized(capacity, batch_size, importance_exponent=0.0, seed=seed)
    if settings["replay"] == "reverse sweep":
        sampler = ReverseSweepSampler(reward_at_least(1.0), sweep_share=0.5)
        return Replay(storage=PackedStorage(capacity), sampler=sampler, batch_size=batch_size, seed=seed)
    history, room = settings["history_length"], settings["table_capacity"]
    return recipes.event_tables(
        capacity,
        batch_size,
        tables=[EventTable(name, CONDITIONS[name], history, capacity=room) for name in settings["events"]],
        priority_exponent=settings["priority_exponent"],
        importance_exponent=0.0,
        seed=seed,
    )


class DoubleQ:
    """Double Q-learning on two tables; values of a state as a list, which is quicker than an array of three.

    Rows of a batch are learned one after another, as in the method, and as a backward sweep requires.
    """

    def __init__(self, seed: int) -> None:
        self.first: Values = [[0.0] * NUM_ACTIONS for _ in range(NUM_STATES)]
        self.second: Values = [[0.0] * NUM_ACTIONS for _ in range(NUM_STATES)]
        # Two, so that what is learned from does not change the walk before there is anything to learn.
        self._walk, self._coins = random.Random(seed), random.Random(seed + 1_000_000)

    def explore(self, state: int) -> int:
        """Returns a random action with the probability of exploration, else one of the best, drawn among equals."""
        if self._walk.random() < EXPLORATION:
            return self._walk.randrange(NUM_ACTIONS)
        values = self._values(state)
        best = max(values)
        return self._walk.choice([action for action, value in enumerate(values) if value == best])

    def greedy(self, state: int) -> int:
        """Returns the first of the best actions."""
        values = self._values(state)
        return values.index(max(values))

    def learn(self, batch: TensorDict) -> list[float]:
        """Updates one of the two tables, drawn for each row; returns the TD errors."""
        states, following = states_of(batch["observation"]), states_of(batch["next", "observation"])
        columns = (batch["action"], batch["next", "reward"].flatten(), batch["next", "terminated"].flatten())
        weight = batch.get("priority_weight", None)
        weights = [1.0] * len(states) if weight is None else weight.tolist()
        coins = self._coins.getrandbits(len(states))
        errors = []
        rows = zip(states, following, *(column.tolist() for column in columns), weights, strict=True)
        for row, (state, next_state, action, target, terminated, weight) in enumerate(rows):
            chosen, other = (self.first, self.second) if coins >> row & 1 else (self.second, self.first)
            if not terminated:
                values = chosen[next_state]
                target += DISCOUNT * other[next_state][values.index(max(values))]
            error = target - chosen[state][action]
            chosen[state][action] += LEARNING_RATE * weight * error
            errors.append(error)
        return errors

    def _values(self, state: int) -> list[float]:
        return [a + b for a, b in zip(self.first[state], self.second[state], strict=True)]


def states_of(observation: torch.Tensor) -> list[int]:
    """Returns the number of each observed state: 4 * (7 x + y) + direction."""
    return (observation @ STATE_OF_OBSERVATION).long().tolist()


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the greedy episode at every check, and the steps from the first goal to the first near-optimal one.

    Without a near-optimal check, the steps to the end of the run are given, a lower bound; all of them without a goal.
    """
    (seed,) = seeds
    env, evaluation_env = ThreeRooms(max_steps=settings["episode_steps"]), ThreeRooms()
    agent, replay, rows = DoubleQ(seed), replay_of(settings, seed), Rows(STEPS_PER_UPDATE, (6,), torch.float32)
    observation, _ = env.reset()
    end = settings["env_steps"]
    first_goal, near_optimal = None, None
    for step in range(1, end + 1):
        action = agent.explore(state_of(env))
        following, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        rows.write((step - 1) % STEPS_PER_UPDATE, observation, action, following, reward, terminated, truncated, done)
        if terminated and first_goal is None:
            first_goal = step
        observation = env.reset()[0] if done else following
        if step % STEPS_PER_UPDATE == 0:
            replay.extend(rows.steps)
            if step >= settings["batch_size"]:
                batch = replay.sample()
                errors = agent.learn(batch)
                if replay.is_prioritized:
                    replay.update_priority(batch["index"], torch.tensor(errors), generation=batch["generation"])
        if step % CHECK_EVERY == 0:
            steps = greedy_steps(agent.greedy, evaluation_env)
            if near_optimal is None and steps is not None and steps <= NEAR_OPTIMAL_STEPS:
                near_optimal = step
            out.record(step, greedy_return=[steps is not None])
    taken = (near_optimal or end) - (first_goal or 0)
    out.final(steps_to_near_optimal=[taken], near_optimal=[near_optimal is not None], first_goal=[first_goal or end])


EVENTS = {"replay": "event tables", "events": ["gap", "goal"], "history_length": 200, "priority_exponent": 0.0}
MAIN = ("uniform", "event tables: gap and goal")
VARIANTS = ("event tables: gap and goal, history 1", "event table: goal, history 1", "event tables with priorities")
DRAWS = ("event table: goal", "prioritized", "reverse sweep")

EXPERIMENTS = (
    Experiment(
        name="rooms",
        title="Three rooms, tabular double Q-learning: event tables",
        claim="drawing from tables of the steps that led to events needs about half of the steps of uniform draws, and "
        "a history of one step is not enough (Kompella et al. 2022, https://arxiv.org/abs/2211.00576). A mechanism "
        "experiment, not the headline.",
        task="Reward 1 at a goal 23 steps away; 16 rows every 4 steps. Before the first goal all values are 0, so that "
        "all arms of one seed walk alike until then. A policy is near-optimal when the greedy episode from the start "
        "reaches the goal within 26 steps, which is checked every 250 steps; a run that never got there counts with "
        "the steps to its end, a lower bound, and where that is half of the runs or more, so does the median. Events "
        "and priorities are not corrected for, as nothing here is random. On pilot seeds an importance exponent of 0.4 "
        "was worse, and fewer uniform runs ended before they were near-optimal with episodes of 1,000 steps than with "
        "other limits.",
        length="{env_steps:,} steps",
        arms={
            "uniform": {"replay": "uniform"},
            "event tables: gap and goal": EVENTS,
            "event table: goal": EVENTS | {"events": ["goal"]},
            "event tables: gap and goal, history 1": EVENTS | {"history_length": 1},
            "event table: goal, history 1": EVENTS | {"events": ["goal"], "history_length": 1},
            "prioritized": {"replay": "prioritized"},
            "event tables with priorities": EVENTS | {"priority_exponent": 0.6},
            "reverse sweep": {"replay": "reverse sweep"},
        },
        settings={
            "env_steps": 30_000,
            "episode_steps": 1_000,
            "capacity": 30_000,
            "table_capacity": 10_000,
            "batch_size": 16,
        },
        fast={"env_steps": 2_000},
        seeds=range(100, 132),
        pilot_seeds=(*range(16), *range(1_000, 1_016)),
        measure=steps_to("steps_to_near_optimal", "steps from the first goal to near-optimal"),
        also=(
            mean_of("greedy_return", "greedy return over the run", skip=0),
            Measure("share near-optimal in the end", lambda run: run.final["near_optimal"], digits=2),
        ),
        comparisons=(
            *((arm, "uniform") for arm in (MAIN[1], *DRAWS, *VARIANTS)),
            ("event tables with priorities", "event tables: gap and goal"),
        ),
        panels=(
            Panel("greedy_return", "greedy return (1: goal reached)", (*MAIN, *DRAWS), "tables and other draws"),
            Panel("greedy_return", "greedy return (1: goal reached)", (*MAIN, *VARIANTS), "variants of event tables"),
        ),
        run=run,
    ),
)
