# SPDX-License-Identifier: Apache-2.0
"""What RLlib's own buffers report and have: their keys of results, and their members, answered or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.multi_agent_episode_buffer import MultiAgentEpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import PrioritizedEpisodeReplayBuffer

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.rllib_compat import DRAWS_PER_REPORT, complete_results
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer
from tests.unit.rllib_ext.episodes import numbered, numbers
from tests.unit.rllib_ext.multi_agent_episodes import OBSERVED, play
from tests.unit.rllib_ext.recurrent_episodes import recurrent

LENGTH, CAPACITY, BATCH = 10, 40, 64


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def results(buffer: Any, episodes: list[Any], draws: int, draws_per_report: int = 1) -> dict[str, Any]:
    """What an algorithm reports of a buffer that gets an episode before each draw."""
    root = MetricsLogger(root=True)
    if draws_per_report > 1:
        complete_results(root, buffer)
    for number in range(draws):
        buffer.add(episodes[number : number + 1])
        buffer.sample(num_items=BATCH, n_step=1, gamma=0.99, beta=0.4, sample_episodes=True)
        root.aggregate([buffer.get_metrics()], key="replay_buffer")
    return flat(root.compile()["replay_buffer"])


def one_agent() -> list[Any]:
    return [numbered(f"e{number}", LENGTH, offset=100.0 * number, terminated=True) for number in range(12)]


@pytest.mark.parametrize("draws_per_report", [1, DRAWS_PER_REPORT])
@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_every_key_of_rllibs_buffer_is_reported_and_counts_the_same(recipe: str, draws_per_report: int) -> None:
    kind = {"uniform": EpisodeReplayBuffer, "prioritized": PrioritizedEpisodeReplayBuffer}[recipe]
    theirs = results(kind(capacity=CAPACITY), one_agent(), 12)
    ours = results(RecipeEpisodeReplayBuffer(recipe, capacity=CAPACITY, seed=0), one_agent(), 12, draws_per_report)
    assert len(theirs) >= 40 and theirs.keys() <= ours.keys()
    drawn_at_random = ("per_sample", "step_utilization")
    means_of_theirs = ("num_env_steps_stored", "num_episodes_stored")
    for name, value in theirs.items():
        if name.startswith(means_of_theirs):
            assert ours[name] == {"num_env_steps_stored": CAPACITY, "num_episodes_stored": CAPACITY / LENGTH}[name]
        elif any(part in name for part in drawn_at_random):
            assert ours[name] == pytest.approx(value, rel=0.15), name
        else:
            assert ours[name] == value, name


def test_distinct_rows_and_episodes_of_each_draw_are_counted() -> None:
    buffer = RecipeEpisodeReplayBuffer("prioritized", capacity=200, seed=0)
    buffer.add(one_agent())
    rows, episodes = 0, 0
    for _ in range(20):
        drawn = numbers(buffer.sample(num_items=8)).tolist()
        rows += len(set(drawn))
        episodes += len({number // 100 for number in drawn})
    found = buffer.get_metrics()
    assert (found["num_env_steps_per_sample"].peek(), found["num_episodes_per_sample"].peek()) == (rows, episodes)
    assert found["env_step_utilization"].peek() == len(set(drawn)) / 8


def test_distinct_steps_of_sequences_are_counted() -> None:
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=100, seed=0)
    buffer.add([recurrent("a", 6, terminated=True), recurrent("b", 6, terminated=True)])
    drawn = buffer.sample(num_items=12, batch_length_T=4)
    metrics = buffer.get_metrics()
    assert (
        metrics["num_env_steps_sampled"].peek()
        == sum(map(len, drawn))
        > metrics["num_env_steps_per_sample"].peek()
        >= 4
    )
    assert metrics["num_episodes_per_sample"].peek() in (1, 2)


def test_the_keys_of_rllibs_buffer_for_several_agents_are_reported_by_module() -> None:
    steps = [dict.fromkeys(("a", "b"), OBSERVED)] * LENGTH
    theirs = results(MultiAgentEpisodeReplayBuffer(capacity=CAPACITY), play(["a", "b"], steps, LENGTH).fragments * 1, 1)
    ours = results(
        RecipeEpisodeReplayBuffer("uniform", capacity=CAPACITY), play(["a", "b"], steps, LENGTH).fragments, 1
    )
    missing = theirs.keys() - ours.keys()
    assert all(name.startswith(("num_agent_", "agent_")) for name in missing), missing
    assert {"num_agent_steps_added/a", "num_agent_steps_added/b", "num_module_episodes_stored"} - ours.keys() == {
        "num_module_episodes_stored"
    }


def members() -> list[str]:
    """Every public name of RLlib's buffer, those of its objects too."""
    return sorted(name for name in dir(PrioritizedEpisodeReplayBuffer(capacity=10)) if not name.startswith("_"))


BUFFERS: dict[str, Callable[[], Any]] = {
    "one": lambda: RecipeEpisodeReplayBuffer("prioritized", capacity=CAPACITY, seed=0),
    "shards": lambda: ShardedEpisodeReplayBuffer("prioritized", capacity=CAPACITY, seed=0, num_shards=2),
}
REFUSED = {
    "batch_length_T",
    "batch_size_B",
    "episode_id_to_index",
    "episodes",
    "metrics",
    "num_episodes_evicted",
    "rng",
}


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("name", members())
def test_every_member_of_rllibs_buffer_answers_or_is_refused_in_words(name: str, kind: str) -> None:
    buffer = BUFFERS[kind]()
    if name in REFUSED:
        with pytest.raises(AttributeError, match=rf"has no '{name}': it stores rows.*get_num_episodes\(\)"):
            getattr(buffer, name)
    else:
        getattr(buffer, name)


def test_methods_of_rllibs_class_that_need_its_episodes_say_what_is_missing() -> None:
    buffer = BUFFERS["one"]()
    with pytest.raises(AttributeError, match="it stores rows"):
        buffer._sample_batch(num_items=3)


@pytest.mark.usefixtures("local_shards")
@pytest.mark.parametrize("kind", BUFFERS)
def test_counts_of_episodes_and_steps_are_those_of_rllibs_buffer(kind: str) -> None:
    theirs, ours = PrioritizedEpisodeReplayBuffer(capacity=CAPACITY), BUFFERS[kind]()
    assert ours.capacity == theirs.capacity
    for number, episode in enumerate(one_agent()):
        for buffer in (theirs, ours):
            buffer.add([episode])
            buffer.sample(num_items=8)
        ours.get_metrics()
        for name in ("get_num_episodes", "get_num_episodes_evicted", "get_added_timesteps", "get_sampled_timesteps"):
            if kind == "one" or name.startswith("get_sampled"):
                assert getattr(ours, name)() == getattr(theirs, name)(), (number, name)
        assert ours.sampled_timesteps == theirs.sampled_timesteps == 8 * (number + 1)
    assert ours.get_num_episodes() + ours.get_num_episodes_evicted() == 12
