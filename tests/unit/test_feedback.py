# SPDX-License-Identifier: Apache-2.0
"""Feedback finds the rows that were drawn, whatever happened to the buffer since, and nothing else."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from lightning_replay import load_replay, recipes
from lightning_replay.events import EventTable
from lightning_replay.replay import Replay
from lightning_replay.writers import SurpriseOnly
from tests.attack.states import difference
from tests.event_steps import IsTrue, event_steps
from tests.recipe_options import built, fitting
from tests.stored import tree_leaves
from tests.transitions import numbered_steps

# Every kind of writer and of sampler that takes feedback.
LEARNERS = {
    "prioritized": {},
    "surprise_retention": {"rule": SurpriseOnly()},
    "neighborhood_mixup": {"priority_exponent": 0.7},
    "event_tables": {"priority_exponent": 0.7},
}


@pytest.fixture(params=LEARNERS)
def replay(request) -> Replay:
    return built(request.param, capacity=8, batch_size=8, seed=0, **LEARNERS[request.param])


def store(replay: Replay, first: int, count: int = 8) -> TensorDict:
    """Stores numbered rows of an episode that ends; those that are held then, as a batch that might have been drawn."""
    steps = fitting(replay, numbered_steps(first, count))
    for flag in ("terminated", "done"):
        steps["next", flag][-1] = True
    replay.extend(steps)
    slots = torch.arange(len(replay.storage))
    rows = replay.storage.get(slots, extra={"index": slots})
    return rows[rows["observation"][:, 0] >= first]


def dropped(replay: Replay, batch: TensorDict) -> int:
    """Of the rows of a batch those that feedback does not reach; no other row is reached by it either."""
    before = replay.stats()["stale_updates_dropped"]
    state = replay.state_dict()
    replay.update_priority(batch, torch.full((len(batch),), 5.0))
    count = replay.stats()["stale_updates_dropped"] - before
    if len(replay) and count == len(batch):
        for name in ("sampler", "writer"):
            assert difference(replay.state_dict()[name], state[name]) is None
    return count


def test_feedback_for_rows_that_are_held_is_not_dropped(replay, tmp_path) -> None:
    batch = store(replay, 0)
    assert dropped(replay, batch) == 0
    replay.save(tmp_path)
    assert dropped(load_replay(tmp_path), batch) == 0
    replay.load(tmp_path)
    assert dropped(replay, batch) == 0


@pytest.mark.parametrize("saves", [False, True])
def test_late_feedback_is_dropped_after_emptying(replay, saves: bool, tmp_path) -> None:
    batch = store(replay, 0)
    replay.empty()
    if saves:
        replay.save(tmp_path)
        replay = load_replay(tmp_path)
    assert dropped(replay, batch) == 8
    store(replay, 8)
    assert dropped(replay, batch) == 8


def test_late_feedback_is_dropped_after_saving_and_loading(replay, tmp_path) -> None:
    batch = store(replay, 0)
    newer = store(replay, 8)
    replay.save(tmp_path)
    again = load_replay(tmp_path)
    assert dropped(again, batch) == 8 and dropped(again, newer) == 0


@pytest.mark.parametrize(("before", "after"), [(8, 8), (4, 4), (0, 8)], ids=["all", "some", "to nothing"])
def test_feedback_for_rows_that_a_rollback_took_away_is_dropped(replay, before: int, after: int, tmp_path) -> None:
    """Rows that came after a save leave by its load, and others take their places again."""
    saved = store(replay, 0, before) if before else None
    replay.save(tmp_path)
    gone = store(replay, before, after)
    replay.load(tmp_path)
    assert dropped(replay, gone) == after and (saved is None or dropped(replay, saved) == 0)
    newest = store(replay, 16, after)
    assert dropped(replay, gone) == after and dropped(replay, newest) == 0
    assert saved is None or dropped(replay, saved) == (8 if before == 8 else 0)


def test_a_save_after_a_rollback_remembers_what_was_handed_out_before(replay, tmp_path) -> None:
    """Rows 8 to 15 had the second generation of their slots; after the load it is not given again, also elsewhere."""
    store(replay, 0)
    replay.save(tmp_path / "first")
    gone = store(replay, 8)
    replay.load(tmp_path / "first")
    replay.save(tmp_path / "second")
    again = load_replay(tmp_path / "second")
    store(again, 16)
    assert dropped(again, gone) == 8


def test_a_row_that_only_a_running_episode_holds_is_not_fed_back_to() -> None:
    """The default table holds 4 of 8 steps; the others wait in the history of their episode for an event."""
    table = EventTable("goal", condition=IsTrue("goal"), history_length=9, capacity=9, min_size=1)
    replay = recipes.event_tables(4, 4, tables=[table], priority_exponent=1.0, priority_offset=0.0, seed=0)
    slots = replay.extend(event_steps(0, 4, {}, ["goal"], ends=False))
    batch = TensorDict({"index": slots, "generation": replay.storage.generation_of(slots)}, [4])
    replay.extend(event_steps(4, 4, {}, ["goal"], ends=False))
    assert len(replay) == 8 and replay.table("default")["action"].tolist() == [4, 5, 6, 7]
    assert dropped(replay, batch) == 4
    replay.update_priority(slots, torch.full((4,), 100.0))
    assert replay.sampler.default_priority == 1.0
    newest = replay.extend(event_steps(8, 1, {}, ["goal"], ends=False))
    assert replay.sampler.state_dict()["priority"][newest].tolist() == [1.0]


def priorities(replay: Replay) -> list[float]:
    return tree_leaves(replay).tolist()


@pytest.fixture
def exact() -> Replay:
    """Rows 0 to 3 of 4, whose priorities are the magnitudes of their TD errors."""
    replay = recipes.prioritized(4, 4, priority_exponent=1.0, priority_offset=0.0, seed=0)
    replay.extend(numbered_steps(0, 4))
    return replay


def batch_of(*slots: int, generation: int = 1) -> TensorDict:
    return TensorDict({"index": torch.tensor(slots), "generation": torch.full((len(slots),), generation)}, [len(slots)])


def test_a_batch_carries_where_its_feedback_goes(exact) -> None:
    exact.update_priority(batch_of(2, 0), torch.tensor([-3.0, 0.5]))
    assert priorities(exact) == [0.5, 1.0, 3.0, 1.0]
    exact.update_priority(batch_of(2, 1, generation=2), torch.tensor([9.0, 9.0]))
    assert priorities(exact) == [0.5, 1.0, 3.0, 1.0] and exact.stats()["stale_updates_dropped"] == 2


def test_a_generation_given_beside_a_batch_counts(exact) -> None:
    exact.update_priority(batch_of(2), torch.tensor([9.0]), generation=torch.tensor([7]))
    assert exact.stats()["stale_updates_dropped"] == 1


def test_td_errors_are_needed_where_rows_are_drawn_by_them(exact) -> None:
    for signals in ({}, {"surprise": torch.ones(2)}):
        with pytest.raises(ValueError, match="td_error is None, and PrioritizedSampler draws by TD errors"):
            exact.update_priority(batch_of(2, 0), **signals)
    assert priorities(exact) == [1.0] * 4


def test_td_errors_may_be_left_out_where_signals_hold_all() -> None:
    replay = recipes.surprise_retention(4, 4, rule=SurpriseOnly(), priority_exponent=0.0, seed=0)
    replay.extend(numbered_steps(0, 4))
    replay.update_priority(batch_of(2, 0), surprise=torch.tensor([4.0, 0.25]))
    assert replay.writer.retention_priority(torch.arange(4)).tolist() == [0.25, 1.0, 4.0, 1.0]
    with pytest.raises(ValueError, match=r"surprise"):
        replay.update_priority(batch_of(2, 0))
    assert replay.writer.retention_priority(torch.arange(4)).tolist() == [0.25, 1.0, 4.0, 1.0]


@pytest.mark.parametrize("name", ["uniform", "prioritized", "surprise_retention"])
@pytest.mark.parametrize(
    ("td_error", "signals", "message"),
    [
        (torch.ones(2), {"suprise": torch.ones(2)}, "signal 'suprise'; the signals are .*[Dd]id you mean 'surprise'"),
        (torch.ones(2), {"weight": torch.ones(2)}, "signal 'weight'; the signals are action_values, action, surprise"),
        (torch.ones(2, dtype=torch.complex64), {}, "td_error is torch.complex64; it must be of real numbers"),
        (torch.ones(2, dtype=torch.bool), {}, "td_error is torch.bool; it must be of real numbers"),
        ("high", {}, "td_error is 'high'; it must be a tensor of real numbers"),
    ],
)
def test_feedback_of_another_kind_is_refused_whatever_the_buffer_learns(name, td_error, signals, message) -> None:
    replay = built(name, capacity=4, batch_size=4, seed=0)
    replay.extend(numbered_steps(0, 4))
    before = replay.state_dict()
    with pytest.raises(TypeError, match=message):
        replay.update_priority(batch_of(2, 0), td_error, **signals)
    assert difference(replay.state_dict(), before) is None


def test_a_batch_that_was_not_drawn_is_refused(exact) -> None:
    with pytest.raises(TypeError, match="a batch without 'index'; it has .*'observation'.*sample"):
        exact.update_priority(numbered_steps(0, 4), torch.ones(4))


@pytest.mark.parametrize("name", ["uniform", "prioritized", "surprise_retention"])
@pytest.mark.parametrize(
    ("index", "generation", "message"),
    [
        ([2, 0], torch.tensor([1.5, 1.5]), "generation is torch.float32; it must be the batch's 'generation', of an i"),
        ([2, 0], torch.tensor([True, True]), "generation is torch.bool; it must be the batch's 'generation', of an"),
        ([2, 0], "x", "generation is 'x'; it must be the batch's 'generation', of an integer dtype"),
        ({"index": torch.tensor([2, 0])}, None, "index is a dict; it must be the batch that was drawn, or its 'index'"),
        ("abc", None, "index is 'abc'; it must be the batch that was drawn, or its 'index'"),
    ],
)
def test_an_index_or_a_generation_of_another_kind_is_refused(name, index, generation, message) -> None:
    replay = built(name, capacity=4, batch_size=4, seed=0)
    replay.extend(numbered_steps(0, 4))
    before = replay.state_dict()
    with pytest.raises(TypeError, match=f"^{message}.*No priority was changed"):
        replay.update_priority(index, torch.ones(2), generation=generation)
    assert difference(replay.state_dict(), before) is None


def test_lists_and_tensors_with_gradients_are_numbers_too(exact) -> None:
    exact.update_priority(batch_of(2, 0), [-3.0, 0.5])
    exact.update_priority(batch_of(1), torch.tensor([2.0], requires_grad=True))
    assert priorities(exact) == [0.5, 2.0, 3.0, 1.0]


@pytest.mark.parametrize("batch", [True, False])
def test_td_errors_may_be_given_as_priority_as_in_torchrl(batch: bool) -> None:
    replay = recipes.prioritized(capacity=8, batch_size=4, priority_exponent=1.0, priority_offset=0.0, seed=0)
    replay.extend(numbered_steps(0, 8))
    drawn = replay.sample()
    errors = torch.zeros(8)[drawn["index"]] + drawn["index"] + 1
    replay.update_priority(index=drawn if batch else drawn["index"], priority=errors)
    assert replay.sampler.priority_of(drawn["index"]).equal(errors)
    with pytest.raises(TypeError, match="td_error and priority, TorchRL's name of the same; give one"):
        replay.update_priority(drawn, errors, priority=errors)
    with pytest.raises(ValueError, match="td_error must be finite"):
        replay.update_priority(drawn, priority=errors * float("nan"))
