# SPDX-License-Identifier: Apache-2.0
"""Event tables in three rooms with a table of values: how soon after the first goal is the way to it known?

    python tests/benchmarks/experiment_three_rooms.py --save        # 32 seeds, about 10 minutes in two processes
    python tests/benchmarks/experiment_three_rooms.py --fast        # two seeds, fewer steps: does it run?

The mechanism of SSET (Kompella et al. 2022, https://arxiv.org/abs/2211.00576), not its headline. Reward 1 at the goal,
23 steps away at best; tabular double Q-learning, 16 rows every 4 steps, from this library's buffers. Before the first
goal all values are 0, so that all methods of one seed walk alike until then; what differs is what happens after it.
Fixed before these seeds were run: a policy is near-optimal when the greedy episode from the start reaches the goal
within 26 steps; that is looked at every 250 steps. Episodes are cut after 1,000 steps: on pilot seeds (1000 to 1015)
fewer uniform runs ended before they got there than with other limits. Priorities are not corrected for
(importance_exponent 0): as for events, it is not needed where nothing is random. On pilot seeds it was worse with 0.4.
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
from experiment_pictures import draw_panels
from experiment_rows import Rows
from experiment_runs import Plan, run_experiment
from experiment_tables import (
    Runs,
    markdown_table,
    median_error,
    ratio_of_medians_error,
    run_all,
    standard_error,
    with_error,
)
from tensordict import TensorDict

from lightning_replay import recipes
from lightning_replay.envs.grids import ThreeRooms
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.replay import Replay
from lightning_replay.samplers.reverse_sweep import ReverseSweepSampler
from lightning_replay.storage.packed import PackedStorage

FIRST_SEED = 100  # pilots used seeds 0 to 15 for the setting, 1000 to 1015 for the length of an episode
ENV_STEPS, EPISODE_STEPS = 30_000, 1_000
CAPACITY, TABLE_CAPACITY = 30_000, 10_000
BATCH_SIZE, STEPS_PER_UPDATE, CHECK_EVERY = 16, 4, 250
DISCOUNT, LEARNING_RATE, EXPLORATION = 0.99, 0.1, 0.3
NEAR_OPTIMAL_STEPS = 26
ACCEPTED_RATIO = 0.65
HEIGHT = len(ThreeRooms.MAP)
NUM_STATES, NUM_ACTIONS = len(ThreeRooms.MAP[0]) * HEIGHT * 4, 3
STATE_OF_OBSERVATION = torch.tensor([HEIGHT * 4.0, 4.0, 0.0, 1.0, 2.0, 3.0])

Values = list[list[float]]


def in_a_gap(steps: TensorDict) -> torch.Tensor:
    """The agent came into a wall's column, which is floor only in its gap."""
    x = steps["next", "observation"][:, 0]
    return (x == ThreeRooms.GAPS[0][0]) | (x == ThreeRooms.GAPS[1][0])


def event_tables(*names: str, history_length: int = 200, priority_exponent: float = 0.0) -> Callable[[int], Replay]:
    """Half of each batch from the default table, the other half from these tables in equal parts."""
    conditions = {"gap": in_a_gap, "goal": reward_at_least(1.0)}

    def build(seed: int) -> Replay:
        return recipes.event_tables(
            CAPACITY,
            BATCH_SIZE,
            tables=[EventTable(name, conditions[name], history_length, capacity=TABLE_CAPACITY) for name in names],
            priority_exponent=priority_exponent,
            importance_exponent=0.0,
            seed=seed,
        )

    return build


def reverse_sweep(seed: int) -> Replay:
    """Half of the batches go back along episodes that reached the goal."""
    sampler = ReverseSweepSampler(reward_at_least(1.0), sweep_share=0.5)
    return Replay(storage=PackedStorage(CAPACITY), sampler=sampler, batch_size=BATCH_SIZE, seed=seed)


METHODS: dict[str, Callable[[int], Replay]] = {
    "uniform": lambda seed: recipes.uniform(CAPACITY, BATCH_SIZE, seed=seed),
    "SSET: gap and goal": event_tables("gap", "goal"),
    "SSET: goal only": event_tables("goal"),
    "SSET: gap and goal, history 1": event_tables("gap", "goal", history_length=1),
    "reward partition: goal, history 1": event_tables("goal", history_length=1),
    "prioritized": lambda seed: recipes.prioritized(CAPACITY, BATCH_SIZE, importance_exponent=0.0, seed=seed),
    "SSET with priorities": event_tables("gap", "goal", priority_exponent=0.6),
    "reverse sweep": reverse_sweep,
}


class DoubleQ:
    """Double Q-learning on two tables; values of a state as a list, which is quicker than an array of three.

    Rows of a batch are learned one after another, as the method has it and as a sweep backwards needs.
    """

    def __init__(self, seed: int) -> None:
        self.first: Values = [[0.0] * NUM_ACTIONS for _ in range(NUM_STATES)]
        self.second: Values = [[0.0] * NUM_ACTIONS for _ in range(NUM_STATES)]
        # Two, so that what is learned from does not change the walk before there is anything to learn.
        self._walk, self._coins = random.Random(seed), random.Random(seed + 1_000_000)

    def explore(self, state: int) -> int:
        """A random action now and then, else one of the best, drawn where several are equal."""
        if self._walk.random() < EXPLORATION:
            return self._walk.randrange(NUM_ACTIONS)
        values = self._values(state)
        best = max(values)
        return self._walk.choice([action for action, value in enumerate(values) if value == best])

    def greedy(self, state: int) -> int:
        """The first of the best actions."""
        values = self._values(state)
        return values.index(max(values))

    def learn(self, batch: TensorDict) -> list[float]:
        """Updates one of the two tables, by chance, for each row; returns the TD errors."""
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
    """The number of each observed state: 4 * (7 x + y) + direction."""
    return (observation @ STATE_OF_OBSERVATION).long().tolist()


def train(method: str, seed: int, env_steps: int) -> dict[str, Any]:
    """One run: the step of the first goal, the steps of the greedy episode at every check, and the seconds it took."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    env, judge = ThreeRooms(max_steps=EPISODE_STEPS), ThreeRooms()
    agent, replay, rows = DoubleQ(seed), METHODS[method](seed), Rows(STEPS_PER_UPDATE)
    observation, _ = env.reset()
    first_goal = None
    greedy: list[int | None] = []
    for step in range(env_steps):
        action = agent.explore(state_of(env))
        following, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        rows.write(step % STEPS_PER_UPDATE, observation, action, following, reward, terminated, truncated, done)
        if terminated and first_goal is None:
            first_goal = step + 1
        observation = env.reset()[0] if done else following
        if (step + 1) % STEPS_PER_UPDATE == 0:
            replay.extend(rows.steps)
            if step + 1 >= BATCH_SIZE:
                batch = replay.sample()
                errors = agent.learn(batch)
                if replay.is_prioritized:
                    replay.update_priority(batch["index"], torch.tensor(errors), generation=batch["generation"])
        if (step + 1) % CHECK_EVERY == 0:
            greedy.append(greedy_steps(agent.greedy, judge))
    return {"first_goal": first_goal, "greedy_steps": greedy, "seconds": time.perf_counter() - started}


def steps_after_first_goal(run: dict[str, Any]) -> tuple[int, bool]:
    """Environment steps from the first goal to the first near-optimal check, and whether there was one.

    Without one the steps to the end of the run are given, a lower bound.
    """
    greedy = run["greedy_steps"]
    end = len(greedy) * CHECK_EVERY
    start = end if run["first_goal"] is None else run["first_goal"]
    for check, steps in enumerate(greedy, 1):
        if steps is not None and steps <= NEAR_OPTIMAL_STEPS:
            return check * CHECK_EVERY - start, True
    return end - start, False


def greedy_returns(runs: list[dict[str, Any]]) -> np.ndarray:
    """1 where the greedy episode reached the goal, ``[seeds, checks]``."""
    return np.array([[steps is not None for steps in run["greedy_steps"]] for run in runs], dtype=np.float64)


def summarise(runs: Runs, seeds: range) -> dict[str, dict[str, Any]]:
    """By method: median steps after the first goal, its ratio to uniform, mean greedy return, with standard errors."""
    steps = {method: [steps_after_first_goal(run) for run in of_method] for method, of_method in runs.items()}
    reference = [taken for taken, _ in steps["uniform"]]
    summary = {}
    for method, of_method in runs.items():
        taken = [number for number, _ in steps[method]]
        area = greedy_returns(of_method).mean(1)
        summary[method] = {
            "median": float(np.median(taken)),
            "median_error": median_error(taken),
            "ratio": float(np.median(taken) / np.median(reference)),
            "ratio_error": ratio_of_medians_error(taken, reference),
            "greedy_return": float(area.mean()),
            "greedy_return_error": standard_error(area),
            "never_near_optimal": [
                seed for seed, (_, reached) in zip(seeds, steps[method], strict=True) if not reached
            ],
            "sooner_than_uniform": sum(a < b for a, b in zip(taken, reference, strict=True)),
            "seconds": float(np.mean([run["seconds"] for run in of_method])),
        }
    return summary


def page_of(summary: dict[str, dict[str, Any]], seeds: range, env_steps: int, minutes: float) -> str:
    """What was seen, as Markdown."""
    header = [
        "method",
        "steps from first goal to near-optimal, median",
        "ratio to uniform",
        "mean greedy return",
        "never near-optimal",
        "sooner than uniform",
        "s per run",
    ]
    rows = [
        [
            method,
            with_error(seen["median"], seen["median_error"], 0),
            with_error(seen["ratio"], seen["ratio_error"], 2),
            with_error(seen["greedy_return"], seen["greedy_return_error"]),
            f"{len(seen['never_near_optimal'])} of {len(seeds)}",
            f"{seen['sooner_than_uniform']} of {len(seeds)}",
            f"{seen['seconds']:.1f}",
        ]
        for method, seen in summary.items()
    ]
    sset, shortest = summary["SSET: gap and goal"], summary["SSET: gap and goal, history 1"]
    verdict = "met" if sset["ratio"] <= ACCEPTED_RATIO else "not met"
    never = (f"{method}: {', '.join(map(str, seen['never_near_optimal']))}" for method, seen in summary.items())
    return "\n\n".join(
        [
            "# Three rooms, tabular double Q-learning",
            f"Seeds {seeds[0]} to {seeds[-1]}, {env_steps:,} steps each, {minutes:.0f} minutes in two processes. "
            "± is one standard error: of medians and their ratios from resampled seeds, of the mean greedy return over "
            "seeds. The greedy return is 1 where the greedy episode reaches the goal, averaged over all checks. "
            "A run that never got near-optimal counts with the steps to its end, a lower bound; where that is half of "
            "the runs or more, so is the median.",
            markdown_table(header, rows),
            f"SSET (gap and goal) over uniform: {with_error(sset['ratio'], sset['ratio_error'], 2)}; "
            f"at most {ACCEPTED_RATIO} was asked for: {verdict}. With a history of 1 step it is "
            f"{with_error(shortest['ratio'], shortest['ratio_error'], 2)}; more than 1 was expected.",
            "Seeds that never got near-optimal: " + "; ".join(never) + ".",
        ]
    )


def draw_runs(content: dict[str, Any], path: Path) -> None:
    """Greedy returns over the environment steps: what is drawn more often, and variants of event tables."""
    curves = {method: greedy_returns(runs) for method, runs in content["runs"].items()}
    variants = [method for method in curves if "history 1" in method or method == "SSET with priorities"]
    references = ["uniform", "SSET: gap and goal"]
    panels = {
        "event tables and other draws": {name: curves[name] for name in curves if name not in variants},
        "variants of event tables": {name: curves[name] for name in (*references, *variants)},
    }
    checks = range(CHECK_EVERY, content["env_steps"] + 1, CHECK_EVERY)
    title, ylabel = "Three rooms, tabular double Q-learning", "greedy return (1: goal reached)"
    draw_panels(panels, checks, path, title, "environment steps", ylabel, ylim=(-0.03, 1.03))


def plan(options: argparse.Namespace) -> Plan:
    """Returns what is run, with ``--fast`` for a short time."""
    env_steps = 4_000 if options.fast else ENV_STEPS
    return Plan(
        {"env_steps": env_steps},
        lambda seeds, kept: run_all(train, METHODS, seeds, env_steps, kept=kept),
        lambda runs, seeds, minutes: page_of(summarise(runs, seeds), seeds, env_steps, minutes),
        lambda runs, seeds: {"summary": summarise(runs, seeds)},
    )


if __name__ == "__main__":
    fast = "two seeds and 4,000 steps"
    run_experiment("three_rooms", __doc__, plan, draw_runs, seeds=32, first_seed=FIRST_SEED, fast=fast)
