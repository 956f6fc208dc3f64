# SPDX-License-Identifier: Apache-2.0
"""A cue is seen once, asked for later, and pays where it is named then."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_replay.envs.recall import RecallCue


@pytest.mark.parametrize(("num_cues", "delay"), [(2, 1), (3, 4)])
def test_only_the_answer_to_the_question_pays(num_cues: int, delay: int) -> None:
    env, seen = RecallCue(num_cues, delay), set()
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        cue = int(observation[:-1].argmax())
        seen.add(cue)
        for step in range(delay):
            assert observation[:num_cues].sum() == (step == 0) and observation[-2] == 0.0
            observation, reward, terminated, truncated, _ = env.step(cue)
            assert (reward, terminated, truncated) == (0.0, False, False)
        assert observation[:num_cues].sum() == 0.0 and observation[-2] == 1.0  # the question
        answer = cue if seed % 2 else (cue + 1) % num_cues
        _, reward, terminated, truncated, _ = env.step(answer)
        assert (reward, terminated, truncated) == (float(seed % 2), True, False)
    assert seen == set(range(num_cues))


def test_noise_is_of_the_seed_and_says_nothing_of_the_cue() -> None:
    first, second = ([RecallCue().reset(seed=seed)[0] for seed in range(300)] for _ in range(2))
    assert np.array_equal(first, second)
    cue, noise = np.array(first)[:, 0], np.array(first)[:, -1]
    assert abs(np.corrcoef(cue, noise)[0, 1]) < 4 / np.sqrt(300)


@pytest.mark.parametrize("options", [{"num_cues": 1}, {"delay": 0}, {"delay": 1.5}])
def test_counts_are_checked(options) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(options))} "):
        RecallCue(**options)
