# SPDX-License-Identifier: Apache-2.0
"""The driver's part of a sharded replay, over shards in this process: every recipe, several agents, curricula."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core.learner.training_data import TrainingData

from lightning_replay.schedulers import EasyToHard, MeanReturn
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer, joined_stats
from rllib_ext.sharded.shard import options_of_shard
from tests.recipe_options import DIVIDED_RECIPES, required_options
from tests.stored import stored_rows
from tests.unit.rllib_ext.episodes import numbered
from tests.unit.rllib_ext.local_shards import awaited, first_numbers, read, replays
from tests.unit.rllib_ext.multi_agent_episodes import OBSERVED, play

PAIRS = {"mixup", "neighborhood_mixup", "continuous_transition"}
WHOLE_ACTIONS: dict[str, Any] = {
    **{recipe: {"keys": ["observation"]} for recipe in ("noisy", "mixup", "continuous_transition")},
    "neighborhood_mixup": {"discrete": "same_action"},
}
UNMIXED = sorted(set(DIVIDED_RECIPES) - PAIRS - {"noisy", "s4rl", "reverse_sweep"})


pytestmark = pytest.mark.usefixtures("local_shards")


def with_task(episode: Any, task: int) -> Any:
    episode.custom_data["task"] = task
    return episode


def episodes(count: int = 12, length: int = 6, first: int = 0) -> list[Any]:
    """Episodes whose observations are 100 e + t, tasks by turns."""
    return [
        with_task(numbered(f"e{number}", length, offset=100.0 * number, terminated=True), number % 2)
        for number in range(first, first + count)
    ]


def build(recipe: str, num_shards: int = 3, capacity: int = 300, **options: Any) -> ShardedEpisodeReplayBuffer:
    given = required_options(recipe, capacity) | {"seed": 0} | options
    given |= WHOLE_ACTIONS.get(recipe, {})
    replay = ShardedEpisodeReplayBuffer(recipe, num_shards=num_shards, **given)
    replay.form_returns(1, 0.99)
    return replay


def test_groups_are_refused() -> None:
    with pytest.raises(TypeError, match="draws of GroupSampler cannot be divided over several replays"):
        build("groups")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", DIVIDED_RECIPES)
def test_every_recipe_gives_batches_of_rows_from_all_shards_and_takes_td_errors(recipe: str) -> None:
    replay = build(recipe)
    replay.add(episodes())
    shards: set[int] = set()
    for _ in range(4):
        (block,) = replay.sample(num_items=40)
        ids = awaited(replay)
        shards |= set(ids.shard.tolist())
        (rows,) = read([block])
        assert len(block) == len(rows) == len(ids.shard) == 40
        weights = rows.get_extra_model_outputs("weights", slice(0, 40))
        assert np.isfinite(weights).all() and (weights > 0).all()
        if recipe in UNMIXED:
            following = rows.get_observations(slice(1, 41))[:, 0]
            assert (following == first_numbers(rows) + 1).all()
        replay.update_priorities(np.ones(40), "default_policy")
    assert shards == {0, 1, 2}
    assert replay.stats()["num_rows"] == len(replay) == sum(map(len, replays(replay)))
    assert replay.get_metrics()["num_env_steps_added_lifetime"].peek() == 72


@pytest.mark.slow
def test_the_cameras_of_all_shards_are_stored_once_and_saved() -> None:
    def seen(number: int) -> dict[str, Any]:
        return {"front": np.full((2, 4, 3), number, np.uint8), "arm": {"wrist": np.full((2, 3, 2), number, np.uint8)}}

    options = {"frame_stack": 2, "image_key": ["front", ("arm", "wrist")]}
    replay = build("prioritized", **options)
    fragments = [[seen(20 * number + step) for step in range(7)] for number in range(6)]
    replay.add([numbered(f"e{place}", 6, observations=one, terminated=True) for place, one in enumerate(fragments)])
    assert [one.storage.frames_held for one in replays(replay)] == [14, 14, 14]
    again = build("prioritized", **options)
    again.set_state(replay.get_state())
    drawn = []
    for one in (replay, again):
        (rows,) = read(one.sample(num_items=40))
        found = rows.get_observations(slice(0, 40))
        assert (found["front"][:, :, 0, 0] == found["arm"]["wrist"][:, :, 0, 0]).all()
        assert len(np.unique(found["front"])) > 20
        drawn.append(found["front"])
    np.testing.assert_array_equal(*drawn)


@pytest.mark.slow
@pytest.mark.parametrize(("num_learners", "num_prefetch"), [(0, 0), (2, 0), (3, 0), (2, 2)])
def test_td_errors_of_several_modules_come_home(num_learners: int, num_prefetch: int) -> None:
    replay = build("prioritized", num_prefetch=num_prefetch)
    replay.num_learners = num_learners
    for _ in range(6):
        fragments = play(["a", "b", "c"], [dict.fromkeys("abc", OBSERVED)] * 9, fragment=4).fragments
        for fragment in fragments:
            replay.add([fragment])
    for _ in range(1 + num_prefetch):
        blocks = replay.sample(num_items=31)  # which no number of Learners divides
    shards = TrainingData(episodes=blocks).shard(num_shards=max(num_learners, 1))
    td_errors: dict[str, list[np.ndarray]] = {}
    for data, _ in shards:
        for block in read(data.episodes):
            td_errors.setdefault(block.module_id, []).append(first_numbers(block))
    expected: Counter[str] = Counter()
    for name, parts in td_errors.items():
        given = np.concatenate(parts)
        ids = awaited(replay, name)
        replay.update_priorities(given, name)
        for shard, slot, value in zip(ids.shard, ids.slot, given, strict=True):
            one = replays(replay, name)[shard]
            assert one.storage.get(int(slot))["observation"][0] == value
            assert one.sampler.priority_of(torch.tensor([slot]))[0] == pytest.approx(value, rel=1e-4, abs=1e-4)
            expected[name] += 1
    assert expected == {"module_a": 31, "module_b": 31, "module_c": 31}
    assert replay.num_env_steps_stored == 6 * 9 and set(replay.shards.rows) == set(expected)


def test_new_rows_get_the_largest_priority_of_all_shards() -> None:
    replay = build("prioritized", num_shards=2, priority_exponent=1.0)
    replay.add(episodes(2))
    replay.sample(num_items=40)
    ids = awaited(replay)
    replay.update_priorities(np.where(ids.shard == 0, 9.0, 2.0), "default_policy")
    replay.sample(num_items=1)
    new = episodes(2, first=2)
    replay.add(new)
    for one in replays(replay):
        slots = one.oldest_first()[-6:]
        assert one.sampler.priority_of(slots).tolist() == pytest.approx([9.0] * 6, rel=1e-4)


def test_the_first_rows_of_a_module_in_a_shard_get_the_largest_priority_of_all_shards() -> None:
    replay = build("prioritized", num_shards=2, priority_exponent=1.0)
    for number in range(2):
        (fragment,) = play(["a"], [{"a": OBSERVED}] * 6, fragment=6).fragments
        replay.add([fragment])
        if number == 0:
            replay.sample(num_items=40)
            replay.update_priorities(np.full(40, 9.0), "module_a")
            replay.sample(num_items=1)  # the driver learns of it with the next answers
    parts = [handle.shard.held.modules.get("module_a") for handle in replay.shards.handles]
    assert all(part is not None and len(part) == 6 for part in parts)
    new = parts[1].replay
    assert new.sampler.priority_of(new.oldest_first()).tolist() == pytest.approx([9.0] * 6, rel=1e-4)


def test_td_errors_of_a_shard_that_was_started_again_are_dropped_and_counted() -> None:
    replay = build("prioritized", num_shards=2, priority_exponent=1.0)
    replay.add(episodes())
    replay.sample(num_items=40)
    ids = awaited(replay)
    replay.shards.epochs[1] += 1
    replay.update_priorities(np.full(40, 9.0), "default_policy")
    assert replay.stats()["td_errors_dropped"] == (ids.shard == 1).sum() > 0
    kept, other = replays(replay)
    assert kept.stats()["priorities_updated"] == (ids.shard == 0).sum() and other.stats()["priorities_updated"] == 0


def test_more_steps_than_a_shard_holds_come_in_one_call() -> None:
    replay = build("uniform", num_shards=2, capacity=20)
    replay.add(episodes(8))
    assert [len(one) for one in replays(replay)] == [10, 10]
    assert replay.get_added_timesteps() == 48


def test_a_table_with_rows_in_few_shards_gets_its_share() -> None:
    replay = build("event_tables", capacity=120)
    replay.add(episodes())
    (rows,) = read(replay.sample(num_items=40))
    high = sum(len(one.tables.slots_of(one.tables.number("high"))) for one in replays(replay))
    assert high >= 3
    table = replays(replay)[0].tables.number("high")
    of_table = {(shard, slot) for shard, one in enumerate(replays(replay)) for slot in one.tables.slots_of(table)}
    ids = awaited(replay)
    drawn = [(shard, slot) in of_table for shard, slot in zip(ids.shard.tolist(), ids.slot.tolist(), strict=True)]
    assert sum(drawn) >= 20 and len(rows) == 40  # half of the batch, and those that the default table gives as well


def test_a_batch_of_a_curriculum_is_of_one_task_and_signals_reach_the_scheduler() -> None:
    progress = MeanReturn(low=0.0, high=1000.0, every=1)
    replay = build("parallel_curriculum", capacity=60, progress=progress)
    replay.add(episodes())
    tasks = set()
    for _ in range(12):
        (rows,) = read(replay.sample(num_items=20))
        of_batch = {int(number // 100) % 2 for number in first_numbers(rows)}
        assert len(of_batch) == 1
        tasks |= of_batch
    assert tasks == {0, 1}
    signals = [one.task_progress for one in (h.shard.held.modules["default_policy"] for h in replay.shards.handles)]
    assert sum(sum(one.episodes.values()) for one in signals) == 12
    assert not any(one.new_signals() for one in signals)  # all were sent
    assert replay.replay.tasks == ["target", "near"] and len(replay.replay) == 0


def test_signals_of_any_shard_move_the_curriculum_on() -> None:
    scheduler, progress = EasyToHard(["near", "target"], advance_at=0.5), MeanReturn(low=0.0, high=10.0, every=1)
    replay = build("parallel_curriculum", capacity=60, scheduler=scheduler, progress=progress)
    assert replay.replay.actor_tasks(1) == [1]
    replay.add(episodes(1, first=0))  # of the target alone
    replay.sample(num_items=4)
    assert replay.replay.actor_tasks(1) == [1]
    replay.add(episodes(1, first=1))
    replay.sample(num_items=4)
    assert replay.replay.actor_tasks(1) == [0]


def test_a_state_goes_on_with_the_same_draws() -> None:
    replay, other = build("prioritized"), build("prioritized", seed=5)
    replay.add(episodes())
    replay.sample(num_items=8)
    state = replay.get_state()
    other.start()
    state["losses"] = {"counts": [["steps_added", "", 5]], "rows": 5, "td_errors": 3}
    other.set_state(state)
    stats = other.stats()
    assert other.get_added_timesteps() == 72 + 5 and stats["num_rows"] == 72
    assert (stats["rows_lost"], stats["td_errors_dropped"]) == (5, 3)
    for _ in range(3):
        drawn = [first_numbers(read(one.sample(num_items=16))[0]).tolist() for one in (replay, other)]
        assert drawn[0] == drawn[1]
    with pytest.raises(ValueError, match="the state is of 3 shards and there are 2"):
        build("prioritized", num_shards=2).set_state(state)


def test_modules_are_drawn_independently_of_each_other() -> None:
    replay = build("uniform")
    points = [replay.draws.divider(name).state_dict()["generator"] for name in ("a", "b")]
    assert not torch.equal(*points)


def test_an_empty_replay_and_other_objects_are_refused() -> None:
    replay = build("uniform")
    with pytest.raises(RuntimeError, match="cannot sample from an empty replay buffer"):
        replay.sample(num_items=2)
    with pytest.raises(TypeError, match="got a str; episodes are accepted"):
        replay.add(["an episode"])
    assert len(replay) == 0


OPTIONS = {"capacity": 40, "seed": 0}
EPISODES, LENGTH = 16, 7


def signals(observation: np.ndarray) -> np.ndarray:
    """Equal TD errors, and of each row a surprise and values of two actions of its own, ``[B, 4]``."""
    noise = np.random.default_rng(7).random((2000, 3))[observation.astype(np.int64)]
    return np.column_stack((np.ones(len(observation)), 100.0 * noise[:, 0], noise[:, 1:]))


def learn(replay: Any, read_blocks: Any) -> None:
    """Draws every row, and returns what a Learner computes of it."""
    (block,) = read_blocks(replay.sample(num_items=600))
    replay.update_priorities(signals(first_numbers(block)), "default_policy")


def kept(replay: Any) -> list[float]:
    return sorted(stored_rows(replay)["observation"][:, 0].tolist())


def test_shards_keep_the_rows_that_one_buffer_keeps_of_the_same_steps() -> None:
    sharded = ShardedEpisodeReplayBuffer("surprise_retention", num_shards=2, **OPTIONS)
    single = [
        RecipeEpisodeReplayBuffer("surprise_retention", layout="flagged", **options_of_shard(OPTIONS, 2, one))
        for one in range(2)
    ]
    for buffer in (sharded, *single):
        buffer.form_returns(1, 0.99)
    newest: list[list[float]] = [[], []]
    for number in range(EPISODES):
        episode = numbered(f"e{number}", LENGTH, offset=100.0 * number, terminated=True)
        sharded.add([episode])
        learn(sharded, read)
        single[number % 2].add([episode])
        learn(single[number % 2], list)
        newest[number % 2] += [100.0 * number + step for step in range(LENGTH)]
    for shard, buffer, of_stream in zip(replays(sharded), single, newest, strict=True):
        assert kept(shard) == kept(buffer.replay) and len(shard) == 20
        assert kept(shard) != of_stream[-20:]
        stored = shard.storage.get(slice(0, 20))["observation"][:, 0].numpy()
        every = signals(np.array(of_stream))[:, 1]
        assert signals(stored)[:, 1].mean() > 1.3 * every.mean()


def reported(recipe: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flat metrics of one buffer and of three shards, after equal episodes and a repetition."""
    given = required_options(recipe, 90) | {"seed": 0} | options
    found = []
    for buffer in (
        RecipeEpisodeReplayBuffer(recipe, layout="flagged", **given),
        ShardedEpisodeReplayBuffer(recipe, num_shards=3, **given),
    ):
        buffer.form_returns(1, 0.99)
        for number in range(24):
            episode = numbered(f"e{number}", 6, offset=100.0 * number, terminated=number < 23)
            episode.custom_data["task"] = number // 3 % 2
            buffer.add([episode])
        buffer.add([episode])
        buffer.draws_per_report = 1
        for _ in range(11):
            buffer.sample(num_items=60)
            buffer.update_priorities(np.ones(60), "default_policy")
            metrics = flat(buffer.get_metrics())
        found.append(metrics)
    return found[0], found[1]


def flat(metrics: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(metrics, dict):
        return {prefix: metrics.peek()}
    return {name: value for key, part in metrics.items() for name, value in flat(part, f"{prefix}/{key}").items()}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["prioritized", "surprise_retention", "event_tables", "parallel_curriculum"])
def test_results_have_the_keys_of_one_buffer(recipe: str) -> None:
    progress = {"progress": MeanReturn(low=0.0, high=1000.0, every=1)} if recipe == "parallel_curriculum" else {}
    single, sharded = reported(recipe, **progress)
    assert {name for name in sharded if not name.startswith("/shards/")} == set(single)
    same = [
        name
        for name in single
        if name.endswith(("_lifetime", "_stored", "/size", "/fill", "/admitted", "/refused", "/evicted", "_exponent"))
        and "_sample" not in name
        and name != "/bytes_stored"
        and "/tables/high" not in name  # whose capacity is rounded up in each shard
    ]
    assert same and {name: sharded[name] for name in same} == pytest.approx({name: single[name] for name in same})
    for name in single:
        if recipe == "parallel_curriculum" and name.endswith("share_drawn"):  # of eleven batches, each of one task
            continue
        if name.endswith(("share_drawn", "event_share", "terminal_share", "age_over_capacity", "/probability")):
            assert sharded[name] == pytest.approx(single[name], abs=0.1), name


def test_shares_of_tables_are_weighted_by_what_they_are_shares_of() -> None:
    parts = [
        {"rows": 7, "rows_drawn": 90, "tables": {"goal": {"size": 1, "capacity": 2, "fill": 0.5, "share_drawn": 0.2}}},
        {"rows": 9, "rows_drawn": 10, "tables": {"goal": {"size": 0, "capacity": 6, "fill": 0.0, "share_drawn": 0.7}}},
    ]
    table = joined_stats(parts)["tables"]["goal"]
    assert (table["size"], table["capacity"]) == (1, 8)
    assert (table["fill"], table["share_drawn"]) == (0.125, pytest.approx(0.25))
