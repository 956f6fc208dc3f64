# SPDX-License-Identifier: Apache-2.0
"""A rollout that is read and stored as a whole against updates one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay.levels import LearningProgress, LevelBuffer, Proportional, segments, update_rollout
from lightning_replay.levels import scores as level_scores


class MeanReward(level_scores.ValueScore):
    """A score of a user's own."""

    def of_columns(self, columns: level_scores.ValueColumns) -> float:
        return sum(columns.reward) / len(columns.reward)


def first_value(steps: TensorDict) -> float:
    return float(steps["state_value"][0]) + float(steps["next", "reward"].sum())


SCORES = [
    lambda: level_scores.L1ValueLoss(0.9, 0.8),
    lambda: level_scores.PositiveValueLoss(0.9, 0.8),
    lambda: level_scores.SignedGae(1.0, 0.5),
    lambda: level_scores.OneStepTdError(0.9),
    lambda: MeanReward(),
    lambda: level_scores.MaxMC(),
    lambda: level_scores.PolicyEntropy(),
    lambda: level_scores.Learnability(3, success=0.5),
    lambda: LearningProgress(3),
    lambda: first_value,
]


def one_by_one(levels: LevelBuffer, rollout: TensorDict, level_id: torch.Tensor) -> None:
    """The rule as it is written: an update for each piece of an episode."""
    for actor, level, steps, done in list(segments(rollout, level_id)):
        levels.update(actor, level, steps, done)


def played(levels: LevelBuffer, actors: int, steps: int, seed: int) -> tuple[TensorDict, torch.Tensor]:
    """A rollout of actors that choose their next level as soon as an episode ends, and go on where they were."""
    generator = torch.Generator().manual_seed(seed)
    done = torch.rand(actors, steps, generator=generator) < 0.4
    terminated = done & (torch.rand(actors, steps, generator=generator) < 0.6)
    level_id = torch.zeros(actors, steps, dtype=torch.int64)
    for step in range(steps):
        for actor in range(actors):
            running = levels.in_flight(actor)
            if not running or (step and done[actor, step - 1]):
                running = [levels.next_level(actor)]
            level_id[actor, step] = running[-1]
    values = torch.rand(2, actors, steps, 1, generator=generator, dtype=torch.float64)
    reward = torch.rand(actors, steps, generator=generator, dtype=torch.float64)
    following = {"reward": reward, "state_value": values[1], "terminated": terminated, "done": done}
    following |= {"truncated": done & ~terminated} if seed % 2 else {"terminated": done}
    logits = torch.randn(actors, steps, 3, generator=generator)
    return TensorDict(
        {"state_value": values[0], "logits": logits, "next": TensorDict(following, [actors, steps])}, [actors, steps]
    ), level_id


def same(state: Any, other: Any, path: str = "") -> None:
    if isinstance(state, dict):
        assert state.keys() == other.keys(), path
        for key in state:
            if key != "prioritization":  # trees that are filled anew have sums of another rounding
                same(state[key], other[key], f"{path}.{key}")
    elif isinstance(state, torch.Tensor):
        torch.testing.assert_close(state, other, rtol=0, atol=1e-12, msg=lambda text: f"{path}: {text}")
    else:
        assert state == pytest.approx(other, abs=1e-12) if isinstance(state, float) else state == other, path


@pytest.mark.slow
@settings(max_examples=60)
@given(
    score=st.sampled_from(range(len(SCORES))),
    count=st.sampled_from([1, 3, 8, None]),
    step_size=st.sampled_from([1.0, 0.3]),
    first_score=st.sampled_from(["replace", "smooth"]),
    proportional=st.booleans(),
    in_flight=st.booleans(),
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_a_rollout_is_learned_as_by_updates_one_by_one(
    score, count, step_size, first_score, proportional, in_flight, shapes, seed
):
    if count is None and score in (7, 8):
        count = 3  # scores of whole episodes are of known levels
    options = {
        "score_step_size": step_size,
        "first_score": first_score,
        "prioritization": Proportional() if proportional else None,
        "replay_in_flight": in_flight,
        "score_temperature": 0.7,
        "seed": seed,
    }
    where = (
        {"levels": count} if count else {"capacity": 4, "generate": lambda g: int(torch.randint(9, (), generator=g))}
    )
    whole, single = (LevelBuffer(**where, score=SCORES[score](), **options) for _ in range(2))
    for number, (actors, steps) in enumerate(shapes):
        rollout, level_id = played(whole, actors, steps, seed + number)
        again, chosen = played(single, actors, steps, seed + number)
        assert torch.equal(level_id, chosen), "both choose the same levels"
        update_rollout(whole, rollout, level_id)
        one_by_one(single, again, level_id)
        same(whole.state_dict(), single.state_dict())
        for levels in (whole, single):
            for actor in range(actors, 4):
                levels.abandon(actor)


@settings(max_examples=60)
@given(
    fault=st.sampled_from(["reward", "value", "end", "running end", "level", "twice", "logits"]),
    where=st.tuples(st.integers(0, 3), st.integers(0, 4)),
    seed=st.integers(0, 1000),
)
def test_a_rollout_with_one_wrong_segment_changes_nothing(fault, where, seed):
    levels = LevelBuffer(6, score=level_scores.L1ValueLoss(0.9, 0.8), seed=seed)
    rollout, level_id = played(levels, 4, 5, seed * 2 + 1)
    actor, step = where
    if fault == "reward":
        rollout["next", "reward"][actor, step] = torch.nan
    elif fault == "value":
        rollout["state_value"][actor, step] = -torch.inf
    elif fault == "logits":
        rollout["logits"][actor, step, 1] = torch.nan
    elif fault == "end":
        rollout["next", "truncated"][actor, step] = not rollout["next", "done"][actor, step]
        rollout["next", "terminated"][actor, step] = False
    elif fault == "running end":
        rollout["next", "done"][actor, 4] = not rollout["next", "done"][actor, 4]
    elif fault == "level":
        level_id[actor, :] = 99
    else:  # an end more than the actor has begun
        levels.abandon_all_but_newest(actor)
        level_id[actor, :] = levels.in_flight(actor)[-1]
        for key in ("done", "terminated"):
            rollout["next", key][actor, :2] = True
        rollout["next", "truncated"][actor, :2] = False
    before = levels.state_dict()
    with pytest.raises(ValueError):
        update_rollout(levels, rollout, level_id)
    same(before, levels.state_dict())


def test_what_was_scored_before_a_score_failed_is_kept():
    class Third(MeanReward):
        def of_columns(self, columns):
            if columns.reward[0] == 3.0:
                raise RuntimeError("the third")
            return super().of_columns(columns)

    levels = LevelBuffer(5, score=Third(), seed=0)
    for actor, level in enumerate((4, 2, 1, 0)):
        levels.start(actor, level)
    done = torch.ones(4, 1, dtype=torch.bool)
    following = {"reward": torch.arange(1.0, 5.0).unsqueeze(1), "state_value": torch.zeros(4, 1)}
    rollout = TensorDict(
        {"state_value": torch.zeros(4, 1), "next": following | {"done": done, "terminated": done}}, [4, 1]
    )
    with pytest.raises(RuntimeError, match="the third"):
        update_rollout(levels, rollout, torch.tensor([[4], [2], [1], [0]]))
    assert levels.table.level_ids == [4, 2] and levels.table.scores.tolist() == [1.0, 2.0]
    assert [levels.in_flight(actor) for actor in range(4)] == [[], [], [1], [0]]
