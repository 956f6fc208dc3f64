# SPDX-License-Identifier: Apache-2.0
"""The exchange rate between environment steps and updates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replay.lit.collection import Pace


@pytest.mark.parametrize(("ratio", "total"), [(0.25, 250), (0.1, 100), (1 / 3, 333), (1, 1_000), (20, 20_000)])
def test_totals_are_exact(ratio: float, total: int) -> None:
    assert Pace(env_steps=1_100, warmup_steps=100, updates_per_env_step=ratio).total_updates == total


def test_timeline() -> None:
    # steps    0 . . warm-up . . 8 9 10 11 12 13 14 15 16 .. 19
    # due                        0 0  0  0  1  1  1  1  2 ..  2
    pace = Pace(env_steps=19, warmup_steps=8, updates_per_env_step=0.25)
    assert [pace.updates_due(steps) for steps in range(8, 20)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert [pace.steps_for(update) for update in (1, 2)] == [12, 19]  # all steps come before the last update


@given(st.floats(0.01, 30), st.integers(1, 50), st.integers(1, 400))
def test_steps_for_is_the_first_step_at_which_an_update_is_due(ratio: float, warmup: int, more: int) -> None:
    pace = Pace(env_steps=warmup + more, warmup_steps=warmup, updates_per_env_step=ratio)
    for update in range(1, min(pace.total_updates, 40)):
        steps = pace.steps_for(update)
        assert pace.updates_due(steps) >= update > pace.updates_due(steps - 1)


@pytest.mark.parametrize("env_steps", [10, 100])
def test_the_warm_up_is_shorter_than_the_run(env_steps: int) -> None:
    with pytest.raises(ValueError, match=f"env_steps is {env_steps} and warmup_steps 100; .* must be above it"):
        Pace(env_steps, 100, 1)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (0.25, 2)])
def test_another_ratio_holds_from_the_resume_on(before: float, after: float) -> None:
    state = Pace(env_steps=200, warmup_steps=60, updates_per_env_step=before).state_dict()
    done = int(140 * before)
    pace = Pace(env_steps=400, warmup_steps=60, updates_per_env_step=after)
    pace.resume(state, 200, done)
    assert pace.updates_due(200) == done and pace.total_updates == done + 200 * after
    assert pace.steps_for(done + 1) == 201
    again = Pace(env_steps=500, warmup_steps=60, updates_per_env_step=after)  # the same ratio goes on as it was
    again.resume(pace.state_dict(), 300, pace.updates_due(300))
    assert [again.updates_due(steps) for steps in (250, 400)] == [pace.updates_due(steps) for steps in (250, 400)]


def test_a_run_stopped_in_its_warm_up_has_the_warm_up_that_is_asked_for() -> None:
    pace = Pace(env_steps=400, warmup_steps=100, updates_per_env_step=2)
    pace.resume(Pace(200, 60, 1).state_dict(), 40, 0)
    assert pace.updates_due(101) == 2
