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
from lightning_replay.envs.grids import MultiRooms, ObstructedMazeGamut, ThreeRooms
from lightning_replay.envs.half_field import HalfField
from lightning_replay.envs.point_maze import PointMazeTasks
from lightning_replay.inspection import compare as inspection
from lightning_replay.levels import scores
from lightning_replay.levels.environments import LevelWrapper, make_level_vector
from lightning_replay.neighbors import NeighborLists, SameActionLists
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.recipes import storage_for
from lightning_replay.samplers import (
    ContinuousTransitionSampler,
    NeighborhoodMixupSampler,
    ReverseSweepSampler,
    ScheduledSampler,
    TableShares,
)
from lightning_replay.schedules import Linear, Schedule, checked_schedule
from lightning_replay.tables.tables import Tables
from lightning_replay.transforms import (
    GaussianNoise,
    MixPairs,
    MixStates,
    OneAt,
    PotentialShaping,
    mixup_coefficients,
)
from lightning_replay.writers import EventTableWriter, TaskTableWriter
from tests.recipe_options import required_options
from tests.wrong_options import WrongOption, assert_refused, options_of, wrong_options

HIGH = events.reward_at_least(1.0)
BUFFER = {"storage": lightning_replay.PackedStorage(10), "batch_size": 1}
EVENT_TABLE = events.EventTable("goal", condition=HIGH, history_length=5, capacity=10)
COLUMNS = {name: torch.zeros(1) for name in ("reward", "state_value", "next_state_value")}
COLUMNS |= {name: torch.zeros(1, dtype=torch.bool) for name in ("terminated", "done")}
STEPS = TensorDict({"next": {"reward": torch.arange(4.0)}}, [4])

# What is needed to build them, of those that need something.
ARGUMENTS: dict[str, dict[str, Any]] = {
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
    "FrameStorage": {"capacity": 10, "frame_stack": 2, "frame_capacity": 30},
    "InfoKey": {"key": "solved"},
    "KeyInRegion": {"key": "observation", "low": 0.0},
    "Linear": {"start": 0.4, "end": 1.0, "duration": 10},
    "ManhattanDistance": {"goal": [1.0]},
    "MeanReturn": {"low": 0.0, "high": 1.0},
    "NStepTransitions": {"n_steps": 2, "discount": 0.9},
    "OneAt": {"low": [0.0], "high": [1.0]},
    "PackedStorage": {"capacity": 10},
    "PotentialShaping": {"potential": torch.sum, "discount": 0.9},
    "PrioritizedSampler": {"capacity": 10},
    "Reestablished": {"condition": HIGH, "steps": 2},
    "ReturnChange": {"low": 0.0, "high": 1.0},
    "ReverseCurriculum": {"order": ["near"]},
    "ReverseSweepSampler": {"goal": HIGH},
    "RewardAtLeast": {"threshold": 1.0},
    "RewardBelow": {"threshold": 1.0},
    "ScheduledSampler": {"tasks": ["near"], "scheduler": schedulers.UniformTasks()},
    "Sustained": {"condition": HIGH, "steps": 2},
    "TableShares": {"table_shares": {"default": 1.0}},
    "TaskTableWriter": {"tasks": ["near"], "capacity_per_task": 10},
    "TerminalWithReward": {"at_least": 1.0},
}
ANY_SIGN = {"at_least", "end", "high", "initial_value", "low", "scale", "start", "step_reward", "threshold", "value"}
NOT_GIVEN_BY_USERS = {"count", "default_frame_capacity", "levels", "n_steps"}  # levels are tested with the level buffer
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
    (inspection.project, {"observations": {"one": torch.zeros(4, 2)}}),
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
    (ObstructedMazeGamut, {"num_mazes": 3}),
    (PointMazeTasks, {}),
    (MinAtarGame, {"game": "breakout"}),
    (ThreeRooms, {}),
    (atari, {"game": "Breakout"}),
    (LevelWrapper, {"env": gymnasium.make("CartPole-v1")}),
    (make_level_vector, {"env": "CartPole-v1", "num_envs": 1, "levels": levels.UniformLevels(4)}),
]


def recorded_classes() -> Iterator[type]:
    """Every recorded class of the library."""
    for module in pkgutil.walk_packages(lightning_replay.__path__, "lightning_replay."):
        for kind in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(kind) and kind.__module__ == module.name and "_record" in vars(kind):
                yield kind


def wrong() -> Iterator[WrongOption]:
    for kind in recorded_classes():
        yield from wrong_options(kind, ARGUMENTS.get(kind.__name__, {}), any_sign=ANY_SIGN)
    for name, recipe in recipes.known().items():
        stack = {"frame_stack": 2} if "frame_stack" in options_of(recipe) else {}  # frame_capacity needs it
        yield from wrong_options(recipe, required_options(name, 100) | {"batch_size": 1} | stack)
    for owner, arguments in OTHERS:
        yield from wrong_options(owner, arguments, any_sign=ANY_SIGN, leave_out=NOT_GIVEN_BY_USERS)


@pytest.mark.parametrize("wrong", list(wrong()), ids=repr)
def test_is_refused_by_name(wrong) -> None:
    assert_refused(wrong)


@pytest.mark.parametrize(("owner", "arguments"), OTHERS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_refused_above_could_be_built_without_the_wrong_option(owner, arguments) -> None:
    if owner is inspection.inspect_buffers:
        pytest.skip("refuses to look at no buffers, after its options")
    built = owner(**arguments)
    if isinstance(built, gymnasium.Env | gymnasium.vector.VectorEnv):
        built.close()


@pytest.mark.parametrize(
    ("owner", "options"),
    [
        (recipes.prioritized, {"capacity": 10, "batch_size": 1, "importance_exponent": 7}),
        (recipes.neighborhood_mixup, {"capacity": 10, "batch_size": 1, "importance_exponent": 7}),
        (
            recipes.surprise_retention,
            {"capacity": 9, "batch_size": 1, "priority_exponent": 0, "importance_exponent": 7},
        ),
        (recipes.mixup, {"capacity": 10, "batch_size": 1, "fraction": 1.5}),
        (recipes.reverse_sweep, {"capacity": 10, "batch_size": 1, "goal": HIGH, "sweep_share": 1.5}),
        (recipes.event_tables, required_options("event_tables", 10) | {"batch_size": 1, "default_share": 1.5}),
        (TableShares, {"table_shares": {"default": 1.0}, "importance_exponent": 1.5}),
        (schedulers.Exp3, {"exploration": 1.5}),
        (schedulers.Exp3, {"exploration": 0.0}),
        (schedulers.ReverseCurriculum, {"order": ["near"], "advance_at": 0.0}),
        (schedulers.EasyToHard, {"order": ["near"], "max_signals": 0}),
        (schedulers.MeanReturn, {"low": 0.0, "high": 1.0, "every": 0}),
        (Linear, {"start": 0.0, "end": 1.0, "duration": 0}),
        (events.EventTable, ARGUMENTS["EventTable"] | {"share": 1.5}),
        (PriorityTree, {"capacity": 4, "backend": "c++"}),
        (NeighborLists, {"capacity": 4, "num_neighbors": 1, "backend": "annoy"}),
        (recipes.event_tables, required_options("event_tables", 10) | {"batch_size": 1, "correction": "lemma3"}),
        (recipes.neighborhood_mixup, {"capacity": 10, "batch_size": 1, "discrete": "same"}),
        (Linear, {"start": 0.0, "end": 1.0, "duration": 5, "clock": "frames"}),
        (inspection.inspect_buffers, {"buffers": {}, "projection": "umap"}),
        (HalfField, {"render_mode": "human"}),
        (PointMazeTasks, {"maze": "Large"}),
        (MinAtarGame, {"game": "pong"}),
    ],
)
def test_a_value_beyond_the_range_or_the_choices_is_refused(owner, options) -> None:
    name = list(options)[-1]
    assert_refused(WrongOption(owner.__name__, owner, name, options[name], ValueError, options))


@pytest.mark.parametrize(
    ("owner", "options", "message"),
    [
        (
            recipes.parallel_curriculum,
            {"tasks": ["a"], "capacity_per_task": 9, "scheduler": "exp3"},
            "scheduler is '",
        ),
        (recipes.surprise_retention, {"capacity": 10, "rule": "oldest"}, "rule is 'oldest'; it must be an object of"),
        (TableShares, {"table_shares": [0.5, 0.5]}, r"table_shares is \[0.5, 0.5\]; it must be shares by the names"),
        (TableShares, {"table_shares": {"a": "1"}}, r"table_shares\['a'\] is '1'; it must be a number in \[0, 1\]"),
        (TableShares, {"table_shares": {"a": 1}, "min_sizes": {"a": 2.5}}, r"min_sizes\['a'\] is 2.5; it must be a wh"),
        (
            TableShares,
            {"table_shares": {"a": 1}, "correction": "mixture"},
            "correction is 'mixture'; it must be one",
        ),
        (Tables, {"capacities": {"a": 2.5}}, "capacity of table 'a' is 2.5; it must be a whole number of rows"),
        (events.suggest_events, {"replay": STEPS, "quantiles": 0.5}, "quantiles is 0.5; it must be a sequence"),
        (events.suggest_events, {"replay": STEPS, "quantiles": ["0.5"]}, r"quantiles\[0\] is '0.5'; it must be a num"),
        (recipes.noisy, {"capacity": 10, "batch_size": 1, "keys": None}, "keys is None; it must be a sequence of keys"),
        (
            MixPairs,
            {"keys": "observation"},
            r"keys is 'observation'; it must be a sequence of keys, as \['observation'",
        ),
        (MixStates, {"keys": "observation"}, "keys is 'observation'; it must be a sequence of keys, as "),
        (MixStates, {"keys": [4]}, r"keys\[0\] is 4; it must be the name of a column, or a tuple of names"),
        (GaussianNoise, {"keys": True}, "keys is True; it must be a sequence of keys"),
        (
            PotentialShaping,
            {"potential": torch.sum, "discount": 0.9, "observation_key": None},
            "observation_key is None",
        ),
        (NeighborhoodMixupSampler, {"feature_keys": 2.5}, "feature_keys is 2.5; it must be a sequence of keys"),
        (ReverseSweepSampler, {"goal": HIGH, "done_key": 4}, "done_key is 4; it must be the name of a column"),
        (ContinuousTransitionSampler, {"done_key": 4}, "done_key is 4; it must be the name of a column"),
        (
            recipes.uniform,
            {"capacity": 10, "batch_size": 1, "image_key": None},
            "image_key is None; it must be the name",
        ),
        (
            recipes.uniform,
            {"capacity": 10, "frame_stack": 2, "image_key": 2.5},
            "image_key is 2.5; it must be the name",
        ),
        (recipes.event_tables, {"capacity": 10, "tables": 2.5}, "tables is 2.5; it must be a list of EventTable obj"),
        (EventTableWriter, {"capacity": 10, "event_tables": None}, "event_tables is None; it must be a list of EventT"),
        (
            recipes.parallel_curriculum,
            {"tasks": True, "capacity_per_task": 9},
            "tasks is True; it must be the names of",
        ),
        (TaskTableWriter, {"tasks": [4], "capacity_per_task": 9}, r"tasks\[0\] is 4; it must be the name of a task"),
        (
            ScheduledSampler,
            {"tasks": None, "scheduler": schedulers.UniformTasks()},
            "tasks is None; it must be the names",
        ),
        (lightning_replay.Replay, BUFFER | {"transform": "x"}, "transform is 'x'; it must be a Transform of TorchRL"),
        (OneAt, {"low": ["0"], "high": [1.0]}, r"low\[0\] is '0'; it must be a number, or None"),
        (OneAt, {"low": 0.0, "high": [1.0]}, "low is 0.0; it must be a sequence of numbers"),
        (OneAt, {"low": [0.0], "high": [1.0], "components": [0.5]}, r"components\[0\] is 0.5; it must be the index"),
        (schedulers.EasyToHard, {"order": "near"}, "order is 'near'; it must be the names of the tasks"),
        (schedulers.OneTask, {"task": 3}, "task is 3; it must be the name of a task"),
        (inspection.inspect_buffers, {"buffers": [1]}, r"buffers is \[1\]; it must be buffers or paths by name"),
        (
            ConflictAverseStep,
            {"parameters": [torch.nn.Parameter(torch.zeros(1))], "rescale": 2.0},
            "rescale is 2.0",
        ),
        (levels.LevelBuffer, {"levels": [True, 2]}, "level_id is True; it must be a whole number"),
        (levels.LevelBuffer, {"levels": 5, "capacity": 5.0}, "capacity is 5.0; it must be a whole number of levels"),
        (levels.LevelBuffer, {"capacity": 5, "editor": 3}, "editor is 3; it must be a function from a level's id"),
        (levels.LevelBuffer, {"capacity": 5, "generate": "random"}, "generate is 'random'; it must be a function"),
        (LevelWrapper, {"env": gymnasium.make("CartPole-v1"), "check": 3}, "check is 3; it must be True, False or at"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(owner, options, message: str) -> None:
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
    with pytest.raises(ValueError, match=f"^{name} is {LARGE}; it must be .*at most {2**63 - 1}, the largest"):
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
        (
            Linear(7.0, 1.0, 10),
            ValueError,
            r"beta at reading 0 of Linear\(.*\) is 7.0; it must be a number",
        ),
        (
            Linear(0.4, 7.0, 10),
            ValueError,
            r"beta at reading 10 of Linear\(.*\) is 7.0; it must be a number",
        ),
        (Falling(7.0), ValueError, "beta at reading 0 of .*Falling.* is 7.0; .*or a schedule of such numbers"),
        (Falling(1j), TypeError, "beta at reading 0 of .*Falling.* is 1j"),
        (
            Falling(0.5, clock="frames"),
            ValueError,
            "the clock of beta is 'frames'; it must be one of 'draws'",
        ),
        (Linear, TypeError, "beta is <class .*Linear'>; it must be a number"),
    ],
)
def test_the_values_of_a_schedule_are_checked_where_they_are_known(schedule, error, message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        checked_schedule("beta", schedule, highest=1.0)
    assert checked_schedule("beta", Falling(0.5), highest=1.0)(1) == 0.25
