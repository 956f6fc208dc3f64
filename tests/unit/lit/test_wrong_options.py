# SPDX-License-Identifier: Apache-2.0
"""What data modules and callbacks refuse when they are built, and rewards that are no numbers."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from lightning_replay import recipes
from lightning_replay.envs.building import checked_reward
from lightning_replay.levels import LevelBuffer, UniformLevels
from lightning_replay.lit import LevelDataModule, ReplayDataModule, callbacks
from lightning_replay.lit.collection import RolloutSchedule, UpdateSchedule
from lightning_replay.lit.level_collection import ReturnNormalization
from tests.unit.lit.level_toys import Stairs
from tests.unit.lit.toys import Counting, make_replay
from tests.wrong_options import WrongOption, assert_refused, by_option, options_of, wrong_options

OWNERS: list[tuple[Any, dict[str, Any]]] = [
    (ReplayDataModule, {"env": Counting, "replay": make_replay(), "env_steps": 60, "warmup_steps": 20}),
    (LevelDataModule, {"env": Stairs, "levels": UniformLevels(5), "env_steps": 60}),
    (UpdateSchedule, {"env_steps": 60, "warmup_steps": 20, "updates_per_env_step": 1.0}),
    (RolloutSchedule, {"env_steps": 60, "num_envs": 2, "rollout_length": 5}),
    (ReturnNormalization, {}),
    *((getattr(callbacks, name), {}) for name in callbacks.__all__ if name[0].isupper()),
]


def wrong() -> list[WrongOption]:
    found = [one for owner, arguments in OWNERS for one in wrong_options(owner, arguments)]
    # Generators of NumPy and Gymnasium take no negative seeds.
    seeds = [(owner, arguments) for owner, arguments in OWNERS if "seed" in options_of(owner)]
    return found + [WrongOption(owner.__name__, owner, "seed", -1, ValueError, arguments) for owner, arguments in seeds]


WRONG = by_option(wrong())


@pytest.mark.parametrize("option", WRONG)
def test_is_refused_by_name(option: str) -> None:
    for one in WRONG[option]:
        assert_refused(one)


REPLAY: dict[str, Any] = {"env": Counting, "replay": make_replay(), "env_steps": 60, "warmup_steps": 20}
LEVELS: dict[str, Any] = {"env": Stairs, "levels": UniformLevels(5), "env_steps": 60}


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (ReplayDataModule, {"replay": LevelBuffer(5)}, r"replay is LevelBuffer\(.*levels are replayed with LevelDataM"),
        (ReplayDataModule, {"replay": recipes.uniform}, "replay is <function uniform.*it must be a Replay"),
        (ReplayDataModule, {"env": Counting()}, "env is <.*Counting object.*; it must be a Gymnasium id, or a"),
        (ReplayDataModule, {"info_keys": "goal"}, "info_keys is 'goal'; it must be a sequence"),
        (ReplayDataModule, {"info_keys": (3,)}, r"info_keys\[0\] is 3; it must be the name of an info"),
        (LevelDataModule, {"levels": make_replay()}, "levels is a Replay; .*; transitions are replayed with Repl"),
        (LevelDataModule, {"check": 3}, "check is 3; it must be True, False or at least two different ids"),
    ],
)
def test_the_wrong_thing_is_refused_when_a_data_module_is_built(module, options, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        module(**((REPLAY if module is ReplayDataModule else LEVELS) | options))


@pytest.mark.parametrize("reward", [1, 1.0, True, np.float32(1.0), np.int64(1), np.array(1.0), torch.tensor(1.0)])
def test_rewards_without_dimensions_are_numbers(reward: Any) -> None:
    env: gymnasium.Env = Counting()
    assert checked_reward(reward, env) is reward
