# SPDX-License-Identifier: Apache-2.0
"""Several agents: every row stored is a step that an agent took, and every TD error comes back to its row."""

from __future__ import annotations

import pickle
from collections import defaultdict
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from tests.unit.rllib_ext.episodes import column, numbers
from tests.unit.rllib_ext.multi_agent_episodes import (
    AGENTS,
    OBSERVED,
    SILENT,
    TERMINATED,
    TERMINATED_SILENTLY,
    TRUNCATED,
    Played,
    Row,
    play,
)

GAMMA = 0.5


def pairs(agent: str, *args: Any, **rest: Any) -> str:
    """Agents a and b share a module."""
    return "shared" if agent in "ab" else "own"


def stored_rows(buffer: RecipeEpisodeReplayBuffer, module_id: str) -> list[Row]:
    """What a module's replay holds, in the order of its slots."""
    if module_id not in buffer.modules:
        return []
    rows = buffer.modules[module_id].replay.storage.get(slice(0, len(buffer.modules[module_id])))
    following = rows["next"]
    columns = (
        rows["observation"][:, 0].int(),
        rows["action"],
        following["reward"][:, 0],
        following["observation"][:, 0].int(),
        following["terminated"][:, 0],
        following["truncated"][:, 0],
    )
    return [Row(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def agents_do(words: dict[str, str]) -> list[dict[str, int]]:
    """Steps from a line of each agent: o observed, . silent, x terminated, t truncated, ! terminated unseen."""
    meaning = {"o": OBSERVED, ".": SILENT, "x": TERMINATED, "t": TRUNCATED, "!": TERMINATED_SILENTLY}
    length = max(map(len, words.values()))
    return [{agent: meaning[line[step]] for agent, line in words.items() if step < len(line)} for step in range(length)]


def three_at_random(random: Random) -> Played:
    """An episode of three agents; hypothesis alone would hardly find long ones, which have many fragments."""
    words = {agent: "".join(random.choices("o.xt!", (60, 30, 3, 3, 3), k=16)) for agent in AGENTS}
    return play(
        first=random.sample(AGENTS, random.randint(1, 3)),
        steps=agents_do(words)[: random.randint(1, 16)],
        fragment=random.randint(1, 6),
        lookback=random.randint(1, 3),
        module_of=pairs,
    )


@pytest.mark.slow
@settings(max_examples=40)
@given(random=st.randoms(use_true_random=True))
def test_every_row_is_a_step_an_agent_took(random: Random) -> None:
    played = [three_at_random(random) for _ in range(random.randint(1, 3))]
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=1000, seed=0)
    expected: dict[str, list[Row]] = defaultdict(list)
    runs: list[list[Row]] = []  # of one agent, without a step missing
    gaps = duplicates = 0
    for episode in played:
        open_runs: dict[str, list[Row]] = {}
        known = lost = False
        for fragment, rows in zip(episode.fragments, episode.rows, strict=True):
            outcome = random.choices(["sent", "sent twice", "lost"], (3, 1, 1))[0]
            if outcome == "lost":
                open_runs = {agent: run for agent, run in open_runs.items() if not rows.get(agent)}
                lost = True
                continue
            gaps += known and lost
            known, lost = True, False
            for _ in range(1 + (outcome == "sent twice")):
                buffer.add([fragment])
            duplicates += (outcome == "sent twice") * fragment.env_steps()
            for agent, new in rows.items():
                expected[pairs(agent)] += new
                if agent not in open_runs:
                    open_runs[agent] = []
                    runs.append(open_runs[agent])
                open_runs[agent] += new
    for module_id in ("shared", "own"):
        assert sorted(stored_rows(buffer, module_id)) == sorted(expected[module_id])
    if not any(expected.values()):
        return
    metrics = buffer.get_metrics()
    assert metrics["num_fragment_gaps_lifetime"].peek() == gaps
    assert metrics["num_duplicate_env_steps_lifetime"].peek() == duplicates
    returns = defaultdict(list)  # a number may be in several episodes
    for run in runs:
        for place, row in enumerate(run):
            rewards = [later.reward for later in run[place : place + 3]]
            returns[row.observation].append(sum(GAMMA**step * reward for step, reward in enumerate(rewards)))
    drawn = buffer.sample(num_items=50, n_step=3, gamma=GAMMA)
    for observed, summed in zip(numbers(drawn), column(drawn, "get_rewards"), strict=True):
        assert summed in returns[observed]


NONE = {"__all__": False}


@pytest.mark.parametrize("sent", ["as it is", "as arrays from another process"])
@pytest.mark.parametrize(
    ("terminateds", "truncateds", "died"),
    [
        ({"a": True, **NONE}, {"__all__": True}, "a"),
        ({"a": True, "b": False, **NONE}, {"a": True, "b": True, "__all__": True}, "a"),
        ({"a": True, "b": True, "__all__": True}, {"__all__": True}, "ab"),
        ({"__all__": True}, {"__all__": True}, "ab"),
        ({"a": True, **NONE}, {"b": True, **NONE}, "a"),
        ({"a": True, "__all__": True}, {"b": True, "__all__": True}, "a"),
        ({"__all__": True}, {"a": True, "b": True}, ""),
        (NONE, {"a": True, "b": True, "__all__": True}, ""),
        (NONE, {"__all__": True}, ""),
        ({"__all__": True}, NONE, "ab"),
        ({"a": True, "b": True, **NONE}, NONE, "ab"),
        (NONE, {"a": True, "b": True, **NONE}, ""),
    ],
)
def test_an_agent_that_dies_in_the_last_step_of_all_is_terminated(
    terminateds: dict[str, bool], truncateds: dict[str, bool], died: str, sent: str
) -> None:
    episode = MultiAgentEpisode(agent_module_ids=dict.fromkeys("ab", "shared"))
    episode.add_env_reset(observations={agent: np.zeros(1, np.float32) for agent in "ab"})
    for step, flags in enumerate([(NONE, NONE), (terminateds, truncateds)], 1):
        seen, rewards = {agent: np.full(1, step, np.float32) for agent in "ab"}, {"a": 1.0, "b": 2.0}
        episode.add_env_step(seen, {"a": 0, "b": 0}, rewards, terminateds=flags[0], truncateds=flags[1])
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=100, seed=0)
    buffer.add([episode if sent == "as it is" else pickle.loads(pickle.dumps(episode.to_numpy()))])
    following = buffer.modules["shared"].replay[:]["next"]
    last, whose = following["observation"][:, 0] == 2, following["reward"][:, 0].long()
    terminated = whose[last & following["terminated"][:, 0]].tolist()
    assert "".join(sorted("?ab"[agent] for agent in terminated)) == died
    assert following["done"][:, 0].tolist() == last.tolist()


def default_for_a(agent: str, *args: Any, **rest: Any) -> str:
    return "default_policy" if agent == "a" else "other"


def three_agents(**options: Any) -> RecipeEpisodeReplayBuffer:
    """Six steps of agents a and c, two of b."""
    buffer = RecipeEpisodeReplayBuffer(**{"recipe": "prioritized", "capacity": 100, "seed": 0, **options})
    played = play(AGENTS, agents_do({"a": "oooooo", "b": "ox", "c": "oooooo"}), fragment=6, module_of=default_for_a)
    buffer.add(played.fragments)
    return buffer


def test_one_of_several_modules_may_have_the_default_name() -> None:
    buffer = three_agents()
    assert {name: len(module) for name, module in buffer.modules.items()} == {"default_policy": 6, "other": 8}
    for episode in buffer.sample(num_items=4):
        assert episode.module_id in ("default_policy", "other") and episode.agent_id is not None
    assert buffer.get_num_timesteps("other") == 8 and buffer.get_num_timesteps() == 14
    with pytest.raises(ValueError, match=r"a replay for each of \['default_policy', 'other'\]"):
        buffer.replay  # noqa: B018


def test_a_module_can_store_nothing() -> None:
    buffer = three_agents(modules={"other": None})
    assert list(buffer.modules) == ["default_policy"] and len(buffer) == 6
    assert {episode.module_id for episode in buffer.sample(num_items=4)} == {"default_policy"}
    nothing = three_agents(modules={"other": None, "default_policy": None})
    with pytest.raises(RuntimeError, match="no module that stores steps has any yet"):
        nothing.sample(num_items=4)


def test_modules_draw_independently_of_each_other() -> None:
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=100, seed=0, layout="flagged")
    buffer.add(play(AGENTS, agents_do({agent: "oooooooooo" for agent in AGENTS}), fragment=20).fragments)
    drawn = {tuple(numbers([block]) % 1000) for block in buffer.sample(num_items=20)}
    assert len(drawn) == 3


def test_rows_that_do_not_fit_leave_every_module_as_it_was() -> None:
    buffer = three_agents()
    wide = play(["a", "b"], agents_do({"a": "oo", "b": "oo"}), fragment=2, module_of=default_for_a).fragments
    part = wide[0].agent_episodes["b"]
    part.observations.data = np.concatenate([part.observations.data] * 2, axis=1)
    with pytest.raises(ValueError, match="One buffer stores rows of one space"):
        buffer.add(wide)
    assert {name: len(module) for name, module in buffer.modules.items()} == {"default_policy": 6, "other": 8}
    assert buffer.get_metrics()["num_env_steps_added_lifetime"].peek() == 6


def test_td_errors_name_their_module() -> None:
    buffer = three_agents()
    buffer.sample(num_items=4)
    with pytest.raises(ValueError, match=r"module_id is None; there is a replay for each of \['default_policy', 'ot"):
        buffer.update_priorities(np.zeros(4))
    with pytest.raises(ValueError, match="module_id is 'third'"):
        buffer.update_priorities(np.zeros(4), "third")
    only = three_agents(modules={"default_policy": None})
    only.sample(num_items=4)
    only.update_priorities(np.zeros(4))


@settings(max_examples=40)
@given(
    layout=st.sampled_from(["flagged", "blocks", "rows"]),
    num_learners=st.integers(0, 4),
    rows=st.integers(4, 24),
    lengths=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=2, max_size=3),
)
def test_td_errors_come_home_and_each_learner_has_each_module(
    layout: str, num_learners: int, rows: int, lengths: list[list[int]]
) -> None:
    buffer = RecipeEpisodeReplayBuffer("prioritized", capacity=100, seed=0, layout=layout, num_learners=num_learners)
    for agent, parts in zip(AGENTS, lengths, strict=False):  # short episodes: many done rows, which are dealt singly
        for length in parts:
            buffer.add(play([agent], agents_do({agent: "o" * (length - 1) + "x"}), fragment=9).fragments)
    home: list[bool] = []
    for module in buffer.modules.values():
        storage = module.replay.storage

        def compared(index: torch.Tensor, td_error: torch.Tensor, storage: Any = storage, **rest: Any) -> None:
            home.extend((storage.get(index)["observation"][:, 0] == td_error).tolist())

        module.replay.update_priority = compared  # type: ignore[method-assign]
    shards = list(ShardEpisodesIterator(buffer.sample(num_items=rows), num_shards=max(num_learners, 1)))
    orders = {tuple(dict.fromkeys(episode.module_id for episode in shard)) for shard in shards}
    assert len(orders) == 1 and set(*orders) == set(buffer.modules)
    for name in buffer.modules:
        parts = [[episode for episode in shard if episode.module_id == name] for shard in shards]
        if rows >= 12:
            assert min(sum(map(len, part)) for part in parts) >= rows // len(shards) - 2
        buffer.update_priorities(numbers([episode for part in parts for episode in part]), name)
    assert len(home) == rows * len(buffer.modules) and all(home)


def reduced(buffer: RecipeEpisodeReplayBuffer, root: MetricsLogger) -> dict[str, Any]:
    root.aggregate([buffer.get_metrics()], key="replay_buffer")
    return root.compile()["replay_buffer"]


def test_environment_steps_are_counted_once_however_many_agents_act() -> None:
    #  a acts in each of 10 steps and keeps 5 rows, c in every second and keeps all 5
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=5, seed=0)
    played = play(["a", "c"], agents_do({"a": "oooooooooo", "c": ".o.o.o.o.o"}), fragment=5)
    root = MetricsLogger(root=True)
    buffer.add(played.fragments[0])
    buffer.sample(num_items=3)
    result = reduced(buffer, root)
    assert (result["num_env_steps_added_lifetime"], result["num_env_steps_stored"]) == (5, 5)
    buffer.add(played.fragments[1:])
    buffer.add(played.fragments[:1])  # again
    buffer.sample(num_items=4)
    result = reduced(buffer, root)
    assert result["num_agent_steps_added_lifetime"] == {"a": 10, "c": 5}
    assert result["num_module_steps_stored"] == {"module_a": 5, "module_c": 5}
    assert result["num_module_steps_evicted_lifetime"] == {"module_a": 5, "module_c": 0}
    assert result["num_env_steps_added_lifetime"] == result["num_env_steps_stored"] == 10  # c's rows reach back to all
    assert result["num_env_steps_evicted_lifetime"] == 0
    assert result["num_env_steps_sampled_lifetime"] == 2 * (3 + 4)
    assert result["num_episodes_added_lifetime"] == 1
    assert (result["num_duplicate_env_steps_lifetime"], result["num_fragment_gaps_lifetime"]) == (5, 0)
    for fragment in play(["a", "c"], agents_do({"a": "oooooooooo", "c": ".o.o.o.o.o"}), fragment=5).fragments:
        buffer.add(fragment)
    buffer.sample(num_items=1)
    result = reduced(buffer, root)
    assert (result["num_env_steps_added_lifetime"], result["num_env_steps_stored"]) == (20, 10)
    assert (result["num_env_steps_evicted_lifetime"], result["num_env_steps_evicted"]) == (10, 10)
