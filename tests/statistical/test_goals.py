# SPDX-License-Identifier: Apache-2.0
"""New goals come from every allowed step alike, as often as the share says, and as in TorchRL's buffer."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torchrl.data import HERReplayBuffer, LazyTensorStorage

from lightning_replay import recipes
from lightning_replay.replay import Replay
from tests.goal_steps import OWN_GOAL, goal_rows, reached

pytestmark = pytest.mark.filterwarnings("ignore:.*another reward than RelabelGoals computes")  # 100 is stored
LEAST_P_VALUE = 1e-4
LENGTHS = (1, 3, 4, 7)  # of episodes, the last one running
FIRST = (0, 100, 200, 300)
BATCH, BATCHES = 500, 120


def stored(add) -> None:
    # The first episode is overwritten in part: 17 rows in 15 slots.
    add(goal_rows([998, 999], done=True))
    for first, length in zip(FIRST, LENGTHS, strict=True):
        add(goal_rows(range(first, first + length), done=first != FIRST[-1]))


def hindsight(strategy: str, share: float, **options) -> Replay:
    replay = recipes.hindsight(15, 15, strategy=strategy, share=share, reward=reached, seed=4, **options)
    stored(replay.extend)
    return replay


def pairs(batch) -> list[tuple[int, int]]:
    """The number of each row and that of its new goal."""
    numbers, goals = batch["observation", "achieved_goal"][:, 0], batch["observation", "desired_goal"][:, 0]
    return list(zip(numbers.int().tolist(), goals.int().tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("draws_on", ["cpu", "device"])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_every_allowed_step_is_equally_likely(strategy: str, draws_on: str) -> None:
    replay = hindsight(strategy, 1.0, draws_on=draws_on)
    drawn = [pair for _ in range(BATCHES) for pair in pairs(replay.sample(BATCH))]
    for first, length in zip(FIRST, LENGTHS, strict=True):
        for step in range(first, first + length):
            allowed = {"future": range(step, first + length), "final": [first + length - 1]}
            goals = [goal + 1 for goal in allowed.get(strategy, range(first, first + length))]
            found = [goal for number, goal in drawn if number == step]
            counts = [found.count(goal) for goal in goals]
            assert sum(counts) == len(found) > 0.8 * BATCH * BATCHES / 15
            assert len(goals) == 1 or stats.chisquare(counts).pvalue > LEAST_P_VALUE


@pytest.mark.slow
@pytest.mark.parametrize(("priority_exponent", "draws_on"), [(0.0, "cpu"), (1.0, "cpu"), (1.0, "device")])
def test_each_row_is_relabelled_with_the_probability_of_the_share(priority_exponent: float, draws_on: str) -> None:
    replay = hindsight("future", 0.8, priority_exponent=priority_exponent, draws_on=draws_on)
    relabelled = [(replay.sample(8)["observation", "desired_goal"][:, 0] != OWN_GOAL) for _ in range(2_000)]
    places = torch.stack(relabelled).sum(0)
    deviations = (places - 1_600).square() / (2_000 * 0.8 * 0.2)
    assert stats.chi2.sf(float(deviations.sum()), 8) > LEAST_P_VALUE
    counts = torch.stack(relabelled).sum(1).bincount(minlength=9).numpy()
    expected = stats.binom.pmf(range(9), 8, 0.8) * 2_000
    together = [counts[:4].sum(), *counts[4:]], [expected[:4].sum(), *expected[4:]]
    assert stats.chisquare(*together).pvalue > LEAST_P_VALUE


def test_goals_and_rewards_are_those_of_torchrl() -> None:
    achieved = ("next", "observation", "achieved_goal")

    def reward_of(rows):
        return (rows[achieved] == rows["observation", "desired_goal"]).all(-1, keepdim=True).float()

    theirs = HERReplayBuffer(
        reward_of, her_ratio=1.0, goal_key=("observation", "desired_goal"), achieved_goal_key=achieved,
        storage=LazyTensorStorage(15), batch_size=BATCH,
    )  # fmt: skip
    # Their buffer takes the rows after the write head for those before it: no wrapped episode here.
    ours = recipes.hindsight(15, 15, strategy="future", share=1.0, reward=reached, seed=4)
    for first, length in zip(FIRST, LENGTHS, strict=True):
        for one in (ours, theirs):
            one.extend(goal_rows(range(first, first + length), done=first != FIRST[-1]))
    torch.manual_seed(0)
    counts: list[dict[tuple[int, int], int]] = []
    rewards: dict[tuple[int, int], float] = {}
    for one in (ours, theirs):
        counts.append({})
        for _ in range(BATCHES):
            batch = one.sample(BATCH)
            for pair, reward in zip(pairs(batch), batch["next", "reward"].flatten().tolist(), strict=True):
                counts[-1][pair] = counts[-1].get(pair, 0) + 1
                assert rewards.setdefault(pair, reward) == reward
    assert counts[0].keys() == counts[1].keys()
    table = [[one[pair] for pair in sorted(counts[0])] for one in counts]
    assert stats.chi2_contingency(table).pvalue > LEAST_P_VALUE
