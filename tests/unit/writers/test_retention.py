# SPDX-License-Identifier: Apache-2.0
"""The retention writer by hand-worked numbers: who enters, who leaves, what feedback changes, what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from lightning_replay import PackedStorage, Replay, load_replay, recipes, save_replay
from lightning_replay.retention.eviction import ARRIVAL_BITS
from lightning_replay.samplers import (
    ContinuousTransitionSampler,
    PrioritizedSampler,
    RandomPairSampler,
    ReverseSweepSampler,
)
from lightning_replay.schedules import Linear
from lightning_replay.writers import (
    OldestLeaves,
    OnPolicynessOnly,
    RetentionWriter,
    SmallestReturnLeaves,
    StochasticExploration,
    StochasticSurprise,
    SurpriseOnly,
    SurpriseOnPolicyness,
)
from lightning_replay.writers import retention as retention_module
from tests.stored import stored_rows
from tests.transitions import connected, numbered_steps

# softmax of these is 0.6285 for action 1 and 0.1402 for action 2
VALUES = [1.0, 2.0, 0.5]


def squared_reward(transitions: TensorDict) -> torch.Tensor:
    return transitions["next", "reward"].flatten() ** 2


def first_number(transitions: TensorDict) -> torch.Tensor:
    return transitions["observation"][:, 0]


def rewarded(rewards: list[float], **columns: Any) -> TensorDict:
    steps = numbered_steps(0, len(rewards))
    steps["next", "reward"] = torch.tensor(rewards).unsqueeze(1)
    return steps.update(columns)


def small(capacity: int = 3, *, sampler: Any = None, storage: Any = None, **options: Any) -> Replay:
    writer = RetentionWriter(**{"initial_surprise": squared_reward, "seed": 0} | options)
    storage = PackedStorage(capacity) if storage is None else storage
    return Replay(storage=storage, writer=writer, sampler=sampler, batch_size=2, seed=0)


def rewards(replay: Replay) -> list[float]:
    return stored_rows(replay)["next", "reward"].flatten().tolist()


def priorities(replay: Replay) -> list[float]:
    return replay.writer.retention_priority(torch.arange(len(replay))).tolist()


def test_the_lowest_leaves_and_a_candidate_that_is_lowest_is_refused() -> None:
    replay = small()
    assert replay.extend(rewarded([2.0, 1.0, 3.0])).tolist() == [0, 1, 2]
    assert replay.extend(rewarded([0.5])).tolist() == []
    assert replay.extend(rewarded([4.0])).tolist() == [1]
    assert replay.extend(rewarded([1.0])).tolist() == []
    assert rewards(replay) == [2.0, 4.0, 3.0] and priorities(replay) == [4.0, 16.0, 9.0]
    stats = replay.stats()
    assert [stats[name] for name in ("admitted", "refused", "evicted", "write_count")] == [4, 2, 1, 4]
    assert stats["age_max"] == 5 and stats["age_mean"] == pytest.approx((5 + 3 + 1) / 3)
    assert stats["retention_priority"] == {"0": 4.0, "0.25": 6.5, "0.5": 9.0, "0.75": 12.5, "1": 16.0}
    assert stats["bytes_per_transition"] == replay.nbytes / 3 > replay.storage.nbytes / 3


def test_the_slots_of_rows_that_left_are_told() -> None:
    """Capacity 3, priorities the squares of rewards; a candidate that is driven out by a later one never was there."""
    replay = small()
    told = []
    for some in ([1.0, 2.0], [3.0, 4.0], [1.0], [5.0, 2.5], [9.0, 8.0, 7.0]):
        replay.extend(rewarded(some))
        told.append(sorted(replay.last_insertion.evicted.tolist()))
    #      the first fit    4 for 1   1 refused   5 for 2, 2.5 refused   7 for 3, and so on
    assert told == [[], [0], [], [1], [0, 1, 2]]
    assert sorted(rewards(replay)) == [7.0, 8.0, 9.0]
    replay.empty()
    assert replay.last_insertion.evicted.tolist() == []


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("rule", [OldestLeaves, StochasticSurprise, SurpriseOnly])
def test_who_follows_what_enters_and_what_leaves_holds_what_the_buffer_holds(rule, n_steps) -> None:
    """A mirror of the slots, also beside calls in which nothing is offered because a return waits for its steps."""
    replay = recipes.surprise_retention(5, 4, rule=rule(), n_steps=n_steps, initial_surprise=first_number, seed=0)
    mirror: set[int] = set()
    for number in range(40):
        index = replay.extend(numbered_steps(number * 3, 1 + number % 2, trajectory=number // 4))
        mirror -= set(replay.last_insertion.evicted.tolist())
        mirror |= set(index.tolist())
        assert torch.equal(replay.last_insertion.slots, index)
        assert mirror == set(range(len(replay)))
        if number == 20:
            replay.load_state_dict(replay.state_dict())
            assert not len(replay.last_insertion.evicted)


def test_without_a_first_surprise_candidates_get_the_largest_priority_and_are_never_refused() -> None:
    replay = small(initial_surprise=None)
    replay.extend(rewarded([0.0, 0.0, 0.0, 0.0]))
    assert priorities(replay) == [1.0, 1.0, 1.0] and replay.stats()["refused"] == 0
    replay.update_priority(torch.tensor([0, 1]), torch.tensor([-3.0, 0.5]))
    assert priorities(replay) == [9.0, 0.25, 1.0]
    assert replay.extend(rewarded([7.0])).tolist() == [1]
    assert priorities(replay) == [9.0, 9.0, 1.0]


def test_feedback_sets_both_priorities_in_one_call() -> None:
    replay = small(sampler=PrioritizedSampler(3, priority_exponent=1.0, priority_offset=0.0))
    replay.extend(rewarded([1.0, 1.0, 1.0]))
    index = torch.tensor([0, 2, 0])
    signals = {"action_values": torch.tensor([VALUES] * 3), "action": torch.tensor([0, 2, 1])}
    replay.update_priority(index, torch.tensor([9.0, 2.0, -0.5]), **signals)
    assert replay.sampler.state_dict()["tree"]["leaves"].tolist() == [0.5, 1.0, 2.0]
    assert priorities(replay) == pytest.approx([0.25 * 0.628531719212, 1.0, 4.0 * 0.140244383166], abs=1e-6)
    replay.update_priority(index[:1], torch.tensor([2.0]), surprise=torch.tensor([[0.5]]))
    assert replay.sampler.state_dict()["tree"]["leaves"][0] == 2.0 and priorities(replay)[0] == 0.5


@pytest.mark.parametrize("both", [False, True])
def test_feedback_of_pairs_reaches_their_first_rows_or_both_of_which_the_first_count_more(both: bool) -> None:
    pairs = RandomPairSampler(base_sampler=PrioritizedSampler(4), update_partners=both)
    replay = small(4, sampler=pairs)
    replay.extend(rewarded([1.0] * 4))
    replay.update_priority(torch.tensor([[0, 1], [1, 2]]), torch.tensor([2.0, 3.0]))
    assert priorities(replay) == [4.0, 9.0, 9.0 if both else 1.0, 1.0]


def test_without_action_values_surprise_alone_counts_and_the_log_says_so_once(caplog) -> None:
    replay = small()
    replay.extend(rewarded([1.0]))
    with caplog.at_level(logging.WARNING, logger=retention_module.__name__):
        replay.update_priority(torch.tensor([0]), torch.tensor([3.0]))
        replay.update_priority(torch.tensor([0]), torch.tensor([3.0]))
    assert priorities(replay) == [9.0]
    assert len(caplog.records) == 1 and "kept by surprise alone" in caplog.text


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (SurpriseOnPolicyness(q_inverse_temperature=0.0), 9.0 / 3),
        (SurpriseOnPolicyness(greedy_epsilon=0.1), 0.9),
        (SurpriseOnPolicyness(surprise_exponent=0.5), 3 * 0.140244383166),
        (SurpriseOnly(), 9.0),
        (OnPolicynessOnly(), 0.140244383166),
        (StochasticSurprise(), 9.0),
        (StochasticExploration(), 0.140244383166),
        (OldestLeaves(), 0.0),
        (SmallestReturnLeaves(), -2.0),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, float) else "",
)
def test_each_rule_makes_its_priority_of_the_same_feedback(rule, expected) -> None:
    replay = small(rule=rule)
    replay.extend(rewarded([-2.0]))
    signals = {"action_values": torch.tensor([VALUES]), "action": torch.tensor([2])}
    replay.update_priority(torch.tensor([0]), torch.tensor([-3.0]), **signals)
    assert priorities(replay) == pytest.approx([expected], abs=1e-6)
    assert replay.takes_feedback == (not isinstance(rule, OldestLeaves | SmallestReturnLeaves))


def test_where_no_row_can_be_drawn_as_victim_the_oldest_leaves() -> None:
    replay = small(rule=StochasticExploration())
    replay.extend(rewarded([1.0, 2.0, 3.0]))
    values = torch.tensor([[0.0, -200.0]] * 3)
    replay.update_priority(torch.arange(3), torch.ones(3), action_values=values, action=torch.ones(3).long())
    assert priorities(replay) == [0.0, 0.0, 0.0]
    assert replay.extend(rewarded([4.0])).tolist() == [0]


def test_a_schedule_of_the_exponent_recomputes_every_priority() -> None:
    rule = SurpriseOnPolicyness(surprise_exponent=Linear(1.0, 0.0, 100, clock="updates"))
    replay = small(rule=rule)
    replay.extend(rewarded([2.0, 0.5, 1.0]))
    signals = {"action_values": torch.tensor([VALUES]), "action": torch.tensor([1])}
    replay.update_priority(torch.tensor([0]), torch.tensor([-2.0]), **signals)
    weight = 0.628531719212
    assert priorities(replay) == pytest.approx([4 * weight, 0.25, 1.0])
    replay.advance(updates=50)
    assert priorities(replay) == pytest.approx([2 * weight, 0.5, 1.0])
    replay.extend(rewarded([0.8]))  # sqrt(0.64) is higher than 0.5
    assert priorities(replay) == pytest.approx([2 * weight, 0.8, 1.0])
    replay.advance(updates=200)
    assert priorities(replay) == pytest.approx([weight, 1.0, 1.0])
    assert rule.surprise_exponent == 1.0, "the rule that was given may serve another buffer"


@pytest.mark.parametrize("at_once", [1, 2])
def test_each_draw_lowers_a_priority_until_another_row_has_the_slot(at_once: int, tmp_path) -> None:
    replay = small(rule=SurpriseOnPolicyness(draw_discount=0.5))
    replay.extend(rewarded([2.0, 0.5, 1.0]))
    assert priorities(replay) == [4.0, 0.25, 1.0]
    signals = {"action_values": torch.tensor([VALUES] * 3), "action": torch.tensor([1, 1, 1])}
    weight = 0.628531719212
    replay.update_priority(torch.tensor([0, 2, 0]), torch.tensor([9.0, 2.0, 4.0]), **signals)
    assert priorities(replay) == pytest.approx([16 * weight / 4, 0.25, 4 * weight / 2])  # row 0 was drawn twice
    save_replay(replay, tmp_path)
    again = load_replay(tmp_path, trust=["tests"])
    for one in (replay, again):
        new = rewarded([1.5, 1.25]).split(at_once)
        slots = torch.cat([one.extend(rows) for rows in new])
        assert slots.tolist() == [1, 2]  # the latter evicts 4 * weight / 2 = 1.26
        assert priorities(one)[1:] == [2.25, 1.5625]
        one.update_priority(torch.tensor([0, 2]), torch.tensor([2.0, 2.0]), surprise=torch.tensor([4.0, 4.0]))
        assert priorities(one) == [0.5, 2.25, 2.0]


def test_draws_lower_priorities_that_a_schedule_recomputes() -> None:
    replay = small(rule=SurpriseOnly(Linear(1.0, 0.0, 100, clock="updates"), draw_discount=0.5))
    replay.extend(rewarded([2.0, 0.5, 1.0]))
    replay.update_priority(torch.tensor([0]), torch.tensor([4.0]))
    replay.advance(updates=50)
    assert priorities(replay) == [2.0, 0.5, 1.0]


def test_rows_of_unknown_surprise_keep_the_largest_priority_under_a_schedule() -> None:
    replay = small(rule=SurpriseOnly(Linear(1.0, 0.5, 10, clock="env_steps")), initial_surprise=None)
    replay.extend(rewarded([0.0, 0.0, 0.0]))
    replay.update_priority(torch.tensor([0, 1]), torch.tensor([4.0, 3.0]))
    assert priorities(replay) == [16.0, 9.0, 1.0]
    replay.advance(env_steps=10)
    assert priorities(replay) == [4.0, 3.0, 4.0]


def test_arrivals_are_numbered_anew_before_they_run_out() -> None:
    replay = small(always_admit=True, initial_surprise=None)
    for number in range(100):
        if number in (20, 70):
            replay.writer._offered = 2**ARRIVAL_BITS - 10
        assert replay.extend(rewarded([float(number)])).tolist() == [number % 3]
    assert replay.writer._offered == 3 + 21, "the tenth row after the second time is the first with a new number"
    assert replay.writer.age_of(torch.arange(3)).tolist() == [0, 2, 1]


def test_n_step_transitions_are_formed_before_they_are_offered() -> None:
    asked: list[torch.Tensor] = []

    def surprised(transitions: TensorDict) -> torch.Tensor:
        asked.append(transitions["next", "reward"].flatten())
        return transitions["next", "reward"].flatten() ** 2

    replay = recipes.surprise_retention(
        4, 2, n_steps=3, discount=0.5, initial_surprise=surprised, priority_exponent=0.0, seed=0
    )
    assert replay.extend(numbered_steps(0, 2)).tolist() == []
    assert replay.extend(numbered_steps(2, 3)).tolist() == [0, 1, 2]
    # 0 + 1/2 + 2/4, 1 + 2/2 + 3/4, 2 + 3/2 + 4/4
    assert [part.tolist() for part in asked] == [[1.0, 2.75, 4.5]]
    assert priorities(replay) == [1.0, 2.75**2, 4.5**2]
    batch = replay.sample()
    assert batch["discount"].shape == batch["steps_to_next_obs"].shape == (2, 1)
    replay.writer.extend(
        replay.transform[0].form_pending()
    )  # the two that wait, with the returns they have: 3 + 4/2 and 4
    assert asked[1].tolist() == [5.0, 4.0]
    assert len(replay) == 4 and sorted(rewards(replay)) == [2.75, 4.0, 4.5, 5.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda rows: torch.ones(3), r"is \[3\] for 2 rows; one number for each is accepted, \[2\]"),
        (lambda rows: torch.tensor(1.0), r"is \[\] for 2 rows"),
        (lambda rows: torch.ones(2, 2), r"is \[2, 2\] for 2 rows"),
        (lambda rows: [1.0, float("nan")], r"is nan in rows \[1\]"),
        (lambda rows: torch.tensor([-1.0, 1.0]), r"is -1.0 in rows \[0\]"),
        (lambda rows: torch.tensor([1.0, float("inf")]), r"is inf in rows \[1\]"),
    ],
)
def test_a_first_surprise_that_is_no_priority_is_refused_and_nothing_stored(given, message) -> None:
    replay = small(initial_surprise=given)
    with pytest.raises(ValueError, match=rf"what initial_surprise returned {message}(?s:.*)Nothing was stored"):
        replay.extend(rewarded([1.0, 2.0]))
    assert len(replay) == 0 and replay.stats()["admitted"] == replay.stats()["refused"] == 0
    replay.writer.initial_surprise = squared_reward
    assert replay.extend(rewarded([1.0, 2.0])).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("signals", "error", "message"),
    [
        ({"surprise": torch.tensor([1.0, float("nan")])}, ValueError, r"surprise is nan in rows \[1\]"),
        ({"surprise": torch.ones(3)}, ValueError, r"surprise is \[3\] for 2 rows"),
        ({"action_values": torch.ones(3, 3), "action": torch.zeros(2)}, ValueError, r"must be \[2, A\].*got \[3, 3\]"),
        (
            {"action_values": torch.full((2, 3), float("nan")), "action": torch.tensor([0, 1])},
            ValueError,
            r"NaN or infinite in rows \[0, 1\]",
        ),
        ({"action_values": torch.ones(2, 3), "action": torch.tensor([0, 3])}, IndexError, "actions are 0..3"),
    ],
)
def test_bad_feedback_changes_nothing(signals, error, message) -> None:
    replay = small(sampler=PrioritizedSampler(3))
    replay.extend(rewarded([1.0, 2.0, 3.0]))
    before, sampler = priorities(replay), replay.sampler.state_dict()["tree"]["leaves"]
    with pytest.raises(error, match=message):
        replay.update_priority(torch.tensor([0, 1]), torch.ones(2), **signals)
    assert priorities(replay) == before
    assert torch.equal(replay.sampler.state_dict()["tree"]["leaves"], sampler)


def test_rules_that_know_nothing_else_ask_for_action_values() -> None:
    replay = small(rule=OnPolicynessOnly())
    replay.extend(rewarded([1.0]))
    with pytest.raises(ValueError, match=r"OnPolicynessOnly learns only from action_values \[B, A\]"):
        replay.update_priority(torch.tensor([0]), torch.tensor([1.0]))


def test_td_errors_given_with_rows_reach_those_that_entered() -> None:
    replay = small(sampler=PrioritizedSampler(3, priority_exponent=1.0, priority_offset=0.0))
    rows = rewarded([1.0, 2.0, 3.0, 0.5, 4.0], td_error=torch.tensor([1.0, 2.0, 3.0, 0.5, 4.0]))
    assert replay.extend(rows).tolist() == [1, 2, 0]
    assert replay.sampler.state_dict()["tree"]["leaves"].tolist() == [4.0, 2.0, 3.0]
    assert replay.extend(rewarded([0.1], td_error=torch.tensor([9.0]))).tolist() == []


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(TypeError, match=r"got a LazyTensorStorage with ndim=2 .*Use PackedStorage\(5\)"):
        small(storage=LazyTensorStorage(5, ndim=2))
    with pytest.raises(ValueError, match="rule is OldestLeaves, so draw_discount=0.9 would be ignored"):
        recipes.surprise_retention(8, 2, draw_discount=0.9, rule=OldestLeaves())
    with pytest.raises(ValueError, match="follows the clock 'draws', which a writer does not have"):
        SurpriseOnly(Linear(1.0, 0.0, 10))
    with pytest.raises(ValueError, match="capacity 4 is below n_steps 5"):
        recipes.surprise_retention(4, 2, n_steps=5)
    with pytest.raises(ValueError, match="rule is OldestLeaves, so q_inverse_temperature=2.0"):
        recipes.surprise_retention(8, 2, q_inverse_temperature=2.0, rule=OldestLeaves())
    with pytest.raises(ValueError, match=r"\('next', 'reward'\); got none"):
        small(rule=SmallestReturnLeaves()).extend(TensorDict({"observation": torch.ones(2)}, [2]))
    with pytest.raises(ValueError, match=r"\('next', 'reward'\) is nan in rows \[0\]"):
        small(rule=SmallestReturnLeaves()).extend(rewarded([float("nan")]))


@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_buffers_of_torchrl_get_a_slot_for_each_row(buffer: type) -> None:
    """A buffer of TensorDicts writes a slot into each given row; -1 stands for a row that is not kept."""
    plain = buffer(storage=PackedStorage(3), writer=RetentionWriter(SmallestReturnLeaves()), batch_size=1)
    entered = [plain.extend(rewarded([reward])).tolist() for reward in (5.0, 3.0, 4.0, 1.0, 6.0)]
    assert entered == [[0], [1], [2], [1], [1]]
    rows = rewarded([0.5, 9.0])  # The first takes the slot of 4, and leaves it to the second.
    assert plain.extend(rows).tolist() == [-1, 2]
    assert plain.add(rewarded([0.5])[0]) == 0


def test_a_function_that_cannot_be_saved_is_missed_aloud_and_may_be_set_again(tmp_path, caplog) -> None:
    replay = small(initial_surprise=lambda rows: squared_reward(rows))
    replay.extend(rewarded([3.0, 2.0, 4.0]))
    save_replay(replay, tmp_path / "saved")
    with caplog.at_level(logging.WARNING):
        again = load_replay(tmp_path / "saved")
    assert "until replay.writer.initial_surprise is set" in caplog.text
    again.writer.initial_surprise = replay.writer.initial_surprise
    for one in (replay, again):
        assert one.extend(rewarded([2.0])).tolist() == []
    caplog.clear()
    again.load(tmp_path / "saved")  # into a buffer that has one
    small(rule=OldestLeaves()).load_state_dict(small(rule=OldestLeaves()).state_dict())
    assert not caplog.text


@pytest.mark.parametrize(
    ("saved", "present", "message"),
    [
        (StochasticSurprise, SurpriseOnly, "rule StochasticSurprise, here SurpriseOnly"),
        (SurpriseOnly, lambda: SurpriseOnly(falling()), "rule SurpriseOnly, here SurpriseOnly with a schedule"),
        (SurpriseOnly, StochasticSurprise, "rule SurpriseOnly, here StochasticSurprise"),
        (SurpriseOnly, lambda: SurpriseOnly(draw_discount=0.9), "here SurpriseOnly and draw_discount 0.9"),
    ],
)
def test_a_save_under_another_rule_is_refused_and_nothing_is_loaded(saved, present, message) -> None:
    one, other = small(rule=saved()), small(rule=present())
    one.extend(rewarded([3.0, 2.0, 4.0]))
    other.extend(rewarded([7.0]))
    state = one.state_dict()
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    assert len(other) == 1 and rewards(other)[:1] == [7.0]


def test_a_load_takes_the_exponent_over_however_little_it_differs() -> None:
    one, other = small(rule=SurpriseOnly(falling())), small(rule=SurpriseOnly(falling()))
    one.extend(rewarded([3.0]))
    one.advance(updates=200)
    other.advance(updates=195)
    assert abs(other.writer.rule.surprise_exponent - 0.805) < 1e-6
    other.load_state_dict(one.state_dict())
    assert other.writer.rule.surprise_exponent == 0.8


def falling() -> Linear:
    return Linear(start=1.0, end=0.0, duration=1_000, clock="updates")


#  rows 0 1 2 3 | 4 5 of two environments in turn, a refused row x between:   a0 b0 a1 bx a2 b2
def interleaved(first: int, surprise: list[float]) -> TensorDict:
    steps = numbered_steps(first, len(surprise))
    steps["trajectory"] = torch.arange(len(surprise)) % 2
    steps["next", "reward"] = torch.tensor(surprise).unsqueeze(1)
    return steps


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("sampler", [ContinuousTransitionSampler, lambda: ReverseSweepSampler(goal=first_number_is_2)])
def test_rows_are_not_linked_across_a_row_that_was_refused(at_once, sampler) -> None:
    replay = small(4, sampler=sampler())
    steps = connected(interleaved(0, [1.0, 1.0, 3.0, 3.0, 5.0, 0.5, 6.0, 6.0]))
    replay.extend(steps[:4])
    later = steps[4:]  # a2 enters in place of a0, bx is refused, a3 replaces b0, b3 a1
    parts = [later] if at_once else later.split(1)
    for part in parts:
        replay.extend(part)
    assert rewards(replay) == [5.0, 6.0, 6.0, 3.0]
    links = replay.sampler.followed.links
    # a2 in 0 is followed by a3 in 1; b1 in 3 not by b3 in 2, as bx is missing
    assert links.successor.tolist() == [1, -1, -1, -1]


def first_number_is_2(steps: TensorDict) -> torch.Tensor:
    return steps["observation"][:, 0] == 2


def test_a_state_needs_a_storage(tmp_path) -> None:
    replay = Replay(storage=PackedStorage(4), writer=RetentionWriter(), batch_size=2)
    replay.writer.dumps(tmp_path)
    with pytest.raises(RuntimeError, match="has no storage yet; build the buffer with it, and load then"):
        RetentionWriter().loads(tmp_path)
