# SPDX-License-Identifier: Apache-2.0
"""Level sampler and writer in TorchRL's own replay buffer."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RoundRobinWriter

from lightning_replay.levels import LevelSampler, LevelWriter


def level_buffer(capacity: int = 3, batch_size: int = 2, **options) -> TensorDictReplayBuffer:
    sampler = LevelSampler(**{"seed": 0, **options})
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity), sampler=sampler, writer=LevelWriter(sampler), batch_size=batch_size
    )


def rows(ids: list[int], scores: list[float], **columns) -> TensorDict:
    return TensorDict({"level_id": torch.tensor(ids), "score": torch.tensor(scores), **columns}, [len(ids)])


def test_levels_with_data_of_their_own_are_stored_scored_and_drawn():
    levels = level_buffer(score_temperature=1e-3, staleness_weight=0.0)
    index = levels.extend(rows([7, 8], [0.5, 0.25], layout=torch.arange(8).view(2, 2, 2)))
    assert index.tolist() == [0, 1]
    batch = levels.sample()
    assert batch["level_id"].tolist() == [7, 7]
    assert batch["layout"][0].tolist() == [[0, 1], [2, 3]]
    assert batch["score"].tolist() == [0.5, 0.5]
    assert batch["staleness"].tolist() == [1, 0], "each draw is an episode, and makes the level fresh"
    levels.update_priority(torch.tensor([1]), torch.tensor([0.75]))
    assert levels.sample()["level_id"].tolist() == [8, 8]


def test_a_refused_level_has_the_row_minus_one_and_a_known_one_keeps_its_own():
    levels = level_buffer(2, staleness_weight=0.0)
    index = levels.extend(rows([7, 8, 9], [0.5, 0.25, 0.1]))
    assert index.tolist() == [0, 1, -1]
    levels.update_priority(index, torch.tensor([0.5, 0.3, 0.9]))
    assert levels.sampler.scores.tolist() == pytest.approx([0.5, 0.3])
    assert levels.extend(rows([9], [0.4])).tolist() == [1]
    assert levels.storage.get(slice(None))["level_id"].tolist() == [7, 9]
    assert levels.add(rows([10], [0.2])[0]) == -1
    levels = level_buffer(1, staleness_weight=0.0)
    assert levels.extend(rows([7, 8, 8], [0.1, 0.2, 0.3])).tolist() == [-1, 0, 0]
    assert levels.extend(rows([8], [0.05], timestamp=torch.tensor([2]))).tolist() == [0]
    assert levels.sampler.scores.tolist() == pytest.approx([0.05])
    assert levels.storage.get(slice(None))["level_id"].tolist() == [8]


def test_save_and_load_give_the_same_draws(tmp_path):
    levels = level_buffer(batch_size=20, staleness_weight=0.5)
    levels.extend(rows([4, 5, 6], [0.3, 0.2, 0.1]))
    levels.sample()
    levels.dumps(tmp_path / "levels")
    other = level_buffer(batch_size=20, staleness_weight=0.5, seed=9)
    other.extend(rows([1], [0.3]))
    other.loads(tmp_path / "levels")
    again = level_buffer(batch_size=20, staleness_weight=0.5, seed=8)
    again.load_state_dict(levels.state_dict())
    expected = levels.sample()["level_id"].tolist()
    assert other.sample()["level_id"].tolist() == expected
    assert again.sample()["level_id"].tolist() == expected
    assert other.extend(rows([5], [0.4])).tolist() == [1]


def test_feedback_after_a_level_left_its_row_goes_by_id_or_is_dropped():
    levels = level_buffer(1, batch_size=1)
    levels.extend(rows([7], [0.1]))
    batch = levels.sample()
    levels.extend(rows([8], [0.2]))
    levels.sampler.update_priority(batch["index"], torch.tensor([0.9]), generation=batch["generation"])
    assert levels.sampler.dropped == 1
    assert levels.sampler.scores.tolist() == pytest.approx([0.2])
    batch["score"] = torch.tensor([0.15])
    fed_back = batch.select("level_id", "score", "timestamp")
    assert levels.extend(fed_back).tolist() == [-1], "7 is a new level now, and not good enough"
    batch = levels.sample()
    levels.sampler.update_priority(batch["index"], torch.tensor([0.4]), generation=batch["generation"])
    assert levels.sampler.scores.tolist() == pytest.approx([0.4])
    episodes = levels.sampler.episodes
    assert levels.extend(batch.select("level_id", "score", "timestamp")).tolist() == [0]
    assert levels.sampler.episodes == episodes, "the draw has counted the episode"


def test_data_that_does_not_fit_what_is_stored_is_refused_before_anything_is_changed():
    levels = level_buffer()
    levels.extend(rows([1], [0.5], layout=torch.zeros(1, 4)))
    layouts = (torch.zeros(1, 5), torch.zeros(1, 4).long())
    for other in (*({"layout": layout} for layout in layouts), {}, {"x": torch.zeros(1)}):
        with pytest.raises(ValueError, match="same keys, shapes and dtypes"):
            levels.extend(rows([2], [0.9], **other))
    assert len(levels.sampler) == 1
    assert levels.extend(rows([2], [0.9], layout=torch.zeros(1, 4))).tolist() == [1]
    assert levels.extend(rows([2], [0.9], layout=torch.zeros(1, 4))[:0]).dtype == torch.int64


def test_an_emptied_buffer_begins_anew():
    levels = level_buffer()
    levels.extend(rows([4, 5], [0.3, 0.2]))
    levels.empty()
    with pytest.raises(RuntimeError, match="no level has a score yet"):
        levels.sample()
    assert levels.extend(rows([6], [0.3])).tolist() == [0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (rows([-1], [0.5]), "must not be negative; got -1"),
        (rows([1], [math.nan]), "scores must be finite; got nan"),
        (rows([1, 2], [0.5, math.inf]), "scores must be finite; got inf"),
        (rows([1], [0.5], timestamp=torch.tensor([2])), "numbers of episodes, 0 to 1"),
        (rows([1], [0.5], timestamp=torch.tensor([-1])), r"timestamps are \[-1\]"),
        (rows([1], [0.5], timestamp=torch.tensor([0.5])), "float32 .1. 'timestamp'; give one whole number each"),
        (rows([1], [0.5]).exclude("level_id"), "no 'level_id'"),
        (rows([1], [0.5]).exclude("score"), "no 'score'; give one number each"),
        (TensorDict({"level_id": torch.tensor([0.5]), "score": torch.tensor([0.5])}, [1]), "whole number"),
    ],
)
def test_levels_that_are_refused_at_the_door(given, message):
    levels = level_buffer()
    levels.extend(rows([3], [0.5]))
    with pytest.raises(ValueError, match=message):
        levels.extend(given)
    assert len(levels) == 1


def test_scores_and_writers_that_are_refused():
    levels = level_buffer()
    levels.extend(rows([3], [0.5]))
    with pytest.raises(ValueError, match="one finite score per row"):
        levels.update_priority(torch.tensor([0]), torch.tensor([math.nan]))
    with pytest.raises(IndexError, match="row 2 holds no level"):
        levels.update_priority(torch.tensor([2]), torch.tensor([0.5]))
    levels = TensorDictReplayBuffer(
        storage=LazyTensorStorage(3), sampler=LevelSampler(), writer=RoundRobinWriter(), batch_size=1
    )
    with pytest.raises(RuntimeError, match="writer must be LevelWriter"):
        levels.extend(rows([3], [0.5]))
    with pytest.raises(TypeError, match="must be the LevelSampler"):
        LevelWriter(object())
