# SPDX-License-Identifier: Apache-2.0
"""Many half fields stepped as one play what the library's environment plays."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_replay.envs.half_field import HalfField
from tests.benchmarks.learning.learners.vector_half_field import DRAWS, PARAMETER_HIGH, PARAMETER_LOW, VectorHalfField

COUNT = 24


class Draws:
    """A generator that gives what it is told, then a keeper's number."""

    def __init__(self, draws: np.ndarray) -> None:
        self._draws = draws

    def random(self, count: int) -> np.ndarray:
        assert count == DRAWS + 1
        return np.append(self._draws, 0.5)


def begun(field: VectorHalfField, envs: list[HalfField], row: int, task: int, draws: np.ndarray) -> None:
    field.reset(np.array([row]), np.array([task]), draws[None])
    envs[row].np_random = Draws(draws)  # type: ignore[assignment]
    observation, info = envs[row].reset(options={"task": HalfField.TASKS[task]})
    assert info["task"] == field.task[row] == task
    np.testing.assert_allclose(field.observation[row], observation, atol=1e-6)


def chosen(env: HalfField, random: np.random.Generator) -> tuple[int, np.ndarray]:
    """Plays towards the ball and the goal, sometimes at random, also with parameters out of bounds."""
    parameters = random.uniform(1.2 * PARAMETER_LOW, 1.2 * PARAMETER_HIGH).astype(np.float32)
    observation = env._observation()
    if random.random() < 0.3:
        return int(random.integers(3)), parameters
    if observation[17] > 0 and random.random() < 0.9:
        parameters[3:] = random.uniform(30, 110), 180 * observation[23] + random.normal(0, 10)
        return 2, parameters
    parameters[:2] = random.uniform(50, 110), 180 * observation[13] + random.normal(0, 10)
    return 0, parameters


@pytest.mark.slow
@pytest.mark.parametrize("frame_skip", [1, 4])
def test_fields_play_as_the_environment(frame_skip: int) -> None:
    random = np.random.default_rng(0)
    field = VectorHalfField(COUNT, frame_skip, max_steps=60, untouched_limit=40)
    envs = [HalfField(frame_skip=frame_skip, max_steps=60, untouched_limit=40) for _ in range(COUNT)]
    for row in range(COUNT):
        begun(field, envs, row, row % 4, random.random(DRAWS))
    seen = {"goals": 0, "outside": 0, "truncated": 0}
    for _ in range(300 // frame_skip):
        actions = [chosen(env, random) for env in envs]
        running = field.is_running.copy()
        discrete, parameters = (np.stack(column) for column in zip(*actions, strict=True))
        before = field.observation.copy()
        reward, terminated, truncated = field.step(discrete, parameters)
        for row, (env, (choice, joint)) in enumerate(zip(envs, actions, strict=True)):
            if not running[row]:
                assert np.array_equal(before[row], field.observation[row])
                assert not (reward[row] or terminated[row] or truncated[row])
                if random.random() < 0.5:  # some wait for a while
                    begun(field, envs, row, int(random.integers(4)), random.random(DRAWS))
                continue
            expected = env.step((choice, joint[:2], joint[2:3], joint[3:]))
            np.testing.assert_allclose(field.observation[row], expected[0], atol=2e-5)
            assert (reward[row], terminated[row], truncated[row]) == expected[1:4]
            assert field.is_running[row] == (not (terminated[row] or truncated[row]))
            seen["goals"] += bool(reward[row])
            seen["outside"] += bool(terminated[row] and not reward[row])
            seen["truncated"] += bool(truncated[row])
    assert min(seen.values()) >= 5, seen


@pytest.mark.parametrize("limits", [(16, 100), (200, 16)])
def test_a_saved_state_goes_on_alike(limits: tuple[int, int]) -> None:
    random = np.random.default_rng(1)
    field, other = VectorHalfField(4, 2, *limits), VectorHalfField(4, 2, *limits)
    field.reset(np.arange(3), np.arange(3), random.random((3, DRAWS)))
    actions = [(random.integers(2, size=4), random.uniform(PARAMETER_LOW, PARAMETER_HIGH, (4, 5))) for _ in range(9)]
    for action in actions[:4]:
        field.step(*action)
    other.load_state_dict(field.state_dict())
    assert other.is_running.tolist() == [True, True, True, False] and other.task[:3].tolist() == [0, 1, 2]
    truncations = 0
    for action in actions[4:]:
        for ours, theirs in zip(field.step(*action), other.step(*action), strict=True):
            assert np.array_equal(ours, theirs)
        assert np.array_equal(field.observation, other.observation)
        truncations += np.count_nonzero(~other.is_running[:3])
    assert truncations == 2 * 3  # after the eighth step, and still after the ninth
