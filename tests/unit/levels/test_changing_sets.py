# SPDX-License-Identifier: Apache-2.0
"""Sets of levels that grow and shrink during a run: turns of new levels, late outcomes of retired ones, and saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_replay.levels import (
    LevelBatchSampler,
    LevelBuffer,
    LevelSelector,
    LevelSet,
    SequentialLevels,
    UniformLevels,
    scores,
    tscl,
)
from tests.level_steps import scored


def learned(levels: Any = 6, **options: Any) -> LevelBuffer:
    return LevelBuffer(levels, **{"score": scores.Learnability(window=4), "seed": 0, **options})


def half(count: int) -> torch.Tensor:
    return torch.tensor([0.0, 1.0]).expand(count, 2)


SELECTORS: dict[str, Callable[[Any], LevelSelector]] = {
    "learnability": learned,
    "learnability, in flight": lambda levels: learned(levels, replay_in_flight=True, replay_probability=1.0),
    "uniform": lambda levels: UniformLevels(levels, seed=0),
    "sequential": SequentialLevels,
    "learning progress": lambda levels: tscl(levels, seed=0),
}


@pytest.mark.parametrize("kind", [name for name in SELECTORS if name != "learning progress"])
@pytest.mark.parametrize("replace", [False, True])
def test_added_levels_are_drawn_next(kind: str, replace: bool) -> None:
    levels = SELECTORS[kind](6)
    for _ in range(3):
        drawn = levels.next_levels(6)
        levels.record(drawn, outcomes=half(6)) if isinstance(levels, LevelBuffer) else levels.record(drawn)
    assert levels.add([10, 11, 12]) == [10, 11, 12]
    assert levels.count == 9
    assert {10, 11} <= {levels.next_level("actor"), *levels.next_levels(1, replace=replace).tolist()}
    batch = levels.next_levels(4, replace=replace).tolist()
    assert 12 in batch
    if not replace:
        assert len({*batch}) == 4


@pytest.mark.parametrize("kind", SELECTORS)
def test_retired_levels_are_drawn_no_more_and_late_outcomes_change_nothing(kind: str) -> None:
    levels = SELECTORS[kind](6)
    drawn = levels.next_levels(6).tolist()
    first, second, *others = drawn
    levels.retire([first, second])
    assert levels.count == 4 and levels.stats()["in_flight"] == 4
    before = repr(levels.state_dict())
    if kind.startswith("learnability"):
        assert levels.record([first, second], outcomes=half(2)).isnan().all()
    elif isinstance(levels, LevelBuffer):
        assert levels.record([first], [0.5]).isnan().all()
    else:
        levels.record([first, second])
    levels.abandon_levels([second])
    assert repr(levels.state_dict()) == before
    for _ in range(30):
        assert {*levels.next_levels(4).tolist()} == {*others}
    assert {levels.next_level(actor) for actor in range(30)} <= {*others}


def test_steps_of_a_retired_level_change_nothing() -> None:
    levels = LevelBuffer(4, seed=0)
    level_id = levels.next_level(0)
    levels.retire([level_id])
    levels.update(0, level_id, scored(0.5, length=3), episode_done=True)
    assert len(levels) == 0 and levels.stats()["in_flight"] == 0
    with pytest.raises(ValueError, match=f"level {level_id} was retired from the 3 levels"):
        levels.start(0, level_id)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda levels: levels.add([3]), r"levels has \[3\], which are or were levels of this set"),
        (lambda levels: levels.add([9, 9]), "level 9 is given twice"),
        (lambda levels: levels.add(9), "levels is 9; give the ids of the new levels"),
        (lambda levels: levels.add([9], weights=[1.0]), "groups and weights are of the objects of a LevelSet"),
        (lambda levels: levels.add(["text"]), "put objects into LevelSet"),
        (lambda levels: levels.retire([9]), r"level_id has \[9\]; none of the 6 levels"),
        (lambda levels: levels.retire(range(6)), "level_ids are all 6 levels"),
    ],
)
def test_wrong_changes(change: Callable[[LevelBuffer], Any], told: str) -> None:
    levels = learned()
    before = repr(levels.state_dict())
    with pytest.raises((TypeError, ValueError), match=told):
        change(levels)
    assert repr(levels.state_dict()) == before


def test_an_unbounded_set_is_not_changed() -> None:
    levels = LevelBuffer(None, capacity=3, seed=0)
    for change in (levels.add, levels.retire):
        with pytest.raises(ValueError, match="the set of levels is unbounded"):
            change([1])


def test_a_retired_level_does_not_come_back() -> None:
    levels = learned()
    levels.retire([2])
    with pytest.raises(ValueError, match="which are or were levels"):
        levels.add([2])
    levels.retire([2])  # again, as of two processes
    assert levels.count == 5


def test_objects_are_added_with_groups_and_weights() -> None:
    prompts = LevelSet(["a", "b"], groups=["easy", "hard"], weights=[1.0, 2.0])
    levels = learned(prompts)
    levels.record([0, 1], outcomes=half(2))
    assert levels.add(["c", "d"], groups=["hard", "new"], weights=[3.0, 4.0]) == [2, 3]
    assert prompts[3] == {"level": "d", "level_id": 3} and prompts.weights.tolist() == [1.0, 2.0, 3.0, 4.0]
    levels.record([2, 3], outcomes=half(2))
    assert levels.group_stats()["hard"] == {
        "levels": 2.0,
        "scored": 2.0,
        "score_mean": 0.25,
        "share": pytest.approx(0.5),
    }
    levels.retire([1])
    assert levels.group_stats()["hard"]["levels"] == 1.0
    # Weights 1, 3, and 4 of equal scores, and a share of 0.3 for staleness, which all but level 3 have alike.
    by_score = levels.table._by_score(())
    np.testing.assert_allclose(by_score, [1 / 8, 3 / 8, 4 / 8])
    with pytest.raises(ValueError, match="groups is None, and this set was built with"):
        levels.add(["e"])
    with pytest.raises(ValueError, match="weights has 2 entries for 1 levels"):
        levels.add(["e"], groups=["new"], weights=[1.0, 2.0])
    with pytest.raises(TypeError, match="level 0 is <object object.*give key="):
        levels.add([object()], groups=["new"])
    assert len(prompts) == 4


@pytest.mark.parametrize("kind", [name for name in SELECTORS if name != "learning progress"])
def test_a_save_of_a_smaller_set_loads_into_the_grown_one(kind: str) -> None:
    saved, grown = SELECTORS[kind]([4, 7, 9]), SELECTORS[kind]([9, 5, 4, 7])
    drawn = saved.next_levels(2)
    saved.next_level("actor")
    saved.record(drawn, outcomes=half(2)) if isinstance(saved, LevelBuffer) else saved.record(drawn)
    saved.next_levels(1)
    grown.load_state_dict(saved.state_dict())
    assert grown.count == 4 and len(grown) == len(saved) and grown.episodes == saved.episodes
    assert grown.in_flight("actor") == saved.in_flight("actor")
    assert grown.running.draws() == saved.running.draws()
    known, other = saved.probabilities(), grown.probabilities()
    assert torch.equal(known["level_id"], other["level_id"]) and torch.equal(known["score"], other["score"])
    assert 5 in grown.next_levels(4).tolist()


def test_a_save_refers_to_objects_by_name_whatever_their_order() -> None:
    rows = [{"id": f"q{number}", "question": f"{number} + 1 ="} for number in range(5)]
    saved = learned(LevelSet(rows, name="id"))
    saved.record([0, 1, 4], outcomes=torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0]]))
    saved.retire([3])
    changed = [rows[4], {"id": "new", "question": "7 + 7 ="}, rows[3], rows[0]]
    other = learned(LevelSet(changed, name=lambda row: row["id"]))
    other.load_state_dict(saved.state_dict())
    known = other.probabilities()
    assert dict(zip(known["level_id"].tolist(), known["outcomes"].tolist(), strict=True)) == {3: 2.0, 0: 2.0}
    assert {*other.next_levels(3).tolist()} == {0, 1, 3}, "level 2 was retired"
    for given, told in (
        ([*rows, rows[0]], "the name 'q0' is given twice"),
        ([{"question": "?"}], "name is 'id' and object 0 is .*, which has no such entry"),
        ([{"id": 1.5}], "the name of level 0 is 1.5"),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            LevelSet(given, name="id")
    with pytest.raises(TypeError, match="name is 3; it must be a column"):
        LevelSet(rows, name=3)


def test_without_names_the_saved_objects_must_be_the_first() -> None:
    saved = learned(LevelSet(["a", "b"]))
    saved.record([1], outcomes=half(1))
    grown = learned(LevelSet(["a", "b", "c"]))
    grown.load_state_dict(saved.state_dict())
    assert grown.probabilities()["level_id"].tolist() == [1]
    for other in (["b", "a"], ["a"], ["a", "x", "c"]):
        with pytest.raises(ValueError, match="are not the saved ones; give the same in the same order"):
            learned(LevelSet(other)).load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match="ids and these are objects, or the other way round"):
        learned(2).load_state_dict(saved.state_dict())


def test_learning_progress_needs_the_saved_names() -> None:
    # It keeps the episodes of all levels in one list.
    rows = [{"id": name} for name in "abc"]
    saved = tscl(LevelSet(rows, name="id"), seed=0)
    with pytest.raises(ValueError, match="the score keeps episodes of levels, and the set of levels is another"):
        for _ in range(2):
            saved.start(0, 1)
            saved.update(0, 1, scored(0.5), episode_done=True)
        tscl(LevelSet(rows[::-1], name="id"), seed=0).load_state_dict(saved.state_dict())


def test_a_state_that_fits_in_part_changes_no_set() -> None:
    levels, other = learned(), learned()
    other.add([30])
    other.retire([1])
    state = other.state_dict()
    before = repr(levels.state_dict())
    with pytest.raises(ValueError, match="lacks"):
        levels.load_state_dict(state | {"scoring": {}})
    assert repr(levels.state_dict()) == before and levels.count == 6
    assert torch.equal(levels.next_levels(6).sort().values, torch.arange(6))


@pytest.mark.parametrize("kind", SELECTORS)
def test_changes_survive_a_save(kind: str) -> None:
    levels, again = SELECTORS[kind](8), SELECTORS[kind](8)
    levels.next_levels(4)
    levels.retire([1, 6])
    levels.add([20, 21])
    again.load_state_dict(levels.state_dict())
    for _ in range(5):
        assert torch.equal(levels.next_levels(3), again.next_levels(3))
        assert levels.next_level(0) == again.next_level(0)
    assert repr(again.state_dict()) == repr(levels.state_dict()) and again.count == 8


def test_a_loader_serves_added_levels_and_workers_are_told() -> None:
    prompts = LevelSet(list("abcdef"))
    levels = learned(prompts)
    loader = DataLoader(prompts, batch_sampler=LevelBatchSampler(levels, 2, 4), collate_fn=list)
    seen = []
    for number, batch in enumerate(loader):
        if number == 1:
            levels.add(["new", "newer"])
            levels.retire([batch[0]["level_id"]])
        seen.append([item["level"] for item in batch])
        levels.record([item["level_id"] for item in batch], outcomes=half(2))
    assert {*seen[2]} == {"new", "newer"} and len(seen) == 4
    with pytest.raises(IndexError, match="Workers of a DataLoader do not have levels that are added"):
        prompts.level(99)


def test_a_sequential_batch_that_begins_with_added_levels_skips_no_other() -> None:
    levels = SequentialLevels(6)
    assert levels.next_levels(2).tolist() == [0, 1]
    levels.add([6, 7])
    # The added levels come first, and the order goes on behind the last level that it reached.
    assert levels.next_levels(4).tolist() == [6, 7, 2, 3]
    assert levels.next_levels(4).tolist() == [4, 5, 6, 7]
    assert levels.next_levels(8).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_uniform_batches_with_added_levels_have_all_others_equally_often() -> None:
    counts = np.zeros(8)
    for seed in range(400):
        levels = UniformLevels(6, seed=seed)
        levels.add([6, 7])
        drawn = levels.next_levels(5).tolist()
        assert drawn[:2] == [6, 7] and len({*drawn}) == 5
        counts[drawn[2:]] += 1
    # Each of the six others is drawn with probability 1/2; six standard deviations are 60.
    assert np.abs(counts[:6] - 200).max() < 60
