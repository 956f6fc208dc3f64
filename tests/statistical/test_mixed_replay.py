# SPDX-License-Identifier: Apache-2.0
"""How many rows of a batch are offline, and which."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_replay import recipes
from tests.transitions import numbered_steps


@pytest.mark.slow
@pytest.mark.parametrize(("share", "batch_size"), [(0.3, 64), (0.7, 10), (0.05, 7)])
def test_a_share_that_is_no_whole_number_of_rows_is_right_on_average(share: float, batch_size: int) -> None:
    replay = recipes.mixed(
        online=recipes.uniform(100, 4), offline=recipes.uniform(100, 4), share=share, batch_size=batch_size, seed=11
    )
    replay.offline.extend(numbered_steps(0, 100))
    replay.extend(numbered_steps(0, 100))
    draws = 1_000
    found = np.array([int(replay.sample()["is_offline"].sum()) for _ in range(draws)])
    exact = share * batch_size
    lower = int(np.floor(exact + 1e-9))
    assert set(found.tolist()) <= {lower, lower + 1}
    if exact == pytest.approx(lower):
        assert (found == lower).all()
    else:
        assert stats.binomtest(int((found - lower).sum()), draws, exact - lower).pvalue > 1e-4


def test_rows_are_drawn_as_by_each_side_alone() -> None:
    offline = recipes.prioritized(10, 4, priority_exponent=1.0, priority_offset=0.0)
    offline.extend(numbered_steps(0, 8).set("td_error", torch.arange(1.0, 9.0)))
    replay = recipes.mixed(online=recipes.uniform(20, 4), offline=offline, share=0.5, batch_size=32, seed=5)
    replay.extend(numbered_steps(0, 20))
    counts = np.zeros((2, 20))
    for _ in range(300):
        batch = replay.sample()
        for side in (0, 1):
            own = batch["index"][batch["is_offline"] == bool(side)] - (side << 40)
            counts[side] += np.bincount(own.numpy(), minlength=20)
    assert stats.chisquare(counts[0]).pvalue > 1e-4
    expected = np.arange(1, 9) / 36 * counts[1].sum()
    assert stats.chisquare(counts[1][:8], expected).pvalue > 1e-4
