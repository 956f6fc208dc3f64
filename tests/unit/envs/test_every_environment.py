# SPDX-License-Identifier: Apache-2.0
"""What holds for every environment: Gymnasium's rules, and the extra that is named where a package is missing."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import lightning_replay.envs  # noqa: F401  registers them

GRIDS = ("ThreeRooms-v0", "TwoRooms-v0", "ObstacleCourse-v0", "RandomSkills-v0")
MAZES = tuple(f"ObstructedMazeGamut-{difficulty}-v0" for difficulty in ("Easy", "Medium", "Hard"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("identifier", "options"),
    [
        *(("HalfField-1v0", {}), ("HalfField-1v1", {})),
        *((grid, {"one_hot": one_hot}) for grid in GRIDS for one_hot in (False, True)),
        *((grid, {}) for grid in (*MAZES, "MultiRoom-N4-Random-v0")),
    ],
)
def test_gymnasium_finds_nothing_to_object_to_and_a_picture_is_drawn(identifier: str, options: dict[str, Any]) -> None:
    env = gymnasium.make(identifier, render_mode="rgb_array", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*symmetric and normalized", category=UserWarning)  # of angles
        check_env(env.unwrapped)
    env.reset(seed=0)
    picture = env.render()
    assert isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.ndim == 3


def test_bits_are_flipped_until_they_are_those_of_the_goal() -> None:
    env = gymnasium.make("BitFlipping-v0", bits=4, max_steps=6)
    check_env(env.unwrapped, skip_render_check=True)
    seen, _ = env.reset(seed=3)
    wrong = np.flatnonzero(seen["observation"] != seen["desired_goal"])
    right = np.flatnonzero(seen["observation"] == seen["desired_goal"])
    assert len(wrong)
    played = [env.step(bit) for bit in (*wrong[:-1], wrong[-1])]
    assert [step[1:4] for step in played] == [(-1.0, False, False)] * (len(wrong) - 1) + [(0.0, True, False)]
    assert np.array_equal(played[-1][0]["achieved_goal"], seen["desired_goal"]) and played[-1][4]["success"]
    rewards = env.unwrapped.compute_reward(np.eye(4), np.eye(4)[[0, 1, 3, 3]], {})
    assert rewards.tolist() == [0, 0, -1, 0]
    env.reset(seed=3)
    bit = int(right[0]) if len(right) else 0
    lasts = [env.step(bit)[1:4] for _ in range(6)]  # there and back
    assert lasts[-1] == (-1.0, False, True) and not any(last[2] for last in lasts[:-1])


@pytest.mark.parametrize("identifier", ["PointMazeTasks-UMaze-v0", "PointMazeTasks-Medium-v0"])
def test_gymnasium_finds_nothing_to_object_to_in_mazes(identifier: str) -> None:
    env = gymnasium.make(identifier)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*A Box observation space m", category=UserWarning)  # unbounded
        check_env(env.unwrapped, skip_render_check=True)
    observation, _ = env.reset(seed=0)
    assert observation.dtype == np.float32 and observation.shape == (6,)
    assert env.render() is None


def test_gymnasium_finds_nothing_to_object_to_where_a_cue_is_recalled() -> None:
    check_env(gymnasium.make("RecallCue-v0").unwrapped, skip_render_check=True)


@pytest.mark.parametrize("identifier", ["MultiRoom-N4-Random-v0", "ObstructedMazeGamut-Medium-v0"])
def test_a_seed_is_one_level_whatever_was_played_before(identifier: str) -> None:
    env, other = (gymnasium.make(identifier).unwrapped for _ in range(2))
    for seed in (4, 11, 2**31 - 1):
        first, _ = env.reset(seed=seed)
        other.reset(seed=seed + 1)
        for action in (2, 3, 0, 2, 4, 5):  # forward, pick up, turn left, forward, drop, toggle
            other.step(action)
        other.reset()
        assert np.array_equal(other.reset(seed=seed)[0], first) and other.carrying is None
    assert len({env.reset(seed=seed)[0].tobytes() for seed in range(100)}) == 100


def test_a_missing_package_is_named_with_its_extra() -> None:
    modules = ("minigrid", "gymnasium_robotics", "ale_py", "minatar")
    made = {"MultiRoom-N4-Random-v0": {}, "ThreeRooms-v0": {}, MAZES[0]: {}, "ObstacleCourse-v0": {}}
    made |= {"PointMazeTasks-UMaze-v0": {}}
    made |= {"Atari-v0": {"game": "Breakout"}, "MinAtar-v0": {"game": "breakout"}}
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({modules}))\n"
        "import gymnasium, lightning_replay.envs\n"
        f"for name, options in {made}.items():\n"
        "    try: gymnasium.make(name, **options)\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    needed = "needs {}, which is not installed: pip install 'lightning-replay[{}]'"
    assert result.stdout.count(needed.format("MiniGrid", "grids")) == 4
    for package, extra in (("gymnasium-robotics", "mazes"), ("ale-py", "atari"), ("MinAtar", "minatar")):
        assert result.stdout.count(needed.format(package, extra)) == 1


def test_atari_without_opencv_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ale_py")
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs opencv-python-headless, which is not installed"):
        gymnasium.make("Atari-v0", game="Breakout")


@pytest.mark.parametrize("grid", ["MultiRoom-N4-Random", "ObstructedMazeGamut-Easy"])
def test_a_one_hot_grid_has_the_cells_of_the_grid(grid: str) -> None:
    cells, _ = gymnasium.make(f"{grid}-v0").reset(seed=5)
    env = gymnasium.make(f"{grid}-OneHot-v0")
    vectors, _ = env.reset(seed=5)
    assert vectors.dtype == np.float32 and env.observation_space.contains(vectors)
    parts = np.split(vectors, [11, 17], axis=-1)
    assert np.array_equal(np.stack([part.argmax(-1) for part in parts], -1), cells)
    assert (np.stack([part.sum(-1) for part in parts]) == 1).all()
