# SPDX-License-Identifier: Apache-2.0
"""Every number, count, seed and flag of the core's classes, recipes and functions refuses what it is not."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest
import torch
from tensordict import TensorDict

import lightning_replay
from lightning_replay import events, levels, recipes, schedulers
from lightning_replay.agents.cagrad import ConflictAverseStep, conflict_averse_gradient
from lightning_replay.envs.atari import MinAtarGame, atari
from lightning_replay.envs.bit_flipping import BitFlipping
from lightning_replay.envs.grids import MultiRooms, ObstructedMazeGamut, ThreeRooms
from lightning_replay.envs.half_field import HalfField
from lightning_replay.envs.obstacle_course import ObstacleCourse
from lightning_replay.envs.point_maze import PointMazeTasks
from lightning_replay.inspection import compare as inspection
from lightning_replay.levels import scores
from lightning_replay.levels.environments import LevelWrapper, make_level_vector
from lightning_replay.neighbors import NeighborLists, SameActionLists
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.recipes import storage_for
from lightning_replay.samplers import TableShares
from lightning_replay.schedules import Linear, Schedule, checked_schedule
from lightning_replay.tables.tables import Tables
from lightning_replay.transforms import MixStates, OneAt, mixup_coefficients
from lightning_replay.writers import TaskTableWriter
from tests.recipe_options import required_options
from tests.wrong_options import WrongOption, assert_refused, by_option, options_of, wrong_options

HIGH = events.reward_at_least(1.0)
BUFFER: dict[str, Any] = {"storage": lightning_replay.PackedStorage(10), "batch_size": 1}
EVENT_TABLE = events.EventTable("goal", condition=HIGH, history_length=5, capacity=10)
COLUMNS = {name: torch.zeros(1) for name in ("reward", "state_value", "next_state_value")}
COLUMNS |= {name: torch.zeros(1, dtype=torch.bool) for name in ("terminated", "done")}
STEPS = TensorDict({"next": {"reward": torch.arange(4.0)}}, [4])

# What is needed to build them, of those that need something.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Age": {"half_life": 10.0},
    "AnyOf": {"conditions": [HIGH]},
    "Constant": {"value": 0.5},
    "CurriculumReplay": BUFFER,
    "Replay": BUFFER,
    "TableReplay": BUFFER,
    "ContinuousCorrectionSampler": {"event_share": 0.5},
    "EasyToHard": {"order": ["near"]},
    "Event": {"condition": HIGH},
    "EventTableWriter": {"capacity": 10, "event_tables": [EVENT_TABLE]},
    "EventTable": {"name": "goal", "condition": HIGH, "history_length": 5, "capacity": 10},
    "EveryOf": {"conditions": [HIGH]},
    "FirstInEpisode": {"condition": HIGH},
    "RaggedStorage": {"capacity": 10, "ragged": ["tokens"], "element_capacity": 30},
    "FrameStorage": {"capacity": 10, "frame_stack": 2, "frame_capacity": 30},
    "InfoKey": {"key": "solved"},
    "KeyInRegion": {"key": "observation", "low": 0.0},
    "GroupSampler": {"group_size": 2},
    "Linear": {"start": 0.4, "end": 1.0, "duration": 10},
    "ManhattanDistance": {"goal": [1.0]},
    "MeanReturn": {"low": 0.0, "high": 1.0},
    "MixedReplay": {"online": lightning_replay.Replay(**BUFFER), "offline": lightning_replay.Replay(**BUFFER)},
    "NStepTransitions": {"n_steps": 2, "discount": 0.9},
    "ObservationStorage": {"capacity": 10},
    "OneAt": {"low": [0.0], "high": [1.0]},
    "PackedStorage": {"capacity": 10},
    "PotentialShaping": {"potential": torch.sum, "discount": 0.9},
    "PrioritizedSampler": {"capacity": 10},
    "RecencySampler": {"capacity": 10, "age": {"half_life": 10.0}},
    "RelabelGoals": {"env": "BitFlipping-v0"},
    "Reestablished": {"condition": HIGH, "steps": 2},
    "ReturnChange": {"low": 0.0, "high": 1.0},
    "ReverseCurriculum": {"order": ["near"]},
    "ReverseSweepSampler": {"goal": HIGH},
    "RewardAtLeast": {"threshold": 1.0},
    "RewardBelow": {"threshold": 1.0},
    "ScheduledSampler": {"tasks": ["near"], "scheduler": schedulers.UniformTasks()},
    "SequenceSampler": {"length": 4},
    "Sustained": {"condition": HIGH, "steps": 2},
    "TableShares": {"table_shares": {"default": 1.0}},
    "TaskTableWriter": {"tasks": ["near"], "capacity_per_task": 10},
    "TerminalWithReward": {"at_least": 1.0},
}
ANY_SIGN = {"at_least", "end", "high", "initial_value", "low", "scale", "start", "step_reward", "threshold", "value"}
# By users; levels are tested with the level buffer.
NOT_GIVEN = {"count", "default_frame_capacity", "levels", "n_steps"}
# What others refuse, and Python where it is used; events are tested with conditions.
NOT_CHECKED = {"actors", "context", "events", "min_sizes", "next_level", "priority_key", "trust"}
OF_OTHERS = {
    "LevelWrapper": {"env"},
    "MultiRooms": {"render_mode"},
    "PriorityTree": {"ages", "has_places"},
    "ObstructedMazeGamut": {"render_mode"},
    "atari": {"render_mode"},
    "conflict_averse_gradient": {"rescale"},
    "inspect_buffers": {"observation_key"},
    "suggest_events": {"replay"},
}
# What is neither recorded nor a recipe.
OTHERS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (PriorityTree, {"capacity": 4}),
    (NeighborLists, {"capacity": 4, "num_neighbors": 1}),
    (SameActionLists, {"capacity": 4, "num_neighbors": 1}),
    (NeighborLists(4, 1).recall_at, {"k": 1}),
    (mixup_coefficients, {"concentration": 1.0, "count": 1, "generator": torch.Generator()}),
    (ConflictAverseStep, {"parameters": [torch.nn.Parameter(torch.zeros(1))]}),
    (conflict_averse_gradient, {"gradients": torch.zeros(2, 2), "c": 0.5}),
    (events.suggest_events, {"replay": STEPS}),
    (inspection.inspect_buffers, {"buffers": {}}),
    (storage_for, {"capacity": 10, "frame_stack": 2, "frame_capacity": 30}),
    (levels.LevelBuffer, {"capacity": 4}),
    (levels.LevelSampler, {}),
    (levels.LearningProgress, {}),
    (levels.Greedy, {}),
    (levels.tscl, {"levels": 4}),
    (levels.UniformLevels, {"levels": 4}),
    *((getattr(scores, name), {}) for name in ("L1ValueLoss", "PositiveValueLoss", "SignedGae", "OneStepTdError")),
    (scores.l1_value_loss, COLUMNS),
    (scores.gae, COLUMNS),
    (scores.generalized_advantages, COLUMNS | {"discount": 0.9, "gae_lambda": 0.9}),
    (HalfField, {}),
    (MultiRooms, {}),
    (ObstacleCourse, {}),
    (ObstructedMazeGamut, {"num_mazes": 3}),
    (PointMazeTasks, {}),
    (MinAtarGame, {"game": "breakout"}),
    (BitFlipping, {}),
    (ThreeRooms, {}),
    (atari, {"game": "Breakout"}),
    (LevelWrapper, {"env": gymnasium.make("CartPole-v1")}),
    (make_level_vector, {"env": "CartPole-v1", "num_envs": 1, "levels": levels.UniformLevels(4)}),
]


def recorded_classes() -> Iterator[type]:
    for module in pkgutil.walk_packages(lightning_replay.__path__, "lightning_replay."):
        for kind in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(kind) and kind.__module__ == module.name and "_record" in vars(kind):
                yield kind


def wrong() -> Iterator[WrongOption]:
    for kind in recorded_classes():
        yield from wrong_options(kind, ARGUMENTS.get(kind.__name__, {}), any_sign=ANY_SIGN, leave_out=NOT_CHECKED)
    for name, recipe in recipes.known().items():
        stack = {"frame_stack": 2} if "frame_stack" in options_of(recipe) else {}  # frame_capacity needs it
        yield from wrong_options(recipe, required_options(name, 100) | {"batch_size": 1} | stack)
    for owner, arguments in OTHERS:
        left_out = NOT_GIVEN | NOT_CHECKED | OF_OTHERS.get(owner.__name__, set())
        yield from wrong_options(owner, arguments, any_sign=ANY_SIGN, leave_out=left_out)


WRONG = by_option(wrong())


@pytest.mark.parametrize("option", WRONG)
def test_is_refused_by_name(option: str) -> None:
    for one in WRONG[option]:
        assert_refused(one)


@pytest.mark.parametrize(("owner", "arguments"), OTHERS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_refused_above_could_be_built_without_the_wrong_option(owner, arguments) -> None:
    if owner is inspection.inspect_buffers:
        pytest.skip("refuses to look at no buffers, after its options")
    built = owner(**arguments)
    if isinstance(built, gymnasium.Env | gymnasium.vector.VectorEnv):
        built.close()


@pytest.mark.parametrize(
    ("owner", "options", "message"),
    [
        (TableShares, {"table_shares": {"a": "1"}}, r"table_shares\['a'\] is '1'; it must be a number in \[0, 1\]"),
        (TableShares, {"table_shares": {"a": 1}, "min_sizes": {"a": 2.5}}, r"min_sizes\['a'\] is 2.5; it must be a wh"),
        (Tables, {"capacities": {"a": 2.5}}, "capacity of table 'a' is 2.5; it must be a whole number of rows"),
        (events.suggest_events, {"replay": STEPS, "quantiles": ["0.5"]}, r"quantiles\[0\] is '0.5'; it must be a num"),
        (MixStates, {"keys": [4]}, r"keys\[0\] is 4; it must be the name of a column, or a tuple of names"),
        (TaskTableWriter, {"tasks": [4], "capacity_per_task": 9}, r"tasks\[0\] is 4; it must be the name of a task"),
        (OneAt, {"low": ["0"], "high": [1.0]}, r"low\[0\] is '0'; it must be a number, or None"),
        (OneAt, {"low": [0.0], "high": [1.0], "components": [0.5]}, r"components\[0\] is 0.5; it must be the index"),
        (levels.LevelBuffer, {"levels": [True, 2]}, "level_id is True; it must be a whole number"),
    ],
)
def test_an_entry_of_the_wrong_kind_is_refused(owner, options, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        owner(**options)


LARGE = 10**30


@pytest.mark.parametrize(
    ("owner", "options", "name"),
    [
        (lightning_replay.PackedStorage, {"capacity": LARGE}, "capacity"),
        (recipes.uniform, {"capacity": LARGE}, "capacity"),
        (levels.LevelBuffer, {"levels": LARGE}, "levels"),
        (levels.LevelBuffer, {"capacity": LARGE}, "capacity"),
    ],
)
def test_more_than_an_index_can_say_is_refused(owner, options, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is {LARGE}; it must be .*at most {2**63 - 1}, "):
        owner(**options)


@pytest.mark.parametrize("device", ["cuda:99", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_gpu_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(
        ValueError, match=f"^device is '{device}', and torch finds .* CUDA devices here; use device='cpu'"
    ):
        recipes.uniform(10, 1, device=device)


class Falling(Schedule):
    """From a value at reading 0."""

    def __init__(self, first: Any, clock: str = "draws") -> None:
        self.first, self.clock = first, clock

    def __call__(self, reading: int) -> float:
        return self.first / (1 + reading)


@pytest.mark.parametrize(
    ("schedule", "error", "message"),
    [
        (Linear(7.0, 1.0, 10), ValueError, r"beta at reading 0 of Linear\(.*\) is 7.0; it must be a number"),
        (Linear(0.4, 7.0, 10), ValueError, r"beta at reading 10 of Linear\(.*\) is 7.0; it must be a number"),
        (Falling(7.0), ValueError, "beta at reading 0 of .*Falling.* is 7.0; .*or a schedule of such numbers"),
        (Falling(1j), TypeError, "beta at reading 0 of .*Falling.* is 1j"),
        (Falling(0.5, clock="frames"), ValueError, "the clock of beta is 'frames'; it must be one of 'draws'"),
        (Linear, TypeError, "beta is <class .*Linear'>; it must be a number"),
    ],
)
def test_the_values_of_a_schedule_are_checked_where_they_are_known(schedule, error, message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        checked_schedule("beta", schedule, highest=1.0)
    assert checked_schedule("beta", Falling(0.5), highest=1.0)(1) == 0.25
