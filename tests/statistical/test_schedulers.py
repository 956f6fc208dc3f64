# SPDX-License-Identifier: Apache-2.0
"""Schedulers at work: they prefer what pays, give no task up, and keep EXP3's promise on regret."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_replay.schedulers import Exp3, Exp3S

TASKS = ["target", "far", "near", "goal_mouth"]
READY = np.ones(4, dtype=bool)


def play(scheduler: Exp3, pays: np.ndarray, rounds: int, seed: int) -> np.ndarray:
    """Rewards, 0 or 1, of a task drawn each round; float ``[rounds]``."""
    generator = np.random.default_rng(seed)
    paid = np.zeros(rounds)
    for number in range(rounds):
        probabilities = scheduler.probabilities(READY)
        task = int(generator.choice(4, p=probabilities))
        scheduler.drawn(task, probabilities[task])
        paid[number] = float(generator.random() < pays[task])
        scheduler.progress(task, paid[number])
    return paid


@pytest.mark.slow
def test_the_gain_of_exp3_is_within_its_bound() -> None:
    """Auer et al. 2002, theorem 3.1: expected regret at most (e - 1) γ best + N ln N / γ; here of 10 runs."""
    pays, rounds, exploration = np.array([0.1, 0.2, 0.3, 0.7]), 3_000, 0.1
    regrets = []
    for seed in range(10):
        scheduler = Exp3(exploration)
        scheduler.start(TASKS)
        regrets.append(rounds * pays.max() - play(scheduler, pays, rounds, seed).sum())
    bound = (math.e - 1) * exploration * rounds * pays.max() + 4 * math.log(4) / exploration
    assert np.mean(regrets) < bound
    assert scheduler.probabilities(READY).argmax() == 3


def test_the_estimate_of_the_profit_is_unbiased() -> None:
    """A task's log weight grows by γ r / N a round on average, however rarely it is drawn."""
    exploration, rounds, profit = 0.3, 8_000, np.array([0.2, 0.4, 0.6, 0.8])
    generator = np.random.default_rng(0)
    growth = np.zeros(4)
    scheduler = Exp3(exploration)
    scheduler.start(TASKS)
    scheduler.log_weights = np.log([0.1, 0.2, 0.3, 0.4])
    probabilities, before = scheduler.probabilities(READY), scheduler.log_weights.copy()
    drawn = generator.choice(4, size=rounds, p=probabilities)
    for task in drawn.tolist():
        scheduler.log_weights = before.copy()
        scheduler.drawn(task, probabilities[task])
        scheduler.progress(task, profit[task])
        change = scheduler.log_weights - before
        growth += change - change[task - 1]  # of the others nothing changes but the constant in common
    expected = exploration * profit / 4
    error = exploration * profit / 4 * np.sqrt((1 / probabilities - 1) / rounds)
    assert (np.abs(growth / rounds - expected) < 5 * error).all()


@pytest.mark.parametrize("scheduler", [Exp3(0.2), Exp3S(0.2, 0.001)])
def test_the_task_that_pays_is_drawn_most_and_no_task_is_given_up(scheduler: Exp3) -> None:
    scheduler.start(TASKS)
    play(scheduler, np.array([0.0, 0.0, 1.0, 0.0]), 2_000, seed=1)
    probabilities = scheduler.probabilities(READY)
    assert probabilities[2] > 0.7 and probabilities.min() >= 0.05


def test_exp3s_turns_to_the_task_that_begins_to_pay() -> None:
    scheduler = Exp3S(0.2, 0.001)
    scheduler.start(TASKS)
    play(scheduler, np.array([0.0, 0.0, 1.0, 0.0]), 3_000, seed=2)
    play(scheduler, np.array([1.0, 0.0, 0.0, 0.0]), 500, seed=3)
    assert scheduler.probabilities(READY).argmax() == 0
