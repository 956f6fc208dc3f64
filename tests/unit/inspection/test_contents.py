# SPDX-License-Identifier: Apache-2.0
"""What a buffer in use holds, by numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchrl.data import LazyTensorStorage

from lightning_replay import Replay, recipes
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.inspection.contents import (
    Draws,
    LevelContents,
    ReplayContents,
    highest_episodes,
    look_at,
    shown_rows,
)
from lightning_replay.inspection.page import edges_of
from lightning_replay.levels import LevelBuffer, UniformLevels
from lightning_replay.writers import SurpriseOnly
from tests.level_steps import segment
from tests.transitions import numbered_steps


def prioritized(priorities: list[float], exponent: float = 1.0) -> Replay:
    """A row for each priority."""
    replay = recipes.prioritized(8, 2, priority_exponent=exponent, priority_offset=0.0, seed=0)
    slots = replay.extend(numbered_steps(0, len(priorities), done_every=2))
    replay.update_priority(slots, torch.tensor(priorities))
    return replay


def test_ages_in_a_ring_that_was_written_around() -> None:
    replay = recipes.uniform(capacity=4, batch_size=2)
    replay.extend(numbered_steps(0, 6))
    contents = look_at(replay)
    # slots hold rows    4  5  2  3
    assert contents.written is not None and contents.written.tolist() == [4, 5, 2, 3]
    assert contents.ages is not None and contents.ages.tolist() == [1, 0, 3, 2]
    assert contents.columns["next", "reward"].tolist() == [4.0, 5.0, 2.0, 3.0]
    assert (len(contents), contents.capacity, contents.given) == (4, 4, 6)


def test_effective_sample_size_and_share_of_draws() -> None:
    contents = look_at(prioritized([3.0, 1.0, 1.0, 1.0]))
    np.testing.assert_allclose(contents.draws.probability, [1 / 2, 1 / 6, 1 / 6, 1 / 6])
    assert contents.draws.effective_rows == pytest.approx(3.0)  # 1 / (1/4 + 3/36)
    assert contents.draws.share_of_top(0.25) == pytest.approx(0.5)
    assert contents.draws.priority.tolist() == [3.0, 1.0, 1.0, 1.0]
    figures = contents.figures()
    assert figures["effective_share"] == pytest.approx(0.75) and figures["priority_mean"] == 1.5
    assert prioritized([3.0, 1.0, 1.0, 1.0]).stats()["effective_sample_size"] == pytest.approx(3.0)
    assert Draws(np.full(5, 0.2)).effective_rows == pytest.approx(5.0)
    replay = recipes.uniform(capacity=8, batch_size=2)
    replay.extend(numbered_steps(0, 5))
    assert look_at(replay).figures()["effective_sample_size"] == pytest.approx(5.0)
    contents = look_at(prioritized([4.0, 1.0], exponent=0.5))
    np.testing.assert_allclose(contents.draws.probability, [2 / 3, 1 / 3])
    np.testing.assert_allclose(contents.draws.priority, [4.0, 1.0], rtol=1e-6)
    flat = look_at(prioritized([4.0, 1.0], exponent=0.0)).draws
    assert flat is not None and flat.priority is None and flat.probability.tolist() == [0.5, 0.5]


def test_tables_are_drawn_by_their_shares_or_as_they_were_so_far() -> None:
    table = EventTable("high", condition=reward_at_least(3.0), history_length=1, capacity=2, min_size=1, share=0.5)
    replay = recipes.event_tables(capacity=4, batch_size=4, tables=[table], seed=0)
    replay.extend(numbered_steps(0, 5))  # the default table holds 1 to 4, the other 3 and 4
    contents = look_at(replay)
    assert [(one.name, len(one.slots), one.share, one.appended) for one in contents.tables] == [
        ("default", 4, 0.5, 5),
        ("high", 2, 0.5, 2),
    ]
    by_number = dict(zip(contents.written.tolist(), contents.draws.probability.tolist(), strict=True))
    # half of a batch from four rows, half from two
    assert by_number == pytest.approx({1: 0.125, 2: 0.125, 3: 0.375, 4: 0.375})
    assert contents.tables[1].events == pytest.approx(0.4)
    replay.sample()
    assert [one.drawn for one in look_at(replay).tables] == [2, 2]
    replay = recipes.parallel_curriculum(["near", "far"], capacity_per_task=4, batch_size=2, min_size=1, seed=0)
    replay.extend(numbered_steps(0, 2).set("task", torch.tensor([0, 1])))
    draws = look_at(replay).draws
    assert draws is not None and draws.of_tables == [0.5, 0.5]  # nothing was drawn yet
    replay.sampler.rows_drawn = np.array([3, 1])
    drawn = look_at(replay).draws
    assert drawn is not None and drawn.probability.tolist() == [0.75, 0.25]


def test_who_stayed_of_the_rows_that_were_offered() -> None:
    replay = recipes.surprise_retention(
        4, 2, rule=SurpriseOnly(), initial_surprise=lambda rows: rows["next", "reward"].flatten() % 4, seed=0
    )
    for number in range(8):
        replay.extend(numbered_steps(number, 1))
    contents = look_at(replay)
    retained = contents.retained
    assert sorted(contents.written.tolist()) == [2, 3, 6, 7]  # surprise 2 and 3 of each four
    edges, kept = retained.kept_by_arrival(4)
    assert edges.tolist() == [0, 2, 4, 6, 8] and kept.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert (retained.offered, retained.refused + retained.evicted) == (8, 4)
    assert dict(zip(contents.written.tolist(), retained.surprise.tolist(), strict=True)) == {2: 2, 3: 3, 6: 2, 7: 3}


def test_episodes_of_the_highest_mean_priority_or_return() -> None:
    #      episode ends     v        v        v
    replay = prioritized([1.0, 2.0, 9.0, 1.0, 3.0, 3.0])
    ranked = highest_episodes(look_at(replay), 2)
    assert ranked is not None and (ranked.by, ranked.total) == ("mean priority", 3)
    assert [(one.places.tolist(), one.rank) for one in ranked.episodes] == [([2, 3], 5.0), ([4, 5], 3.0)]
    assert [one.episode_return for one in ranked.episodes] == [2.0 + 3.0, 4.0 + 5.0]
    replay = recipes.uniform(capacity=8, batch_size=2)
    steps = numbered_steps(0, 6)
    steps["trajectory"] = torch.tensor([7, 8, 7, 8, 7, 8])
    replay.extend(steps)
    ranked = highest_episodes(look_at(replay), 1)
    assert ranked is not None and ranked.by == "return"
    assert ranked.episodes[0].places.tolist() == [1, 3, 5] and ranked.episodes[0].episode_return == 9.0
    values = [0.0] * 20 + [5.0] + [0.0] * 9
    ranked = highest_episodes(look_at_rows(values), 1)
    shown = shown_rows(ranked.episodes[0], 4)
    assert 20 in shown and len(shown) == 4 and (np.diff(shown) > 0).all()


def look_at_rows(rewards: list[float]) -> ReplayContents:
    replay = recipes.uniform(capacity=len(rewards), batch_size=2)
    replay.extend(numbered_steps(0, len(rewards)).set(("next", "reward"), torch.tensor(rewards)[:, None]))
    return look_at(replay)


def test_an_empty_buffer_and_one_of_torchrls_storages_and_what_is_none() -> None:
    empty = look_at(recipes.prioritized(10, 2))
    assert len(empty) == 0 and empty.draws is None and empty.figures()["fill"] == 0.0
    foreign = Replay(storage=LazyTensorStorage(10), batch_size=2)
    foreign.extend(numbered_steps(0, 5))
    contents = look_at(foreign)
    assert len(contents) == 5 and not contents.columns and not contents.images
    assert contents.ages is not None and contents.ages.tolist() == [4, 3, 2, 1, 0]
    with pytest.raises(TypeError, match="buffer is .buffer.; it must be a Replay or a level source"):
        look_at("buffer")  # type: ignore[arg-type]


def test_levels() -> None:
    levels = LevelBuffer(levels=[5, 3], min_fill=1.0, staleness_weight=0.0, score_temperature=1.0, seed=0)
    for actor, level_id in enumerate(levels.next_level(actor) for actor in (0, 1)):
        levels.update(actor, level_id, segment([level_id]), episode_done=True)
    contents = look_at(levels)
    assert contents.level_ids.tolist() == [3, 5] and contents.score.tolist() == [3.0, 5.0]
    np.testing.assert_allclose(contents.probability, [1 / 3, 2 / 3])  # weights of ranks 1 and 1/2
    assert contents.effective_levels == pytest.approx(9 / 5)
    assert sorted(contents.staleness.tolist()) == [0, 1]
    without = look_at(UniformLevels(levels=4, seed=0))
    assert isinstance(without, LevelContents) and len(without) == 0


def test_edges_of_histograms() -> None:
    edges, is_log = edges_of(np.array([0.001, 1.0]), 3)
    assert is_log and edges == pytest.approx([0.001, 0.01, 0.1, 1.0])
    edges, is_log = edges_of(np.array([2.0, 2.0]))
    assert not is_log and edges.tolist() == [1.5, 2.5]
