# SPDX-License-Identifier: Apache-2.0
"""What a transform gets at a draw: stored rows, the links of their episodes and the columns of the sampler."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.envs import RewardScaling

from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.events import Event, EventTable
from lightning_replay.parts import ReplayTransform, rebuildable
from lightning_replay.samplers import PrioritizedSampler
from lightning_replay.storage import read_columns
from lightning_replay.transforms import GaussianNoise, NStepTransitions
from tests.transitions import connected, numbered_steps


@rebuildable
class NextReward(ReplayTransform):
    """Adds the reward of the next step of each row's episode, -1 where none is stored."""

    follows_episodes = True

    def check_rows(self, rows):
        if rows.get("action", None) is None:
            raise ValueError("the rows have no action")

    def forward_drawn(self, batch, index, storage, episodes):
        following = episodes.links.successor[index]
        (reward,) = read_columns(storage, following.clamp(min=0), [("next", "reward")])
        return batch.set("following", torch.where(following < 0, -1.0, reward.flatten()))


class DoubledWeight(ReplayTransform):
    def forward(self, batch):
        self.seen = set(batch.keys())
        return batch.set("priority_weight", 2 * batch["priority_weight"])


def followed(replay: Replay, slots: int) -> list[float]:
    """The rewards that follow the rows in the first slots."""
    batch = replay.transform[-1].forward_drawn(
        replay.storage.get(torch.arange(slots)), torch.arange(slots), replay.storage, replay._episodes
    )
    return batch["following"].tolist()


def interleaved(count: int, *, done: tuple[int, ...] = ()) -> TensorDict:
    """Numbered steps of two environments in turn."""
    steps = numbered_steps(0, count)
    steps["trajectory"] = torch.arange(count) % 2
    for flag in ("terminated", "done"):
        steps["next", flag][list(done)] = True
    return connected(steps)


def with_next_reward(capacity: int = 8, storage=None, **options) -> Replay:
    storage = PackedStorage(capacity) if storage is None else storage
    return Replay(storage=storage, transform=NextReward(), batch_size=4, seed=0, **options)


@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
def test_links_lead_along_the_episodes_of_each_environment(storage) -> None:
    replay = with_next_reward(storage=storage(8))
    rows = interleaved(10, done=(2,))
    replay.extend(rows[:6])
    #  environment 0: rows 0 -> 2 (ends), 4; environment 1: rows 1 -> 3 -> 5
    assert followed(replay, 6) == [2, 3, -1, 5, -1, -1]
    assert replay.successors(torch.arange(3)).tolist() == [2, 3, -1] and replay.returns == []
    replay.extend(rows[6:])  # rows 8 and 9 overwrite rows 0 and 1
    assert followed(replay, 8) == [-1, -1, -1, 5, 6, 7, 8, 9]
    replay.end_episodes([0])
    replay.extend(rows[4:5].set("trajectory", torch.tensor([0])))
    assert followed(replay, 1) == [-1], "an episode that was ended is not continued"
    replay.empty()
    replay.extend(rows[:3])
    assert followed(replay, 3) == [2, -1, -1]


def test_the_batch_is_drawn_and_changed_while_the_rows_stay() -> None:
    replay = with_next_reward()
    replay.extend(interleaved(6))
    batch = replay.sample(32)
    assert torch.equal(batch["following"], torch.tensor([2.0, 3, 4, 5, -1, -1])[batch["index"]])
    assert "steps_to_next_obs" not in batch, "no return was formed"
    assert "following" not in replay[:] and "following" not in replay[0]


@pytest.mark.parametrize("filled", [False, True])
def test_a_transform_that_comes_later_follows_the_rows_stored_before(filled) -> None:
    replay = recipes.uniform(8, 4, seed=0)
    if filled:
        replay.extend(interleaved(8)[:4])
    replay.append_transform(NextReward())
    replay.extend(interleaved(8)[4 if filled else 0 :])
    assert followed(replay, 8) == [2, 3, 4, 5, 6, 7, -1, -1]


def test_links_are_saved_and_copied(tmp_path) -> None:
    replay = with_next_reward()
    replay.extend(interleaved(10)[:9])
    replay.save(tmp_path / "saved")
    again = with_next_reward()
    again.load(tmp_path / "saved", end_episodes=False)
    twins = [replay, again, copy.deepcopy(replay)]
    for one in twins:
        one.extend(interleaved(10)[9:])
        assert followed(one, 8) == followed(replay, 8) == [-1, -1, 4, 5, 6, 7, 8, 9]
    draws = [one.sample() for one in twins]
    assert all((draw == draws[0]).all() for draw in draws)
    with pytest.raises(ValueError, match="transforms"):
        recipes.uniform(8, 4).load(tmp_path / "saved")


def test_links_of_tables_leave_out_evicted_rows() -> None:
    fourth = Event(condition=lambda rows: rows["next", "reward"].flatten() % 4 == 0, history_length=1)
    replay = recipes.event_tables(3, 2, tables=[EventTable("fourth", events=[fourth], capacity=2)], seed=0)
    replay.append_transform(NextReward())
    replay.extend(numbered_steps(0, 9))
    held = replay.storage.occupancy.slots()
    rows = replay.storage.get(held)
    batch = replay.transform[0].forward_drawn(rows, held, replay.storage, replay._episodes)
    found = dict(zip(rows["next", "reward"].flatten().tolist(), batch["following"].tolist(), strict=True))
    assert found == {4: -1, 6: 7, 7: 8, 8: -1}, "row 5 has left"


def test_returns_are_formed_before_the_transform_and_discounts_stay() -> None:
    replay = with_next_reward(n_steps=2, discount=0.5)
    replay.extend(interleaved(6))
    batch = replay.sample(64)
    assert replay.returns == [(2, 0.5)]
    expected = torch.tensor([0 + 1.0, 1 + 1.5, 2 + 2.0, 3 + 2.5, 4, 5])[batch["index"]]
    assert torch.equal(batch["next", "reward"].flatten(), expected)


def test_columns_of_the_sampler_reach_every_transform_and_its_changes_stay() -> None:
    replay = Replay(
        storage=PackedStorage(8), sampler=PrioritizedSampler(8), transform=DoubledWeight(), batch_size=4, seed=0
    )
    plain = Replay(storage=PackedStorage(8), sampler=PrioritizedSampler(8), batch_size=4, seed=0)
    for one in (replay, plain):
        one.extend(numbered_steps(0, 6))
        one.update_priority(torch.arange(6), torch.arange(1.0, 7.0))
    batch = replay.sample()
    assert torch.equal(batch["priority_weight"], 2 * plain.sample()["priority_weight"])
    assert {"priority_weight", "index", "generation"} <= replay.transform[0].seen


@pytest.mark.parametrize(
    "build",
    [
        lambda: GaussianNoise(sigma=1.0, seed=0),
        lambda: RewardScaling(0.0, 10.0, in_keys=[("next", "reward")], standard_normal=False),
    ],
)
@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
def test_indexing_returns_what_is_stored(build, storage) -> None:
    replay = Replay(storage=storage(8), transform=build(), batch_size=4, seed=0)
    replay.extend(numbered_steps(0, 4))
    stored = replay.storage.get(torch.arange(4))
    assert torch.equal(replay[:]["next", "reward"], stored["next", "reward"])
    assert torch.equal(replay[1:3]["observation"], stored["observation"][1:3])
    assert torch.equal(replay[torch.tensor([3, 0])]["observation"], stored["observation"][[3, 0]])
    assert torch.equal(replay[2]["observation"], stored["observation"][2])
    assert torch.equal(replay["next", "reward"], stored["next", "reward"])
    assert not torch.equal(replay.sample()["next", "reward"], stored["next", "reward"])


def test_what_does_not_fit_is_refused_and_nothing_changes() -> None:
    with pytest.raises(ValueError, match="NextReward follows the episodes of stored rows.*give n_steps= to the buffer"):
        with_next_reward().append_transform(NStepTransitions(3, 0.9))
    replay = with_next_reward()
    with pytest.raises(ValueError, match="NextReward follows"):
        replay.append_transform(NStepTransitions(3, 0.9))
    assert len(replay.transform) == 1
    with pytest.raises(ValueError, match="no action"):
        replay.extend(numbered_steps(0, 4).exclude("action"))
    with pytest.raises(ValueError, match=r"no \('next', 'reward'\), which transforms that follow episodes need"):
        replay.extend(numbered_steps(0, 4).exclude(("next", "reward")))
    assert len(replay) == 0 and replay.storage.layout is None
    filled = recipes.uniform(8, 4)
    filled.extend(numbered_steps(0, 4).exclude("action"))
    with pytest.raises(ValueError, match="no action"):
        filled.append_transform(NextReward())
    assert len(filled.transform) == 0 and filled._episodes is None
