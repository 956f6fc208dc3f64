# SPDX-License-Identifier: Apache-2.0
"""Priorities within tables and the weights that correct for them, by hand-worked numbers."""

from __future__ import annotations

import pytest
import torch
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from lightning_replay import recipes
from lightning_replay.events import EventTable
from lightning_replay.schedules import Linear
from tests.event_steps import IsTrue, by_row, event_steps, fill, six_steps


def test_one_priority_holds_in_every_table_that_refers_to_the_row() -> None:
    """Slot 4 alone has a priority above 0, so it is all that is drawn from either table."""
    replay = six_steps()
    replay.update_priority(torch.arange(6), torch.tensor([0.0, 0, 0, 0, -2, 0]))
    batch = replay.sample()
    assert batch["index"].tolist() == [4] * 4 and batch["table"].tolist() == [0, 0, 1, 1]


def test_the_last_of_several_td_errors_for_a_row_counts() -> None:
    replay = six_steps()
    replay.update_priority(torch.arange(6), torch.zeros(6))
    replay.update_priority(torch.tensor([4, 3, 4]), torch.tensor([5.0, 1.0, 0.0]))
    assert replay.sample()["index"].tolist() == [3] * 4


def test_a_priority_exponent_set_later_holds_for_all_rows() -> None:
    """Priorities 1 and 3 in the goal's table: shares 1/4 and 3/4, and with exponent 2 1/10 and 9/10."""
    replay = six_steps(importance_exponent=1.0)
    replay.update_priority(torch.arange(6), torch.tensor([1.0, 1, 1, 1, 3, 1]))
    replay.sample()
    assert replay.group_totals().mass.tolist() == [8.0, 4.0]
    replay.sampler.priority_exponent = 2.0
    replay.sample()
    assert replay.group_totals().mass.tolist() == [14.0, 10.0]


def test_new_rows_get_the_largest_priority_given_so_far() -> None:
    replay = six_steps()
    sampler = replay.sampler
    assert sampler.default_priority == 1.0
    replay.update_priority(torch.arange(6), torch.tensor([0.0, 0, 0, 0, 7.0, 0]))
    replay.update_priority(torch.arange(6), torch.zeros(6))
    assert sampler.default_priority == 7.0
    slot = int(replay.extend(event_steps(6, 1, {}, ["goal"])))
    assert replay.sampler.state_dict()["priority"][slot] == 7.0
    with pytest.raises(RuntimeError, match="all rows of table 'goal' have priority 0; use a positive priority_offset"):
        replay.sample()


def test_a_row_keeps_its_priority_when_an_event_sends_it_to_a_table() -> None:
    """Slots 0 and 1 have priorities 3 and 1 before the event of slot 2 (new: 3) sends all three to its table."""
    table = EventTable("goal", condition=IsTrue("goal"), history_length=3, capacity=4, min_size=1)
    options = {"priority_exponent": 1.0, "importance_exponent": 1.0, "priority_offset": 0.0}
    replay = recipes.event_tables(4, 8, tables=[table], default_share=0.0, seed=0, **options)
    replay.extend(event_steps(0, 2, {}, ["goal"], ends=False))
    replay.update_priority(torch.arange(2), torch.tensor([3.0, 1.0]))
    replay.extend(event_steps(2, 1, {0: {"goal"}}, ["goal"]))
    assert by_row(replay) == pytest.approx({(1, 0): 1 / 3, (1, 1): 1.0, (1, 2): 1 / 3})


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_weights_correct_for_priorities_within_the_table_over_the_largest_of_all_tables(exponent: float) -> None:
    """Priorities 1 1 2 1 3 4, of which the goal table has those of slots 3 and 4: 1 and 3::

    table      sum    n P of each                              smallest
    default    12     1/2 1/2 1 1/2 3/2 2                      1/2
    goal       4      (slot 3) 1/2, (slot 4) 3/2               1/2
    """
    replay = six_steps(importance_exponent=exponent)
    replay.update_priority(torch.arange(6), torch.tensor([1.0, 1, 2, 1, 3, 4]))
    ratio = {(0, slot): value for slot, value in enumerate([0.5, 0.5, 1.0, 0.5, 1.5, 2.0])}
    ratio |= {(1, 3): 0.5, (1, 4): 1.5}
    found = by_row(replay)
    assert found == pytest.approx({key: (value / 0.5) ** -exponent for key, value in ratio.items()})


def test_the_largest_weight_may_belong_to_a_table_that_is_not_drawn_from() -> None:
    """The goal table (priorities 1 and 7, least n P 1/4) is not ready; the default's least n P is 6 / 13."""
    replay = six_steps(least_of_goal=3, importance_exponent=1.0)
    replay.update_priority(torch.arange(6), torch.tensor([1.0, 1, 2, 1, 7, 1]))
    found = by_row(replay)
    assert found[0, 0] == pytest.approx(0.25 / (6 / 13))


def test_rows_of_priority_zero_in_a_table_that_is_not_drawn_from_do_no_harm() -> None:
    replay = six_steps(least_of_goal=3)
    replay.update_priority(torch.arange(6), torch.tensor([1.0, 1, 1, 0, 0, 1]))
    assert replay.sample()["priority_weight"].tolist() == [1.0] * 4


def test_without_an_importance_exponent_priorities_have_no_weights() -> None:
    assert "priority_weight" not in six_steps(importance_exponent=0.0).sample()


def test_the_importance_exponent_follows_its_clock() -> None:
    replay = six_steps(importance_exponent=Linear(0.0, 1.0, 10, clock="updates"))
    replay.update_priority(torch.arange(6), torch.tensor([1.0, 1, 2, 1, 3, 4]))
    assert "priority_weight" not in replay.sample()
    replay.advance(updates=10)
    assert by_row(replay)[0, 5] == pytest.approx(0.25)


def test_the_importance_exponent_may_be_set_under_either_name() -> None:
    replay = six_steps(importance_exponent=0.0)
    replay.update_priority(torch.arange(6), torch.tensor([1.0, 1, 2, 1, 3, 4]))
    replay.sampler.beta = 1.0
    assert by_row(replay)[0, 5] == pytest.approx(0.25)
    replay.sampler.importance_exponent = 0.5
    assert by_row(replay)[0, 5] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="importance_exponent is -1"):
        replay.sampler.beta = -1.0


def test_sampler_and_feedback_without_priorities_are_left_alone() -> None:
    replay = six_steps(priority_exponent=0.0)
    replay.update_priority(torch.arange(6), torch.ones(6))
    assert not replay.is_prioritized and replay.sampler.nbytes == 0
    assert six_steps().sampler.nbytes > 0


def drawn(buffer: ReplayBuffer) -> set[int]:
    """Slots of 100 batches."""
    return {slot for _ in range(100) for slot in buffer.sample()["index"].tolist()}


def test_a_sampler_that_was_exchanged_draws_the_rows_written_meanwhile() -> None:
    replay = six_steps(capacity=20)
    replay.sample()
    before = replay.set_sampler(six_steps(capacity=20).sampler)
    fill(replay, episodes=1, first=6)
    assert drawn(replay) == {*range(11)}, "rows that came before the sampler"
    replay.set_sampler(before)
    assert drawn(replay) == {*range(11)}, "rows that came while it was away"
    fill(replay, episodes=1, first=11)
    assert drawn(replay) == {*range(16)}


def test_entries_reach_the_samplers_of_all_buffers_of_a_storage() -> None:
    replay, sampler = six_steps(capacity=20), six_steps(capacity=20).sampler
    reader = TensorDictReplayBuffer(storage=replay.storage, sampler=sampler, writer=replay.writer, batch_size=4)
    assert drawn(reader) == {*range(6)}
    fill(replay, episodes=1, first=6)
    assert drawn(reader) == {*range(11)}


def test_pushed_trees_are_those_that_a_loaded_buffer_builds() -> None:
    """Entries are overwritten in both tables, rows lie in both, and priorities differ."""
    options = {"importance_exponent": 1.0, "priority_exponent": 0.7, "batch_size": 50}
    replay = six_steps(**options)
    for start in range(6, 60, 5):
        fill(replay, episodes=1, first=start)
        batch = replay.sample()
        replay.update_priority(batch, batch["action"] % 7 + 1.0)
        loaded = six_steps(**options)
        loaded.load_state_dict(replay.state_dict())
        for name in ("mass", "smallest", "rows"):
            assert torch.equal(*(torch.from_numpy(getattr(one.group_totals(), name)) for one in (replay, loaded)))
