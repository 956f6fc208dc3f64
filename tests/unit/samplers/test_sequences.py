# SPDX-License-Identifier: Apache-2.0
"""Sequences by hand: which there are, what a batch holds, priorities, errors, and other buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose

from lightning_replay import load_replay, recipes
from lightning_replay.divided_draws import Divider
from lightning_replay.episodes import kernels
from lightning_replay.episodes.links import EpisodeLinks
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.replay import Replay
from lightning_replay.samplers import PrioritizedSampler, SequenceSampler, UniformSampler, sequence_priorities
from lightning_replay.schedules import Linear
from lightning_replay.storage import PackedStorage
from lightning_replay.transforms import GaussianNoise, MixMinibatch, MixPairs, MixStates, NStepTransitions, RelabelGoals
from lightning_replay.writers import EventTableWriter, FirstInFirstOutWriter, RetentionWriter
from tests.frame_steps import frame_rows, stacks_in, stacks_of
from tests.transitions import numbered_steps


def buffer(length: int, overlap: int = 0, burn_in: int = 0, *, capacity: int = 40, **options: Any) -> Replay:
    return recipes.sequences(capacity, 8, length=length, overlap=overlap, burn_in=burn_in, seed=0, **options)


def found(replay: Replay) -> set[tuple[int, ...]]:
    """The first numbers of all sequences, without the padding."""
    batch = replay.sample(300)
    rows = zip(batch["observation"][..., 0].int().tolist(), batch["mask"].sum(1).tolist(), strict=True)
    return {tuple(numbers[:steps]) for numbers, steps in rows}


def test_the_sequences_of_two_interleaved_episodes() -> None:
    """A batch has every column, nested ones too, and the last row is repeated where the episode is over."""
    replay = buffer(4, overlap=2)
    one, two = numbered_steps(0, 9, done_every=9, trajectory=1), numbered_steps(100, 9, trajectory=2)
    rows = torch.stack((one, two), 1).reshape(-1)
    rows["recurrent_state"] = TensorDict({"h": rows["observation"][:, :1] * 2, "c": rows["observation"]}, [18])
    replay.extend(rows)
    assert found(replay) == {(0, 1, 2, 3), (2, 3, 4, 5), (4, 5, 6, 7), (6, 7, 8)} | {
        (100, 101, 102, 103),
        (102, 103, 104, 105),
        (104, 105, 106, 107),  # the other one runs, and no later one is complete
    }
    batch = replay.sample(50)
    assert batch.shape == (50, 4) and batch["next", "reward"].shape == (50, 4, 1)
    assert torch.equal(batch["recurrent_state", "h"], batch["observation"][..., :1] * 2)
    assert torch.equal(batch["recurrent_state", "c"], batch["observation"])
    assert torch.equal(batch["observation"], rows["observation"][batch["index"]])
    assert (batch["generation"] == 1).all() and "priority_weight" not in batch.keys()  # noqa: SIM118
    padded = batch[~batch["mask"][:, 3]]
    assert len(padded) and (padded[:, 2].exclude("mask") == padded[:, 3].exclude("mask")).all()
    replay.update_priority(batch, torch.zeros(50, 4))  # ignored
    replay.end_episodes()
    assert (106, 107, 108) in found(replay)


@pytest.mark.parametrize(
    ("overlap", "min_steps", "expected"),
    [
        (0, None, {(0, 1, 2), (3, 4, 5), (6,)}),
        (0, 3, {(0, 1, 2), (3, 4, 5)}),
        (1, None, {(0, 1, 2), (2, 3, 4), (4, 5, 6)}),
        (2, None, {(0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 5), (4, 5, 6)}),
    ],
)
def test_an_episode_of_seven_steps(overlap: int, min_steps: int | None, expected: set[tuple[int, ...]]) -> None:
    replay = buffer(3, overlap, min_steps=min_steps)
    replay.extend(numbered_steps(0, 7, done_every=7))
    assert found(replay) == expected


def test_a_burn_in_leaves_out_sequences_that_are_no_longer() -> None:
    replay = buffer(3, burn_in=1)
    replay.extend(numbered_steps(0, 7, done_every=7))
    assert found(replay) == {(0, 1, 2), (3, 4, 5)} and replay.sampler.burn_in == 1


def test_one_priority_of_each_sequence_by_the_largest_and_the_mean_error() -> None:
    """Rows of the burn-in and padding may hold anything; sequences whose first row was overwritten are late."""
    replay = buffer(3, burn_in=1, priority_exponent=1.0, priority_offset=0.0, capacity=10)
    replay.extend(numbered_steps(0, 8, done_every=8))  # 0 1 2, 3 4 5, 6 7
    batch = replay.sample(60)
    nan = torch.nan
    by_start = {0: [nan, -4.0, 2.0], 3: [nan, 1.0, 1.0], 6: [nan, 5.0, nan]}
    td_error = torch.tensor([by_start[start] for start in batch["index"][:, 0].tolist()])
    replay.update_priority(batch, td_error)
    starts = torch.tensor([0, 3, 6])
    assert replay.sampler.priority_of(starts).tolist() == pytest.approx([0.9 * 4 + 0.1 * 3, 1.0, 5.0])
    assert replay.stats()["priorities_updated"] == 60
    replay.extend(numbered_steps(8, 3))  # the slots 8, 9 and 0
    replay.update_priority(batch, td_error * 2)
    assert replay.sampler.priority_of(starts).tolist() == pytest.approx([0.0, 2.0, 10.0])
    late = int((batch["index"][:, 0] == 0).sum())
    assert replay.stats()["stale_updates_dropped"] == late > 0
    assert replay.sampler.priority_of(torch.tensor([8])).item() == pytest.approx(5.0)  # the largest when it came
    replay.update_tensordict_priority(replay.sample(2).set("td_error", torch.ones(2, 3, 1)))
    with pytest.raises(ValueError, match=r"td_error must be finite; rows \[0\]"):
        replay.update_priority(replay.sample(1), torch.full((1, 3), nan))


def test_the_share_of_the_largest_error_is_an_option() -> None:
    errors, counts = torch.tensor([[1.0, -3.0], [2.0, 7.0]]), torch.tensor([[True, True], [True, False]])
    assert sequence_priorities(errors, counts, max_share=0.0).tolist() == [2.0, 2.0]
    assert sequence_priorities(errors, counts, max_share=1.0).tolist() == [3.0, 2.0]
    replay = buffer(2, priority_exponent=1.0, priority_offset=0.0, max_share=0.5)
    replay.extend(numbered_steps(0, 2, done_every=2))
    replay.update_priority(replay.sample(1), torch.tensor([[1.0, 3.0]]))
    assert replay.sampler.priority_of(torch.tensor([0])).tolist() == [2.5]


def test_td_errors_of_another_shape_are_refused() -> None:
    replay = buffer(3, priority_exponent=0.6)
    replay.extend(numbered_steps(0, 9))
    batch = replay.sample(4)
    for index, td_error in ((batch, torch.ones(4)), (batch["index"][:, 0], torch.ones(4)), (batch, torch.ones(4, 2))):
        with pytest.raises(ValueError, match=r"sequences of 3 steps take both as \[B, 3\], a TD error for each step"):
            replay.update_priority(index, td_error)
    replay.update_priority(batch["index"], torch.ones(4, 3), generation=batch["generation"])


def test_what_cannot_be_drawn_is_named() -> None:
    replay = buffer(4, burn_in=2)
    with pytest.raises(RuntimeError, match="empty"):
        replay.sample()
    replay.extend(numbered_steps(0, 3))
    with pytest.raises(
        RuntimeError, match="no sequence of 4 steps is complete among the 3 stored rows. .*warmup_steps"
    ):
        replay.sample()
    replay.end_episodes()
    assert found(replay) == {(0, 1, 2)}
    short = buffer(4, burn_in=2)
    short.extend(numbered_steps(0, 8, done_every=2))
    with pytest.raises(ValueError, match="no sequence of 3 steps or more among the 8 stored rows: .* ended had 2"):
        short.sample()
    none = buffer(2, priority_exponent=0.6, priority_offset=0.0)
    none.extend(numbered_steps(0, 2, done_every=2))
    none.update_priority(none.sample(1), torch.zeros(1, 2))
    with pytest.raises(RuntimeError, match="every one of the 2 stored rows has priority 0"):
        none.sample()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": 4}, "overlap is 4 and length is 4; give overlap of at most 3"),
        ({"burn_in": 5}, "burn_in is 5 and length is 4; give burn_in of at most 3"),
        ({"burn_in": 2, "min_steps": 2}, r"min_steps is 2; it must be from burn_in \+ 1 = 3 to length = 4"),
        ({"min_steps": 5}, "min_steps is 5"),
        (
            {"base_sampler": UniformSampler(), "overlap": 1},
            "base_sampler draws the rows; leave out base_sampler, or overlap",
        ),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceSampler(4, **options)


def test_parts_that_work_with_single_rows_are_refused() -> None:
    def of(**parts: Any) -> Replay:
        return Replay(storage=PackedStorage(140), sampler=SequenceSampler(4), batch_size=2, **parts)

    with pytest.raises(ValueError, match="n_steps=3 works with single rows, and SequenceSampler draws sequences of 4"):
        of(n_steps=3)
    steps = Compose(GaussianNoise(keys=["observation"]), NStepTransitions(2, 0.9))
    for transform in (MixMinibatch(), MixPairs(), MixStates(), steps):
        with pytest.raises(ValueError, match=r"^(Mix\w+|n_steps=2) works with .* Leave it out, or use"):
            of(transform=transform)
    with pytest.raises(ValueError, match="^RetentionWriter works with single rows"):
        of(writer=RetentionWriter())
    table = EventTable("high", condition=reward_at_least(9.0), history_length=3, capacity=4)
    with pytest.raises(
        TypeError, match="EventTableWriter holds .* as base_sampler= of a sampler of pairs or sequences"
    ):
        of(writer=EventTableWriter(8, [table]))
    noisy = of(transform=GaussianNoise(sigma=0.1, keys=["observation"], seed=0))  # of each step on its own
    noisy.extend(numbered_steps(0, 8))
    for transform in (MixStates(), RelabelGoals(reward=lambda achieved, desired, info: 0.0)):
        with pytest.raises(ValueError, match=r"^(MixStates|RelabelGoals) works with single rows"):
            of().append_transform(transform)
    with pytest.raises(ValueError, match="^MixPairs works with single rows"):
        noisy.append_transform(MixPairs())
    assert noisy.sample()["observation"].shape == (2, 4, 3)
    with pytest.raises(TypeError, match="draws of SequenceSampler cannot be divided over several replays"):
        Divider(SequenceSampler(4), seed=0)


def test_rows_of_another_sampler_are_the_first_to_be_learned_from() -> None:
    """Near the end of an episode the sequence begins earlier; each step gets the TD error of its own."""
    sampler = SequenceSampler(4, burn_in=1, base_sampler=PrioritizedSampler(20, 1.0, priority_offset=0.0))
    replay = Replay(storage=PackedStorage(20), sampler=sampler, batch_size=1, seed=0)
    replay.extend(numbered_steps(0, 10, done_every=10))
    replay.extend(numbered_steps(10, 2, done_every=12))
    expected = {
        0: [0, 1, 2, 3],
        1: [0, 1, 2, 3],
        5: [4, 5, 6, 7],
        8: [6, 7, 8, 9],
        9: [6, 7, 8, 9],
        11: [10, 11, 11, 11],
    }
    for row, steps in expected.items():
        replay.update_priority(torch.arange(12).view(3, 4), torch.zeros(3, 4))
        sampler.base_sampler.update_priority(torch.arange(12), torch.arange(12) == row)
        batch = replay.sample()
        assert batch["index"].tolist() == [steps] and batch["mask"].sum() == len(set(steps))
        assert batch["priority_weight"].shape == (1, 4)
        if row == 5:
            replay.update_priority(batch, torch.tensor([[9.0, 1.0, 2.0, 3.0]]))
            assert sampler.priority_of(torch.tensor([4, 5, 6, 7])).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_event_tables_draw_sequences_of_the_steps_that_they_hold() -> None:
    table = EventTable("high", condition=reward_at_least(18.0), history_length=4, capacity=8, min_size=1)
    options = {"sequence_length": 5, "burn_in": 1, "priority_exponent": 0.5, "seed": 0}
    replay = recipes.event_tables(6, 64, tables=[table], min_size=1, **options)
    replay.extend(numbered_steps(0, 20, done_every=20))
    replay.extend(numbered_steps(20, 6, done_every=26))  # of the steps before only those of the table stay
    batch = replay.sample()
    numbers, table_of = batch["observation"][..., 0].int(), batch["table"]
    assert batch["table"].shape == batch["priority_weight"].shape == (64, 5)
    assert {tuple(row) for row in numbers[table_of[:, 0] == 1].unique(dim=0).tolist()} <= {
        (18, 19, 19, 19, 19),
        (20, 21, 22, 23, 24),
        (21, 22, 23, 24, 25),
    }
    held = replay.tables.held(batch["index"])
    assert held.all()
    replay.update_priority(batch, torch.rand(64, 5))
    assert replay.stats()["priorities_updated"] == int(batch["mask"][:, 1:].sum())
    with pytest.raises(TypeError, match="sequence_length is None"):
        recipes.event_tables(6, 4, tables=[table], burn_in=1)


def test_steps_that_no_table_holds_are_left_out() -> None:
    """Rows 5 and 9 have left without being overwritten: a sequence of row 7 has what lies between."""

    sampler = SequenceSampler(6, burn_in=3, base_sampler=UniformSampler(seed=0))
    replay = Replay(storage=PackedStorage(20), sampler=sampler, batch_size=1)
    replay.extend(numbered_steps(0, 12, done_every=12))

    class Held:
        def held(self, index: torch.Tensor) -> torch.Tensor:
            return (index != 5) & (index != 9)

    replay.storage.occupancy_owner = Held()  # type: ignore[assignment]
    slots, steps = sampler._sequences_around(torch.tensor([7, 11, 2]), replay.storage)
    assert slots.tolist() == [[6, 7, 8, 8, 8, 8], [10, 11, 11, 11, 11, 11], [0, 1, 2, 3, 4, 4]]
    assert steps.tolist() == [3, 2, 5]


@pytest.mark.parametrize("exponent", [0.0, 0.8])
def test_a_save_continues_with_the_same_draws(exponent: float, tmp_path: Any) -> None:
    options = {"priority_exponent": exponent, "importance_exponent": Linear(0.4, 1.0, duration=10)}
    replay = buffer(3, overlap=1, **options)
    replay.extend(numbered_steps(0, 25, done_every=8))
    replay.update_priority(replay.sample(), torch.rand(8, 3))
    replay.save(tmp_path / "save")
    for again in (load_replay(tmp_path / "save", end_episodes=False), buffer(3, overlap=1, **options)):
        again.load(tmp_path / "save", end_episodes=False)
        going_on = buffer(3, overlap=1, **options)
        going_on.load_state_dict(replay.state_dict())
        for one in (again, going_on):
            one.extend(numbered_steps(25, 30, done_every=8))
        batches = [one.sample().exclude("generation") for one in (again, going_on)]
        assert (batches[0] == batches[1]).all()
    with pytest.raises(ValueError, match="sequence length"):
        buffer(4, overlap=1, **options).load(tmp_path / "save")


def test_frames_stored_once_are_drawn_as_stacks() -> None:
    replay = buffer(3, overlap=2, capacity=12, frame_stack=2)
    for first in (0, 50):
        replay.extend(frame_rows(stacks_of(range(first, first + 10), 2), done=True))  # the first ones leave
    batch = replay.sample(40)
    assert batch["pixels"].shape == (40, 3, 2, 4, 4)
    stacks = stacks_in(batch.reshape(-1))
    for row in range(40):
        (one, after), (two, _), _ = stacks[3 * row : 3 * row + 3]
        assert after == two and (one[1] >= 50 or one[1] >= 6)


@pytest.mark.parametrize("storage", [LazyTensorStorage, PackedStorage])
def test_in_torchrls_buffer(storage: Any) -> None:
    sampler = SequenceSampler(4, overlap=3, priority_exponent=1.0, priority_offset=0.0, seed=0)
    replay = TensorDictReplayBuffer(storage=storage(30), sampler=sampler, writer=FirstInFirstOutWriter(), batch_size=6)
    replay.extend(numbered_steps(0, 12, done_every=6))
    batch = replay.sample()
    assert batch["observation"].shape == (6, 4, 3) and batch["mask"].all()
    assert (batch["observation"][..., 0].diff() == 1).all()


def test_a_buffer_that_was_filled_before_and_one_that_was_emptied() -> None:
    replay = recipes.uniform(30, 4, seed=0)
    replay.extend(numbered_steps(0, 12, done_every=6))
    replay.set_sampler(SequenceSampler(3, seed=0))
    assert found(replay) == {(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)}
    replay.empty()
    with pytest.raises(RuntimeError, match="empty"):
        replay.sample()
    replay.extend(numbered_steps(50, 3, done_every=53))
    assert found(replay) == {(50, 51, 52)}


def test_links_are_followed_back_as_far_as_rows_are_stored() -> None:
    links = EpisodeLinks(6)
    links.write(torch.arange(6), None, torch.tensor([False, False, False, True, False, False]))
    slots, gone = links.walk(torch.tensor([3, 3, 5, 4]), torch.tensor([2, 9, 0, 3]), back=True)
    assert slots.tolist() == [1, 0, 5, 4] and gone.tolist() == [2, 3, 0, 0]
    assert links.ended(np.array([0, 3, 5])).tolist() == [3]


def test_a_sequence_whose_first_row_has_left_does_not_begin() -> None:
    # Slots 0 to 2 have the steps 0 to 2 of an episode. Slot 3 has step 5 of another one, whose earlier rows have left.
    links, position = np.array([-1, 0, 1, -1]), np.array([0, 1, 2, 5], dtype=np.int32)
    assert kernels.starts(links, position, np.array([2, 3]), 2, 3, 0, 1).tolist() == [0]
    # Slot 1 ends its episode, so that its sequence of two steps is the last one.
    assert kernels.starts(links, position, np.array([0, 1]), 1, 3, 0, 2).tolist() == [0]
