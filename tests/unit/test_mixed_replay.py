# SPDX-License-Identifier: Apache-2.0
"""Two buffers that one batch is drawn from: rows, indices, weights, feedback, saves, and what is refused."""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ListStorage
from torchrl.data.replay_buffers import RandomSampler
from torchrl.trainers import ReplayBufferTrainer

from lightning_replay import MixedReplay, Replay, load_replay, recipes, save_replay, verify_replay
from lightning_replay.inspection.compare import inspect_buffers
from lightning_replay.inspection.contents import look_at
from lightning_replay.inspection.saves import read_buffers
from lightning_replay.mixed_replay import OFFLINE_INDEX
from lightning_replay.schedules import Linear
from tests.recipe_options import TASKS, built, fitting
from tests.transitions import numbered_steps


def mixed(online: str | Replay = "prioritized", offline: str | Replay = "uniform", **options: Any) -> MixedReplay:
    """50 offline rows, which are numbered from 1000 on."""
    sides = [built(side, capacity=100, batch_size=4) if isinstance(side, str) else side for side in (online, offline)]
    replay = recipes.mixed(online=sides[0], offline=sides[1], **{"batch_size": 8, "seed": 0} | options)
    replay.offline.extend(fitting(replay.online, numbered_steps(1000, 50)))
    return replay


def test_a_batch_is_half_of_each_and_td_errors_reach_their_side() -> None:
    replay = mixed(offline="prioritized")
    replay.extend(numbered_steps(0, 20))
    batch = replay.sample()
    assert batch["is_offline"].tolist() == [False] * 4 + [True] * 4
    assert (batch["observation"][:4, 0] < 20).all()
    assert (batch["observation"][4:, 0] >= 1000).all()
    assert torch.equal(batch["observation"][4:, 0].long() - 1000, batch["index"][4:] - OFFLINE_INDEX)
    error = torch.arange(1.0, 9.0)
    replay.update_priority(batch, error)
    for side, rows, offset in ((replay.online, slice(0, 4), 0), (replay.offline, slice(4, 8), OFFLINE_INDEX)):
        slots, given = batch["index"][rows] - offset, error[rows]
        last = {slot: value for slot, value in zip(slots.tolist(), given.tolist(), strict=True)}
        found = side.sampler.priority_of(torch.tensor(list(last)))
        torch.testing.assert_close(found, torch.tensor(list(last.values())))
        assert not side.awaits_priorities
    assert not replay.awaits_priorities


@pytest.mark.parametrize("by_index", [False, True])
def test_late_td_errors_are_dropped(by_index: bool) -> None:
    replay = mixed()
    replay.extend(numbered_steps(0, 100))
    batch = replay.sample()
    replay.extend(numbered_steps(100, 100))
    if by_index:
        replay.update_priority(batch["index"], torch.full((8,), 9.0), generation=batch["generation"])
    else:
        replay.update_priority(batch.set("td_error", torch.full((8,), 9.0)))
    assert replay.stats()["online"]["stale_updates_dropped"] == 4
    assert (replay.online.sampler.priority_of(torch.arange(100)) < 1.001).all()


def test_all_rows_are_offline_until_online_holds_its_part() -> None:
    replay = mixed()
    assert replay.sample()["is_offline"].all()
    replay.extend(numbered_steps(0, 3))
    batch = replay.sample()
    assert batch["is_offline"].all()
    assert batch["priority_weight"].tolist() == [1.0] * 8  # as in later batches
    replay.add(numbered_steps(3, 1)[0])
    assert replay.sample()["is_offline"].sum() == 4
    assert len(replay) == 54
    assert len(replay.offline) == 50


def test_weights_are_those_of_each_side() -> None:
    replay = mixed(recipes.prioritized(100, 4, priority_exponent=1.0, importance_exponent=1.0, priority_offset=0.0))
    replay.extend(numbered_steps(0, 4).set("td_error", torch.tensor([1.0, 1.0, 2.0, 4.0])))
    batch = replay.sample()
    expected = torch.tensor([1.0, 1.0, 0.5, 0.25])[batch["index"][:4]]
    torch.testing.assert_close(batch["priority_weight"], torch.cat([expected, torch.ones(4)]))
    assert "priority_weight" not in mixed("uniform", "uniform").sample()


def test_pairs_on_one_side_and_returns_on_both() -> None:
    returns: dict[str, Any] = {"n_steps": 3, "discount": 0.9}
    online = recipes.neighborhood_mixup(100, 4, **returns)
    replay = mixed(online, recipes.prioritized(100, 4, **returns), share=0.25)
    replay.extend(numbered_steps(0, 30))
    batch = replay.sample()
    assert batch["index"].shape == (8, 2)
    assert batch["index"][6:, 1].tolist() == [-1, -1]
    assert (batch["index"][:6] < 30).all()
    assert batch["steps_to_next_obs"].flatten().tolist()[:6] == [3] * 6
    assert batch["discount"].shape == (8, 1)
    replay.update_priority(batch, torch.full((8,), 7.0))
    slots = batch["index"][6:, 0] - OFFLINE_INDEX
    torch.testing.assert_close(replay.offline.sampler.priority_of(slots), torch.full((2,), 7.0))
    assert replay.returns == [(3, 0.9)]


@pytest.mark.parametrize("online", sorted(recipes.known()))
def test_any_recipe_may_be_a_side(tmp_path: Path, online: str) -> None:
    other = "sequences" if online == "sequences" else "uniform"
    replay = mixed(online, other)
    replay.extend(fitting(replay.online, numbered_steps(0, 40)))
    if online != "parallel_curriculum":
        assert replay.tasks == []
        swapped = mixed(other, online)
        swapped.extend(numbered_steps(0, 40))
        for each in (replay, swapped):
            batch = each.sample()
            assert batch.shape == ((8, 2) if online == "sequences" else (8,))
            each.update_priority(batch, torch.rand(8))
            each.save(tmp_path)
            again = load_replay(tmp_path)
            assert again.sample()["index"].tolist() == each.sample()["index"].tolist()
    else:
        assert replay.tasks == TASKS
        assert replay.sample()["task"].shape == (8,)
        replay.progress(TASKS[0], 0.5)
        assert len(replay.actor_tasks(2)) == 2


def test_signals_of_two_columns_reach_their_side() -> None:
    replay = mixed("uniform", "surprise_retention")
    replay.extend(numbered_steps(0, 20))
    batch, values = replay.sample(), torch.tensor([[1.0, -1.0]] * 8)
    replay.update_priority(batch, torch.ones(8), action_values=values, action=torch.zeros(8, dtype=torch.int64))
    assert replay.stats()["offline"]["priorities_updated"] == 4


@pytest.mark.parametrize("length", [1, 2, 3])
def test_td_errors_of_sequences_reach_their_side(length: int) -> None:
    options = {"capacity": 100, "batch_size": 4, "length": length, "priority_exponent": 1.0, "max_share": 1.0}
    replay = mixed(*[recipes.sequences(**options, priority_offset=0.0) for _ in range(2)])
    replay.extend(numbered_steps(0, 60))
    batch = replay.sample()
    assert replay.sequence_length == length
    assert batch["index"].shape == batch["is_offline"].shape == batch["priority_weight"].shape == (8, length)
    assert batch["is_offline"][:, 0].tolist() == [False] * 4 + [True] * 4
    assert (batch["observation"][4:, 0, 0] >= 1000).all()
    error = torch.arange(1.0, 9.0).unsqueeze(1).expand(8, length)
    with pytest.raises(ValueError, match="sequences of"):
        replay.update_priority(batch, error[:, :1].expand(8, length + 1))
    replay.update_priority(batch, error)
    for side, rows, offset in ((replay.online, slice(0, 4), 0), (replay.offline, slice(4, 8), OFFLINE_INDEX)):
        first = batch["index"][rows, 0] - offset
        last = {slot: value for slot, value in zip(first.tolist(), error[rows, 0].tolist(), strict=True)}
        found = side.sampler.priority_of(torch.tensor(list(last)))
        torch.testing.assert_close(found, torch.tensor(list(last.values())))


SHARES = [0.01, 0.05, 0.3, Linear(0.05, 0.0, duration=4), Linear(1.0, 0.0, duration=3)]
# Prioritized rows wait as uniform ones do: for them one share that is a part of a row, and one that falls.
CASES = [(online, share) for online in ("uniform", "sequences") for share in SHARES]
CASES += [("prioritized", share) for share in (SHARES[1], SHARES[4])]


@pytest.mark.slow
@pytest.mark.parametrize(("online", "share"), CASES, ids=str)
def test_a_small_share_waits_for_online_rows_in_every_draw(online: str, share: Any) -> None:
    """With part of a row or of a falling schedule, ``online`` serves rows once it holds its larger rounding."""
    found: dict[int, set[int]] = {}
    for seed in range(20):
        sides = [built(online, capacity=60, batch_size=4, check_continuity=False) for _ in range(2)]
        replay = recipes.mixed(online=sides[0], offline=sides[1], batch_size=8, share=share, seed=seed)
        replay.offline.extend(numbered_steps(1000, 50))
        for stored in (0, 1, 5, 8, 60):
            for start in range(len(replay.online), stored):
                replay.extend(numbered_steps(start, 1))
            for _ in range(4):
                is_offline = replay.sample()["is_offline"].view(8, -1)[:, 0]
                found.setdefault(stored, set()).add(int(is_offline.sum()))
    first = share if isinstance(share, float) else share.start
    expected = {math.floor(first * 8), math.ceil(first * 8)}
    assert found[0] == {8}, "no draw fails while online is empty"
    if isinstance(share, float):
        enough = 8 - math.floor(share * 8)
        assert all(rows == {8} for stored, rows in found.items() if stored < enough)
        assert found[60] == expected
    else:
        assert found[60] == {0} and found[1] == {8}


def test_a_schedule_at_0_draws_from_online_without_offline_rows() -> None:
    replay = recipes.mixed(
        online=recipes.uniform(4, 2), offline=recipes.uniform(4, 2), share=Linear(1.0, 0.0, duration=1), batch_size=4
    )
    replay.extend(numbered_steps(0, 2))
    with pytest.raises(RuntimeError, match="offline is empty"):
        replay.sample()
    replay.offline.extend(numbered_steps(0, 2))
    assert replay.sample()["is_offline"].all()
    assert replay.sample()["is_offline"].all(), "online holds 2 of 4 rows"
    replay.offline.empty()
    assert not replay.sample()["is_offline"].any()


def test_a_batch_above_the_capacity_of_online_waits_until_it_is_full() -> None:
    replay = recipes.mixed(
        online=recipes.uniform(4, 2), offline=recipes.uniform(4, 2), share=Linear(0.5, 0.0, duration=1), batch_size=8
    )
    replay.offline.extend(numbered_steps(1000, 4))
    replay.extend(numbered_steps(0, 3))
    assert [int(replay.sample()["is_offline"].sum()) for _ in range(2)] == [8, 8]
    replay.extend(numbered_steps(3, 1))
    assert int(replay.sample()["is_offline"].sum()) == 0


def test_columns_that_only_online_has_are_left_out_with_a_warning() -> None:
    replay = mixed(batch_size=8)
    rows = (
        numbered_steps(0, 8).set("action_value", torch.zeros(8, 2)).set("is_init", torch.zeros(8, 1, dtype=torch.bool))
    )
    rows["next", "is_init"] = rows["is_init"]
    rows["done"] = rows["next", "done"]
    replay.extend(rows)
    with pytest.warns(UserWarning, match="no batch contains them: action_value. If the loss") as caught:
        batch = replay.sample()
    assert caught[0].filename == __file__
    assert not {"action_value", "is_init", "done"} & set(batch.keys())
    replay.sample()  # without another warning
    with pytest.warns(UserWarning, match="no batch contains them: action_value") as caught:
        recipes.mixed(online=replay.online, offline=replay.offline, batch_size=8)
    wider = recipes.mixed(online=built("uniform", capacity=10), offline=built("uniform", capacity=10))
    wider.offline.extend(numbered_steps(0, 8).set("action_value", torch.zeros(8, 3)))
    with pytest.raises(ValueError, match=r"action_value \(torch.float32 \[3\], online torch.float32 \[2\]\)"):
        wider.extend(rows)


def test_share_follows_its_clock() -> None:
    replay = mixed(share=Linear(1.0, 0.0, duration=4, clock="env_steps"))
    replay.extend(numbered_steps(0, 20))
    found = []
    for env_steps in (0, 1, 2, 4):
        replay.advance(env_steps=env_steps, updates=1)
        found.append(int(replay.sample()["is_offline"].sum()))
    assert found == [8, 6, 4, 0]
    draws = mixed(share=Linear(0.0, 1.0, duration=2), seed=3)
    draws.extend(numbered_steps(0, 20))
    assert [int(draws.sample()["is_offline"].sum()) for _ in range(3)] == [0, 4, 8]


def test_a_save_shares_the_offline_rows_and_a_loaded_one_draws_on(tmp_path: Path) -> None:
    wide = recipes.uniform(capacity=4_000, batch_size=4, seed=0)
    wide.extend(TensorDict({"observation": torch.randn(4_000, 200)}, [4_000]))
    replay = recipes.mixed(
        online=recipes.prioritized(capacity=100, batch_size=4), offline=wide, share=0.3, batch_size=5, seed=1
    )
    replay.extend(TensorDict({"observation": torch.randn(50, 200)}, [50]))
    first = save_replay(replay, tmp_path / "first")
    replay.extend(TensorDict({"observation": torch.randn(10, 200)}, [10]))
    replay.advance(updates=7)
    second = save_replay(replay, tmp_path / "second", previous=tmp_path / "first")
    assert first.written == first.total > 3_200_000
    assert second.written < 200_000
    assert verify_replay(tmp_path / "second")["length"] == 4_060
    loaded = load_replay(tmp_path / "second", end_episodes=False)
    other = recipes.mixed(
        online=recipes.prioritized(capacity=100, batch_size=4),
        offline=recipes.uniform(capacity=4_000, batch_size=4),
        share=0.3,
        batch_size=5,
    )
    other.load(tmp_path / "second")
    assert other.awaits_new_episodes
    assert not loaded.awaits_new_episodes
    fourth, copied = pickle.loads(pickle.dumps(replay)), replay.state_dict()
    fifth = pickle.loads(pickle.dumps(other))
    fifth.load_state_dict(copied)
    assert isinstance(loaded, MixedReplay)
    for _ in range(4):
        expected = replay.sample()
        for each in (loaded, other, fourth, fifth):
            batch = each.sample()
            assert all(torch.equal(batch[key], expected[key]) for key in expected.keys(True, True))
    assert loaded.generator_fingerprint() == replay.generator_fingerprint()


def test_inspection_shows_both_sides_of_a_save(tmp_path: Path) -> None:
    replay = mixed()
    replay.extend(numbered_steps(0, 20))
    replay.save(tmp_path)
    found = {one.name: one.contents.given for one in read_buffers(tmp_path)}
    assert found == {"online": 20, "offline": 50}
    for look in (lambda: look_at(replay), lambda: inspect_buffers({"both": replay})):
        with pytest.raises(TypeError, match="its online or offline"):
            look()


def test_the_state_of_other_buffers_is_refused_and_changes_nothing() -> None:
    replay, other = mixed(), mixed(offline="mixup")
    replay.extend(numbered_steps(0, 20))
    other.extend(numbered_steps(500, 20))
    before = replay.state_dict()
    with pytest.raises(ValueError, match="Nothing was loaded"):
        replay.load_state_dict(other.state_dict())
    after = replay.state_dict()
    assert torch.equal(before["generator"], after["generator"])
    assert replay.online[:]["observation"].max() == 19


def test_a_seed_restarts_all_draws_and_the_sides_draw_apart() -> None:
    replay = mixed("uniform", share=0.45)
    replay.extend(numbered_steps(0, 50))
    replay.seed(5)
    first = [replay.sample()["index"].tolist() for _ in range(3)]
    replay.seed(5)
    assert [replay.sample()["index"].tolist() for _ in range(3)] == first
    replay.seed(5)
    assert (replay.online.sample()["index"] != replay.offline.sample()["index"]).any()


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_storage_of_torchrl_and_its_trainer_hook(storage: type) -> None:
    online = Replay(storage=storage(100), sampler=RandomSampler(), batch_size=4)
    replay = mixed(online)
    hook = ReplayBufferTrainer(replay, batch_size=6)
    hook.extend(numbered_steps(0, 20))
    batch = hook.sample(None)
    assert batch["is_offline"].sum() == 3
    hook.update_priority(batch)
    iterating = ReplayBufferTrainer(replay, iterate=True)
    assert [int(iterating.sample(None)["is_offline"].sum()) for _ in range(3)] == [4] * 3


def test_one_side_refuses_feedback_and_neither_changes() -> None:
    replay = mixed(offline="prioritized")
    replay.extend(numbered_steps(0, 20))
    batch = replay.sample()
    error = torch.ones(8)
    error[7] = float("nan")
    for wrong in (error, torch.ones(7), None):
        with pytest.raises(ValueError, match="td_error"):
            replay.update_priority(batch, wrong)
    with pytest.raises(ValueError, match="generation must hold one value"):
        replay.update_priority(batch["index"], torch.ones(8), generation=batch["generation"][:3])
    with pytest.raises(TypeError, match="the signal 'suprise'.*Did you mean 'surprise'"):
        replay.update_priority(batch, torch.ones(8), suprise=torch.ones(8))
    for signal in ([1.0] * 3, torch.ones(3)):
        with pytest.raises(ValueError, match="surprise must hold one value"):
            replay.update_priority(batch, torch.ones(8), surprise=signal)
    with pytest.raises(IndexError, match="rows stored"):
        replay.update_priority(torch.tensor([0, OFFLINE_INDEX + 99]), torch.tensor([5.0, 5.0]))
    assert (replay.online.sampler.priority_of(torch.arange(20)) < 1.001).all()


def test_rows_that_do_not_fit_are_named_all_at_once(tmp_path: Path) -> None:
    replay = mixed()
    rows = numbered_steps(0, 5).set("camera", torch.zeros(5, 2)).set("trajectory", torch.zeros(5, dtype=torch.int64))
    rows["next", "camera"] = rows["camera"]
    rows["observation"] = rows["observation"].double()
    with pytest.raises(ValueError, match=r"observation \(torch.float32.*online torch.float64.*camera \(missing"):
        replay.extend(rows)
    assert len(replay.online) == 0
    not_finite = numbered_steps(0, 5)
    not_finite["next", "reward"][0] = float("nan")
    for refused, message in ((not_finite, "finite"), (rows, "camera")):
        with pytest.raises(ValueError, match=message):
            replay.extend(refused)
    replay.extend(numbered_steps(0, 5))  # nothing is left of the columns that were refused
    full = recipes.uniform(capacity=10, batch_size=2)
    full.extend(rows)
    with pytest.raises(ValueError, match="camera"):
        recipes.mixed(online=full, offline=replay.offline, batch_size=2)
    later = recipes.mixed(online=full, offline=recipes.uniform(capacity=100, batch_size=4), batch_size=2)
    with pytest.raises(ValueError, match="camera"):
        later.offline.extend(numbered_steps(0, 5))
    assert (len(full), len(later.offline)) == (5, 0), "rows that were there before stay"
    replay.offline.save(tmp_path)
    later.offline.load(tmp_path)
    with pytest.raises(ValueError, match="camera"):
        later.sample()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"share": 1.5}, ValueError, "share"),
        ({"share": "half"}, TypeError, "share"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"seed": "a"}, TypeError, "seed"),
        ({"online": "uniform"}, TypeError, "online is 'uniform'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type, message: str) -> None:
    sides = {"online": recipes.uniform(capacity=10), "offline": recipes.uniform(capacity=10)}
    with pytest.raises(error, match=message):
        recipes.mixed(**sides | options)


def test_other_refusals() -> None:
    side = recipes.uniform(capacity=10)
    with pytest.raises(ValueError, match="the same buffer"):
        recipes.mixed(online=side, offline=side)
    with pytest.raises(ValueError, match="capacity of online is 10, below the 16 rows of each batch"):
        recipes.mixed(online=side, offline=recipes.uniform(capacity=100), batch_size=32)
    with pytest.raises(ValueError, match="discounts"):
        recipes.mixed(
            online=recipes.uniform(10, n_steps=2, discount=0.9), offline=recipes.uniform(10, n_steps=2, discount=0.8)
        )
    for online, offline in ((3, 1), (1, 3), (2, 3)):
        with pytest.raises(ValueError, match=f"n_steps is {online} in online and {offline} in offline"):
            recipes.mixed(online=recipes.uniform(10, n_steps=online), offline=recipes.uniform(10, n_steps=offline))
    with pytest.raises(ValueError, match=r"\(3, 0\) in online and \(None, 0\) in offline"):
        recipes.mixed(online=recipes.sequences(10, length=3), offline=side)
    replay = recipes.mixed(online=side, offline=recipes.uniform(capacity=10))
    replay.extend(numbered_steps(0, 20))
    with pytest.raises(RuntimeError, match="offline is empty"):
        replay.sample()
    with pytest.raises(ValueError, match="'mixed' joins two buffers"):
        recipes.by_name("mixed")
    for name in ("sampler", "writer", "empty"):
        with pytest.raises(AttributeError, match=rf"'{name}'; .* those of its sides, replay.online"):
            getattr(replay, name)
    with pytest.raises(TypeError, match=r"replay.online\[...\] or replay.offline"):
        replay[:]


def test_sequences_are_offline_ones_until_an_online_one_is_complete() -> None:
    sides = [recipes.sequences(100, length=4, batch_size=2, check_continuity=False) for _ in range(2)]
    replay = recipes.mixed(online=sides[0], offline=sides[1], batch_size=4, seed=0)
    replay.offline.extend(numbered_steps(1000, 12))
    found = []
    for start in (0, 3, 6):
        replay.extend(numbered_steps(start, 3))
        found.append(int(replay.sample()["is_offline"][:, 0].sum()))
    assert found == [4, 2, 2]
    alone = recipes.mixed(online=recipes.sequences(100, length=4), offline=sides[1], share=0.0, batch_size=4)
    alone.extend(numbered_steps(0, 3))
    with pytest.raises(RuntimeError, match="no sequence of 4 steps is complete"):
        alone.sample()


def _waits_for_a_draw(replay: MixedReplay, call: Callable[[], Any]) -> bool:
    """Whether another thread's ``call`` ends after a draw that has drawn online rows alone."""
    draw, order, begun = replay.offline.sample, [], threading.Event()

    def slow(count: int) -> Any:
        begun.set()
        time.sleep(0.05)
        order.append("draw")
        return draw(count)

    replay.offline.sample = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=replay.sample)
    thread.start()
    assert begun.wait(20)
    call()
    order.append("call")
    thread.join()
    del replay.offline.sample
    return order == ["draw", "call"]


@pytest.mark.parametrize("copied", [False, True])
def test_no_state_is_one_within_a_draw(copied: bool) -> None:
    replay = mixed()
    replay.extend(numbered_steps(0, 20))
    replay = pickle.loads(pickle.dumps(replay)) if copied else replay
    state, batch = replay.state_dict(), replay.sample()
    calls: list[Callable[[], Any]] = [
        replay.state_dict,
        lambda: replay.load_state_dict(state),
        lambda: replay.update_priority(batch, torch.ones(8)),
        lambda: replay.advance(updates=1),
        lambda: replay.seed(3),
        replay.frozen_state().__enter__,
    ]
    for call in calls:
        assert _waits_for_a_draw(replay, call)
