# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import pickle
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage
from torchrl.envs import RewardScaling

from lightning_replay import recipes
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.replay import Replay
from lightning_replay.samplers import PrioritizedSampler, RandomPairSampler
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.transforms import NStepTransitions
from lightning_replay.transforms.mixup import MIXED_KEYS
from tests.attack.states import difference
from tests.frame_steps import frame_rows, stacks_of
from tests.recipe_options import ROW_RECIPES, built, fitting
from tests.transitions import numbered_steps


def prioritized(capacity: int = 8, **options) -> Replay:
    return recipes.prioritized(capacity=capacity, batch_size=4, priority_exponent=1.0, seed=0, **options)


@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
def test_extend_copies_and_leaves_the_input_alone(storage) -> None:
    replay = Replay(storage=storage(8), batch_size=4)
    steps = numbered_steps(0, 4)
    keys = set(steps.keys(True, True))
    replay.extend(steps)
    steps["observation"].fill_(99.0)
    assert replay.sample()["observation"].max() < 99
    assert set(steps.keys(True, True)) == keys


def test_wrong_rows_are_refused() -> None:
    replay = prioritized()
    replay.extend(numbered_steps(0, 8))
    with pytest.raises(ValueError, match="int64"):
        replay.update_priority(torch.tensor([0.0, 1.0]), torch.ones(2))
    with pytest.raises(ValueError, match=r"generation must be .* \[4\]; got \[3\]"):
        replay.update_priority(torch.arange(4), torch.ones(4), generation=torch.ones(3, dtype=torch.int64))


def test_a_prioritized_buffer_knows_that_it_waits_for_feedback() -> None:
    replay = prioritized()
    replay.extend(numbered_steps(0, 8))
    assert not replay.awaits_priorities
    batch = replay.sample()
    assert replay.awaits_priorities
    replay.update_priority(batch["index"], torch.ones(4))
    assert not replay.awaits_priorities
    uniform = recipes.uniform(capacity=8, batch_size=4)
    uniform.extend(numbered_steps(0, 8))
    uniform.sample()
    assert not uniform.awaits_priorities
    uniform.update_priority(torch.arange(4), torch.ones(4))


def test_a_batch_size_that_was_not_given_fits_the_capacity() -> None:
    assert Replay(storage=PackedStorage(100)).batch_size == recipes.prioritized(100).batch_size == 100
    assert Replay(storage=PackedStorage(1_000)).batch_size == recipes.mixup(1_000).batch_size == 256
    tables = [EventTable("goal", reward_at_least(1.0), history_length=2, capacity=4)]
    replay = recipes.event_tables(capacity=40, tables=tables)
    assert replay.batch_size == 40 and replay.sampler.min_sizes == {"default": 40, "goal": 4}
    assert recipes.parallel_curriculum(tasks=["near"], capacity_per_task=10).batch_size >= 10


@pytest.mark.parametrize("of_pairs", [False, True])
def test_a_sampler_of_fewer_slots_than_the_storage_is_refused(of_pairs) -> None:
    """It would fail once the storage has filled up so far, after the rows were stored."""
    storage, sampler = PackedStorage(8), PrioritizedSampler(7)
    with pytest.raises(ValueError, match=r"is 7 and that of the storage 8; build the sampler with capacity=8"):
        Replay(storage=storage, sampler=RandomPairSampler(base_sampler=sampler) if of_pairs else sampler, batch_size=4)
    replay = Replay(storage=storage, sampler=PrioritizedSampler(9), batch_size=4, seed=0)
    for start in range(0, 20, 5):
        replay.extend(numbered_steps(start, 5))
    assert len(replay) == 8 and len(replay.sample()) == 4


@pytest.mark.parametrize("stored", [0, 4])
@pytest.mark.parametrize("flag", ["done", "terminated"])
def test_flags_that_are_numbers_are_refused_before_anything_is_stored(flag, stored) -> None:
    replay = recipes.prioritized(capacity=8, batch_size=4, n_steps=3, seed=0)
    if stored:
        replay.extend(numbered_steps(0, stored))
    before = replay.state_dict()
    steps = numbered_steps(stored, 4)
    steps["next", flag] = steps["next", flag].float()
    with pytest.raises((TypeError, ValueError), match=f"{flag}.*float32"):
        replay.extend(steps)
    assert difference(before, replay.state_dict()) is None
    replay.extend(numbered_steps(stored, 4))
    assert len(replay) == stored + 4 and replay.sample()["steps_to_next_obs"].max() > 1


def test_n_step_rows() -> None:
    """Episodes of 4 steps, rewards equal to the step's number, n = 3, discount 0.5.

    row 1: 1 + 0.5*2 + 0.25*3 = 2.75, terminated at step 3; row 3: 3 alone; row 4: 4 + 2.5 + 1.5 = 8, bootstraps.
    """
    replay = recipes.uniform(capacity=20, batch_size=8, n_steps=3, discount=0.5, seed=0)
    replay.extend(numbered_steps(0, 10, done_every=4))
    index = torch.tensor([1, 3, 4, 9])
    drawn = replay.sample(400)
    batch = torch.stack([drawn[drawn["index"] == slot][0] for slot in index.tolist()])
    assert batch["next", "reward"].flatten().tolist() == [2.75, 3.0, 8.0, 9.0]
    assert batch["discount"].flatten().tolist() == [0.0, 0.0, 0.125, 0.5]
    assert batch["steps_to_next_obs"].flatten().tolist() == [3, 1, 3, 1]
    assert batch["next", "observation"][:, 0].tolist() == [4, 4, 7, 10]
    assert batch["observation"][:, 0].tolist() == [1, 3, 4, 9]
    drawn = replay.sample()
    assert drawn["discount"].shape == (8, 1)


def test_truncated_rows_are_closed_once_and_only_while_they_are_there() -> None:
    replay = recipes.uniform(capacity=4, batch_size=2, n_steps=2, seed=0)
    replay.extend(numbered_steps(0, 3))
    replay.end_episodes(slots=torch.tensor([2, 1]), generation=torch.tensor([1, 9]))
    rows = replay.storage.get(torch.arange(3))
    assert rows["next", "truncated"].flatten().tolist() == [False, False, True]
    assert rows["next", "done"].flatten().tolist() == [False, False, True]
    replay.extend(numbered_steps(3, 1))
    assert replay.successors(torch.arange(4)).tolist() == [1, 2, -1, -1], "nothing follows a truncated row"


def test_torchrl_transforms_prefetch_and_set_rng_work() -> None:
    replay = Replay(
        storage=PackedStorage(16), transform=RewardScaling(loc=0.0, scale=10.0, in_keys=[("next", "reward")]),
        batch_size=4, prefetch=2, seed=0,
    )  # fmt: skip
    replay.extend(numbered_steps(0, 16))
    batch = replay.sample()
    assert torch.equal(batch["next", "reward"], batch["observation"][:, :1] * 10)
    first, second = (recipes.prioritized(capacity=16, batch_size=8, seed=seed) for seed in (1, 2))
    for replay in (first, second):
        replay.extend(numbered_steps(0, 16))
        replay.set_rng(torch.Generator().manual_seed(5))
    assert torch.equal(first.sample()["index"], second.sample()["index"])


@pytest.mark.parametrize("name", sorted(recipes.known()))
def test_the_same_seed_draws_the_same(name: str) -> None:
    one, other, again = (built(name, capacity=40, batch_size=16, seed=seed) for seed in (5, 6, 7))
    again.seed(5)
    for replay in (one, other, again):
        replay.extend(fitting(replay, numbered_steps(0, 30, done_every=6)))
    drawn = [torch.cat([replay.sample() for _ in range(5)]) for replay in (one, again, other)]
    assert (drawn[0] == drawn[1]).all() and not torch.equal(drawn[0]["index"], drawn[2]["index"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda replay: pickle.loads(pickle.dumps(replay))])
def test_a_copy_is_independent_and_whole(copied) -> None:
    replay = prioritized(n_steps=2)
    replay.extend(numbered_steps(0, 8))
    again = copied(replay)
    assert torch.equal(replay.sample()["index"], again.sample()["index"])
    again.extend(numbered_steps(50, 4))
    rows = again.storage.get(torch.arange(8))
    assert rows["observation"][:, 0].tolist() == [50, 51, 52, 53, 4, 5, 6, 7]
    assert replay.storage.get(torch.arange(8))["observation"][:, 0].tolist() == list(range(8))


def test_stats_are_plain_numbers() -> None:
    replay = prioritized()
    replay.extend(numbered_steps(0, 6))
    replay.sample()
    stats = replay.stats()
    assert all(isinstance(value, int | float | bool) for value in stats.values()), stats
    assert stats["size"] == 6 and stats["write_count"] == 6 and 0 <= stats["drawn_age_mean"] <= 5
    assert stats["nbytes"] >= replay.storage.nbytes > 0


def test_generation_column_given_by_the_user_is_not_believed() -> None:
    replay = recipes.uniform(capacity=8, batch_size=2)
    steps = numbered_steps(0, 4)
    replay.extend(steps)
    batch = replay.storage.get(torch.arange(2))
    replay.extend(TensorDict(dict(batch.items()), [2]))
    assert replay.storage.generation_of(torch.arange(6)).tolist() == [1] * 6


def test_emptying_forgets_what_was_drawn_ahead_and_waits_for_nothing() -> None:
    replay = prioritized(prefetch=2)
    replay.extend(numbered_steps(0, 8))
    replay.sample()
    assert replay.awaits_priorities
    replay.empty()
    assert len(replay) == 0 and not replay.awaits_priorities and "drawn_age_mean" not in replay.stats()
    with pytest.raises(RuntimeError, match="empty"):
        replay.sample()
    assert not replay.awaits_priorities, "a draw that failed has no rows to wait for"
    replay.extend(numbered_steps(100, 4))
    batch = replay.sample()
    assert batch["observation"].min() >= 100
    assert batch["generation"].unique().tolist() == [3], "a late update for a forgotten row must still be told apart"


def test_batches_of_another_size_are_not_taken_from_those_drawn_ahead() -> None:
    replay = prioritized(prefetch=2)
    replay.extend(numbered_steps(0, 8))
    assert [len(replay.sample(size)) for size in (None, 7, 4, 2)] == [4, 7, 4, 2]
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"batch_size is {size}; it must be"):
            replay.sample(size)


@pytest.mark.parametrize(
    ("td_error", "message"),
    [
        (torch.tensor([0.0, float("nan"), 1.0]), r"rows \[1\] are NaN.*Nothing was stored"),
        (torch.ones(3, 2), r"shape \[3, 2\].*Nothing was stored"),
    ],
)
def test_td_errors_that_cannot_be_priorities_are_refused_with_their_rows(td_error, message) -> None:
    replay = prioritized()
    replay.extend(numbered_steps(0, 4).set("td_error", torch.ones(4, *td_error.shape[1:]))[:4], update_priority=False)
    replay.sample()
    with pytest.raises(ValueError, match=message):
        replay.extend(numbered_steps(4, 3).set("td_error", td_error))
    assert len(replay) == 4
    assert replay.awaits_priorities
    replay.extend(numbered_steps(4, 3).set("td_error", td_error), update_priority=False)
    assert len(replay) == 7 and replay.awaits_priorities, "rows are no feedback"


@pytest.mark.parametrize("n_steps", [1, 2])
@pytest.mark.parametrize("missing", [("done",), ("done", "truncated"), ("done", "terminated")])
def test_done_is_derived_where_it_is_absent(missing, n_steps) -> None:
    replay = recipes.uniform(capacity=8, batch_size=2, n_steps=n_steps, seed=0)
    steps = numbered_steps(0, 4)
    steps["next", "terminated"][1] = steps["next", "truncated"][2] = True
    given = steps.exclude(*(("next", name) for name in missing))
    if missing == ("done", "terminated") and n_steps == 2:
        with pytest.raises(ValueError, match=r"no \('next', 'terminated'\)"):
            replay.extend(given)
        return
    replay.extend(given)
    terminated, truncated = "terminated" not in missing, "truncated" not in missing
    assert replay[:]["next", "done"].flatten().tolist() == [False, terminated, truncated, False]
    assert "done" not in given["next"]
    replay.extend(given[:1])
    assert len(replay) == 5


def test_flags_without_a_dimension_of_their_own_are_checked_and_flags_of_two_shapes_derive_done() -> None:
    replay = recipes.uniform(capacity=8, batch_size=2, seed=0)
    steps = numbered_steps(0, 4).exclude(("next", "done"))
    steps["next", "terminated"] = torch.tensor([False, True, False, False])
    replay.extend(steps)
    assert replay[:]["next", "done"].tolist() == [[False], [True], [False], [False]]
    steps["next", "done"] = torch.zeros(4, dtype=torch.bool)
    steps["next", "truncated"] = torch.zeros(4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"rows \[1\] are terminated or truncated"):
        recipes.uniform(capacity=8, batch_size=2, seed=0).extend(steps)


@pytest.mark.parametrize("change", ["advance", "seed", "end_episodes"])
def test_clocks_seeds_and_ends_of_episodes_wait_while_a_save_needs_one_moment(change) -> None:
    replay = recipes.uniform(capacity=8, batch_size=2, seed=0)
    index = replay.extend(numbered_steps(0, 4))
    calls = {
        "advance": partial(replay.advance, updates=3),
        "seed": partial(replay.seed, 1),
        "end_episodes": partial(replay.end_episodes, slots=index[-1:], generation=torch.ones(1, dtype=torch.int64)),
    }
    thread = threading.Thread(target=calls[change])
    with replay.locked():
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(5)
    assert not thread.is_alive()


def test_a_buffer_saved_without_done_takes_rows_without_it() -> None:
    storage = PackedStorage(8)
    steps = numbered_steps(0, 4).exclude(("next", "done"))
    storage.set(range(4), steps)
    replay = Replay(storage=storage, batch_size=2)
    replay.extend(steps)
    assert "done" not in replay[:]["next"]


@pytest.mark.parametrize("extended", [False, True])
def test_returns_go_along_rows_that_were_stored_before(extended) -> None:
    storage = PackedStorage(16)
    Replay(storage=storage, batch_size=4).extend(numbered_steps(0, 6, done_every=4))
    replay = Replay(storage=storage, batch_size=4, n_steps=3, seed=0)
    if extended:
        replay.writer.load_state_dict({"cursor": 6, "write_count": 6})
        replay.extend(numbered_steps(6, 2))
    batch = replay.sample(200)
    used = dict(zip(batch["index"].tolist(), batch["steps_to_next_obs"].flatten().tolist(), strict=True))
    assert used == (
        {0: 3, 1: 3, 2: 2, 3: 1, 4: 3, 5: 3, 6: 2, 7: 1} if extended else {0: 3, 1: 3, 2: 2, 3: 1, 4: 2, 5: 1}
    )


@pytest.mark.parametrize("n_steps", [1, 2])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, partial(LazyTensorStorage, device="auto")])
def test_torchrls_storages_take_prioritized_and_n_step_draws(storage, n_steps) -> None:
    replay = Replay(storage=storage(8), sampler=PrioritizedSampler(capacity=8), batch_size=4, n_steps=n_steps)
    for first in range(0, 30, 6):
        replay.extend(numbered_steps(first, 6))
        batch = replay.sample()
        assert "generation" not in batch.keys()  # noqa: SIM118
        replay.update_priority(batch["index"], torch.ones(4))
        steps = batch["steps_to_next_obs"] if n_steps > 1 else 1
        assert torch.equal(batch["next", "observation"][:, :1], batch["observation"][:, :1] + steps)
    assert len(replay) == 8


def test_one_transition_is_added_and_several_are_extended() -> None:
    replay, steps = prioritized(), numbered_steps(0, 4)
    assert replay.add(steps[0]).tolist() == [0]
    with pytest.raises(ValueError, match=r"one transition, .* got \[4\]. Call extend for several"):
        replay.add(steps)
    for given in ({"observation": torch.zeros(3)}, (1, 2, 3), None):
        with pytest.raises(TypeError, match=f"add takes one transition, .* got {type(given).__name__}"):
            replay.add(given)
    for given in ({"observation": torch.zeros(4, 3)}, [steps[0], steps[1]]):
        with pytest.raises(
            TypeError, match=rf"got {type(given).__name__}. Wrap columns \[N, ...\] as TensorDict.*torch.stack"
        ):
            replay.extend(given)
    with pytest.raises(
        ValueError, match=r"got \[\]. .* build columns as TensorDict\(..., batch_size=\[N\]\), or call add"
    ):
        replay.extend(TensorDict({"observation": torch.zeros(4, 3)}))
    assert len(replay) == 1


@pytest.mark.parametrize("batch_size", [[4], [1]])
def test_transitions_without_columns_are_refused_and_fix_none(batch_size) -> None:
    replay = prioritized()
    with pytest.raises(ValueError, match="the transitions have no columns; nothing was stored"):
        replay.extend(TensorDict({}, batch_size))
    replay.extend(numbered_steps(0, 4))
    assert len(replay) == 4


def test_a_batch_without_td_errors_names_the_key_and_the_other_way() -> None:
    replay = prioritized(priority_offset=0.0)
    replay.extend(numbered_steps(0, 8))
    batch = replay.sample()
    with pytest.raises(ValueError, match="td_error is None, .* write them to its column 'td_error'"):
        replay.update_tensordict_priority(batch)
    assert replay.awaits_priorities
    batch["td_error"] = torch.full((4,), -2.0)
    replay.update_tensordict_priority(batch)
    assert replay.sampler.priority_of(batch["index"]).tolist() == [2.0] * 4
    assert not replay.awaits_priorities
    uniform = recipes.uniform(8, 4)
    uniform.extend(numbered_steps(0, 8))
    uniform.update_tensordict_priority(uniform.sample())


def test_a_batch_alone_brings_the_td_errors_of_its_own_column() -> None:
    """As ten of TorchRL's programs write it: ``batch["td_error"] = ...`` and ``update_priority(batch)``."""
    replay = Replay(
        storage=PackedStorage(8), sampler=PrioritizedSampler(8, 1.0, 0.0, 0.0), batch_size=4, priority_key="delta"
    )
    replay.extend(numbered_steps(0, 8))
    batch = replay.sample()
    batch["delta"] = torch.full((4, 1), -3.0)
    batch["td_error"] = torch.full((4, 1), 9.0)  # another key
    replay.update_priority(batch)
    assert replay.sampler.priority_of(batch["index"]).tolist() == [3.0] * 4
    replay.update_priority(batch, torch.full((4,), 2.0))  # which counts
    assert replay.sampler.priority_of(batch["index"]).tolist() == [2.0] * 4
    with pytest.raises(ValueError, match="td_error is None"):
        replay.update_priority(batch, surprise=torch.ones(4))  # feedback without TD errors is not completed
    with pytest.raises(ValueError, match="td_error is None"):
        replay.update_priority(batch["index"])
    uniform = recipes.uniform(8, 4)
    uniform.extend(numbered_steps(0, 8))
    uniform.update_priority(uniform.sample().set("td_error", torch.ones(4)))


def flat(steps: TensorDict) -> TensorDict:
    steps = steps.clone()
    for name in ("reward", "terminated", "truncated", "done"):
        steps["next", name] = steps["next", name].squeeze(1)
    return steps


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("name", [*ROW_RECIPES, "TorchRL's storage", "own n-step transform", "frames"])
def test_rewards_and_flags_have_one_shape_however_they_are_given(name: str, n_steps: int) -> None:
    def build() -> Replay:
        if name == "TorchRL's storage":
            return Replay(storage=LazyTensorStorage(64), batch_size=8, n_steps=n_steps, seed=0)
        if name == "own n-step transform":
            return Replay(storage=PackedStorage(64), batch_size=8, transform=NStepTransitions(n_steps, 0.99), seed=0)
        if name == "frames":
            return recipes.uniform(capacity=64, batch_size=8, n_steps=n_steps, frame_stack=2, seed=0)
        return built(name, capacity=64, batch_size=8, n_steps=n_steps, seed=0)

    def steps(first: int, count: int) -> TensorDict:
        if name == "frames":
            return frame_rows(stacks_of(range(first, first + count + 1), 2), first=first)
        return fitting(build(), numbered_steps(first, count, done_every=8))

    flat_first, flat_later, never_flat = build(), build(), build()
    flat_first.extend(flat(steps(0, 16)))
    flat_first.extend_columns(dict(steps(16, 16).items(True, True)))
    flat_later.extend(steps(0, 16))
    flat_later.extend_columns(dict(flat(steps(16, 16)).items(True, True)))
    never_flat.extend(steps(0, 16))
    never_flat.extend(steps(16, 16))
    expected = never_flat.sample()
    assert expected["next", "reward"].shape == expected["next", "done"].shape == (8, 1)
    for replay in (flat_first, flat_later):
        assert (replay.sample() == expected).all()


@pytest.mark.parametrize("key", ["mask", ("collector", "mask")])
@pytest.mark.parametrize("name", ["uniform", "event_tables", "own n-step transform"])
def test_padding_never_becomes_a_row(name: str, key: Any) -> None:
    """``split_trajs`` of TorchRL's collectors pads trajectories of 2 and 3 steps to ``[2, 3]``."""

    def build() -> Replay:
        if name == "own n-step transform":
            return Replay(storage=PackedStorage(64), batch_size=8, transform=NStepTransitions(2, 0.9), seed=0)
        return built(name, capacity=64, batch_size=8, seed=0)

    steps = numbered_steps(0, 6).reshape(2, 3)
    steps["trajectory"] = torch.tensor([[1, 1, 0], [2, 2, 2]])
    steps["next", "done"][0, 1] = steps["next", "truncated"][0, 1] = True
    steps[key] = torch.tensor([[True, True, False], [True, True, True]])
    rows = steps[steps[key]]
    as_given, flattened, as_columns, without = build(), build(), build(), build()
    without.extend(rows)
    without.extend(rows)
    nothing = steps[0, 2:]
    for replay, padded in ((as_given, steps), (flattened, steps.reshape(-1)), (as_columns, steps.reshape(-1))):
        assert replay.extend(nothing).tolist() == []
        for _ in range(2):
            if replay is as_columns:
                replay.extend_columns(dict(padded.items(True, True)))
            else:
                replay.extend(padded)
            assert replay.extend(nothing).tolist() == []
        assert (replay[:] == without[:]).all()


def test_a_column_named_mask_of_several_flags_a_row_is_a_column_like_others() -> None:
    replay = recipes.uniform(capacity=8, batch_size=2, seed=0)
    steps = numbered_steps(0, 4)
    steps["mask"] = torch.tensor([[True, False]] * 4)  # of the actions that are possible
    replay.extend(steps)
    replay.extend(steps)
    assert len(replay) == 8


@pytest.mark.parametrize("name", ["mixup", "continuous_transition"])
@pytest.mark.parametrize("column", ["observation", "action"])
def test_integers_are_not_half_mixed(name: str, column: str) -> None:
    """The mixed action and reward of a row whose state stayed as it was would be wrong."""
    steps = numbered_steps(0, 16)
    steps[column] = steps[column].long()
    replay = built(name, capacity=16, batch_size=8, seed=0)
    replay.extend(steps)
    with pytest.raises(ValueError, match=rf"'{column}' has dtype torch.int64; MixPairs mixes floating columns"):
        replay.sample()
    others = [key for key in MIXED_KEYS if key != column]
    named = built(name, capacity=16, batch_size=8, seed=0, keys=others)
    named.extend(steps)
    batch = named.sample()
    assert torch.equal(batch[column], steps[column][batch["index"][:, 0]])
    assert (batch["mixup_coefficient"] < 1).any()


@pytest.mark.parametrize("one_hot", [True, False])
def test_neighbours_of_the_same_discrete_action_are_mixed(one_hot: bool) -> None:
    steps = numbered_steps(0, 32)
    action = torch.arange(32) % 2
    steps["action"] = torch.nn.functional.one_hot(action) if one_hot else action
    replay = recipes.neighborhood_mixup(
        capacity=32, batch_size=16, num_neighbors=2, refresh_interval=1, discrete="same_action", seed=0
    )
    replay.extend(steps)
    batch = replay.sample()
    assert torch.equal(batch["action"], steps["action"][batch["index"][:, 0]])
    assert (batch["mixup_coefficient"] < 1).all()


@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage, ListStorage])
def test_rows_are_read_by_any_kind_of_index(storage) -> None:
    replay = Replay(storage=storage(8), batch_size=4)
    replay.extend(numbered_steps(0, 6))
    found = [replay[index]["observation"][..., 0].tolist() for index in (np.int64(2), -1, torch.tensor([2, 5]))]
    assert found == [2.0, 5.0, [2.0, 5.0]]
    for mask in (torch.arange(6) > 3, np.arange(6) > 3, [False] * 4 + [True] * 2):
        assert replay[mask]["observation"][:, 0].tolist() == [4.0, 5.0]
    assert replay[torch.tensor(2)]["observation"][0] == 2.0
    assert len(replay[...]) == len(replay[:]) == 6
    assert len(replay[torch.arange(6) > 7]) == 0
