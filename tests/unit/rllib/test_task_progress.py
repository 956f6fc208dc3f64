# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

import rllib_ext
from lightning_replay.schedulers import EasyToHard, Exp3
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer

from .episodes import buffer_of, numbered

TASKS = ["target", "far", "near"]
MEAN = {"class_path": "lightning_replay.schedulers.MeanReturn", "init_args": {"low": 0.0, "high": 100.0, "every": 1}}


def curriculum(**options: Any) -> RecipeEpisodeReplayBuffer:
    given = {"tasks": TASKS, "capacity_per_task": 100, "scheduler": Exp3(0.3), "progress": MEAN, "seed": 0, **options}
    return buffer_of(rllib_ext.replay_config("parallel_curriculum", **given))


def of(task: str, name: str, length: int, **options: Any) -> SingleAgentEpisode:
    """Steps of an episode; the reward of step t is t."""
    episode = numbered(name, length, **options)
    episode.custom_data["task"] = task
    return episode


def signals(buffer: RecipeEpisodeReplayBuffer) -> dict[str, float]:
    progress = buffer.modules["default_policy"].task_progress
    assert progress is not None
    return progress.signals


def test_returns_are_summed_over_fragments_of_interleaved_runners() -> None:
    taught = curriculum()
    taught.add([of("far", "a", 4), of("near", "b", 3)])  # 0 to 3, 0 to 2
    assert signals(taught) == {}
    taught.add([of("near", "b", 2, start=3, lookback=1, terminated=True), of("far", "a", 3, start=4)])
    assert signals(taught) == {"near": 0.1}  # 0 + 1 + 2 + 3 + 4
    taught.add([of("near", "b", 2, start=3, lookback=1, terminated=True)])  # sent twice
    taught.add([of("far", "a", 4, start=6, truncated=True)])  # overlaps by a step: 0 to 9
    assert signals(taught) == {"near": 0.1, "far": 0.45}
    taught.add([of("near", "c", 11, terminated=True)])
    assert signals(taught)["near"] == (0.1 + 0.55) / 2


def test_episodes_with_a_hole_or_without_a_beginning_do_not_count() -> None:
    taught = curriculum()
    taught.add([of("far", "a", 4), of("near", "b", 3, start=2)])
    taught.add([of("far", "a", 4, start=6, terminated=True), of("near", "b", 3, start=5, terminated=True)])
    assert signals(taught) == {} and len(taught) == 14


def test_signals_reach_the_scheduler_once_each() -> None:
    taught = curriculum()
    taught.add([of(task, task, 20) for task in TASKS])
    for _ in range(60):  # each task is drawn
        taught.sample(num_items=8)
    before = taught.replay.probabilities()
    assert set(before.values()) == {1 / 3}
    taught.add(of("near", "near", 1, start=20, terminated=True))  # 210: clipped to 1
    weight = np.exp(0.3 * 1.0 / (1 / 3 * 3))
    expected = 0.7 * weight / (weight + 2) + 0.1
    assert taught.replay.probabilities()["near"] == pytest.approx(expected)
    taught.add(of("near", "running", 3))
    assert taught.replay.probabilities()["near"] == pytest.approx(expected)


def test_the_least_size_follows_the_batch() -> None:
    taught = curriculum()
    taught.add([of("target", "a", 10), of("far", "b", 19), of("near", "c", 20)])
    assert _tasks_drawn(taught, 20) == {"near"} and _tasks_drawn(taught, 15) == {"far", "near"}
    assert _tasks_drawn(taught, 50) == {"near"}  # nothing holds 50
    given = curriculum(min_size=10)
    given.add([of("target", "a", 10), of("far", "b", 9)])
    assert _tasks_drawn(given, 32) == {"target"}


def _tasks_drawn(buffer: RecipeEpisodeReplayBuffer, rows: int) -> set[str]:
    buffer.sample(num_items=rows)  # sets the least size
    return {buffer.replay.tasks[int(buffer.replay.sample(4)["task"][0])] for _ in range(40)}


def test_stages_move_all_actors() -> None:
    taught = curriculum(scheduler=EasyToHard(order=["near", "far", "target"], advance_at=0.5))
    assert taught.replay.actor_tasks(2) == [2, 2]
    taught.add(of("near", "a", 10, terminated=True))
    assert taught.replay.actor_tasks(2) == [2, 2]
    taught.add(of("near", "b", 12, terminated=True))
    assert taught.replay.actor_tasks(2) == [1, 1]


def test_figures_of_tasks() -> None:
    taught = curriculum()
    taught.add([of("near", "a", 5, terminated=True), of("near", "b", 6, terminated=True), of("far", "c", 6)])
    taught.sample(num_items=4)
    logger = MetricsLogger(root=True)
    logger.aggregate([taught.get_metrics()], key="replay_buffer")
    tasks, tables = (logger.peek(("replay_buffer", name)) for name in ("tasks", "tables"))
    assert [tasks[name]["num_episodes_lifetime"] for name in TASKS] == [0, 0, 2]
    assert tasks["near"]["progress"] == 0.125 and "progress" not in tasks["far"]
    assert sum(one["probability"] for one in tasks.values()) == pytest.approx(1) and not tasks["target"]["probability"]
    assert tables["near"]["size"] == 11 and tables["far"]["fill"] == 0.06 and tables["target"]["share_drawn"] == 0


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("uniform", {"capacity": 10, "progress": MEAN}, "progress is for the tasks of a curriculum"),
        ("parallel_curriculum", {"tasks": TASKS, "capacity": 9}, "has no option 'capacity'"),
        ("parallel_curriculum", {"tasks": TASKS}, "needs capacity_per_task, the most transitions kept"),
        (
            "parallel_curriculum",
            {"capacity_per_task": 9, "tasks": TASKS, "progress": {**MEAN, "init_args": {}}},
            "'low'",
        ),
    ],
)
def test_bad_curricula_are_refused_when_the_config_is_written(recipe: str, options: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        rllib_ext.replay_config(recipe, **options)
