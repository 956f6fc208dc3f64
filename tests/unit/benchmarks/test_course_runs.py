# SPDX-License-Identifier: Apache-2.0
"""What the experiments on the obstacle course rest on: inputs, rows with events, independent runs, checks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_replay.envs.obstacle_course import ObstacleCourse
from tests.benchmarks.learning.experiments.obstacle_course import EVENTS, SETTINGS, SKILLS, forgotten
from tests.benchmarks.learning.learners.course_runs import Checks, CourseRuns, OneHot, agent_of
from tests.benchmarks.learning.recorder import SeedRun

SMALL = SETTINGS | EVENTS | {"most_walked": 2_000, "capacity": 4_000, "table_capacity": 300, "history_length": 5}
SMALL |= {"events": ["spikes", "gap", "key"]}  # those that a walk of 2,000 steps meets; of others there is a warning


def test_inputs_are_the_one_hot_observations_of_the_environment() -> None:
    plain, vectors, generator = ObstacleCourse(), ObstacleCourse(one_hot=True), np.random.default_rng(0)
    seen = [[env.reset(seed=level)[0] for env in (plain, vectors)] for level in range(5)]
    for action in generator.integers(6, size=40).tolist():
        seen.append([env.step(action)[0] for env in (plain, vectors)])
    observations, expected = (torch.from_numpy(np.stack(column)) for column in zip(*seen, strict=True))
    assert torch.equal(OneHot(plain)(observations.unsqueeze(0))[0], expected)


def test_rows_follow_one_another_and_tables_hold_what_led_to_their_events() -> None:
    runs = CourseRuns(SMALL, (3, 4))
    walked = runs.walk_to_goal(2_000)
    assert (walked <= 2_048).all()
    replay = runs.replays[0]
    rows = replay.table("default")
    ends = rows["next", "done"].flatten()[:-1]
    following, observation = rows["next", "observation"][:-1], rows["observation"][1:]
    assert torch.equal(following[~ends], observation[~ends]) and 0 < int(ends.sum()) < len(rows) / 10
    assert torch.equal(rows["next", "terminated"].flatten(), rows["next", "goal"].flatten())  # no lava here
    for event in ("spikes", "gap", "key"):
        happened = rows["next", event].flatten()
        led = happened.clone()
        for back in range(1, 5):  # histories of five steps, the event's own included
            same = torch.stack([~rows["next", "done"].flatten()[i : len(rows) - back + i] for i in range(back)]).all(0)
            led[: len(rows) - back] |= happened[back:] & same
        assert len(replay.table(event)) == min(300, int(led.sum())) and happened.any()


def test_a_run_is_the_same_alone_and_beside_others() -> None:
    settings = SMALL | {"steps_per_draw": 4, "updates_per_draw": 2, "batch_size": 16}
    weights = []
    for seeds in ((3, 4), (4,)):
        runs = CourseRuns(settings, seeds)
        runs.walk_to_goal(1_500)
        runs.play(24)
        assert runs.env_steps == 24
        weights.append([parameter[-1] for parameter in runs.agent.online])
    for ours, alone in zip(*weights, strict=True):
        torch.testing.assert_close(ours, alone)


def test_policies_are_tested_on_the_same_levels_from_the_start_that_is_given() -> None:
    settings = SMALL | SKILLS | {"check_episodes": 12, "check_steps": 30}
    agent = agent_of(settings, (0, 0, 1))
    checks = Checks(settings, 3)
    goals, returns, difficulty = checks.play(agent)
    grids = [course.grid.encode().tolist() for course in checks.courses]
    assert grids[:12] == grids[12:24] and len({str(grid) for grid in grids[:12]}) > 6
    assert goals.shape == returns.shape == (3, 12) and set(difficulty) == {0, 1, 2}
    assert np.array_equal(returns[0], returns[1])  # equal weights, levels and random actions
    shifted = Checks(SMALL | {"check_episodes": 2, "check_steps": 1}, 1, start=(1, 4))
    assert all(course.start == (1, 4) for course in shifted.courses)


def test_what_is_forgotten_is_the_fall_from_the_best_four_checks_to_the_last_four() -> None:
    shares = [0.0, 0.2, 0.4, 0.6, 0.8, 0.4, 0.0, 0.0]
    assert forgotten(SeedRun([], {"shifted": np.array(shares)}, {})) == pytest.approx(0.55 - 0.3)
