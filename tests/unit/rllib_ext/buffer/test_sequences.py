# SPDX-License-Identifier: Apache-2.0
"""Sequences for recurrent modules, on episodes whose numbers say where they belong."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.sequences import SequencePriorities
from tests.unit.rllib_ext.episodes import numbered
from tests.unit.rllib_ext.recurrent_episodes import drawn, filled, numbers, recurrent, state_after, state_before


def test_every_sequence_of_three_episodes() -> None:
    found = {numbers(episode)[0]: episode for episode in drawn(filled(), 2000, longest=4)}
    assert {start: numbers(episode) for start, episode in found.items()} == {
        **{0: [0, 1, 2, 3], 1: [1, 2, 3, 4], 2: [2, 3, 4], 3: [3, 4], 4: [4]},
        **{n: list(range(n, min(n + 4, 107))) for n in range(100, 107)},
        **{200: [200, 201, 202], 201: [201, 202], 202: [202]},
    }
    for start, episode in found.items():
        last, step = numbers(episode)[-1], start % 100
        assert (episode.is_terminated, episode.is_truncated) == (last == 4, last == 106)
        assert episode.t_started == step and episode.t == step + len(episode)
        assert state_before(episode) == (start - 1 if step else None)
        assert episode.get_observations(-1).tolist() == [last + 1, -(last % 100) - 1]
        assert episode.get_rewards().tolist() == numbers(episode)
        assert episode.get_actions().tolist() == [number % 2 for number in numbers(episode)]
        states = episode.get_extra_model_outputs("state_out")
        assert states["h"].shape == (len(episode), 1, 2) and states["h"].dtype == np.float32
        assert states["h"][:, 0, 0].tolist() == (-states["c"])[:, 0, 1].tolist() == numbers(episode)
        assert episode.is_numpy and "_" not in episode.id_


def test_steps_are_counted_and_sequences_sorted_by_length() -> None:
    buffer = filled()
    for steps in (1, 4, 5, 33):
        before = buffer.get_sampled_timesteps()
        lengths = [len(episode) for episode in drawn(buffer, steps, longest=4)]
        assert steps <= sum(lengths) < steps + 4
        assert lengths == sorted(lengths, reverse=True)
        assert buffer.get_sampled_timesteps() - before == sum(lengths)
        assert len({episode.id_ for episode in drawn(buffer, steps, longest=4)}) > 1 or steps < 5


def test_a_start_whose_state_was_overwritten_begins_one_step_later() -> None:
    # slot  0 1 2 3 4 5 6 7      the ring of 8 holds 102 to 109; 101, the state before 102, is gone
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=8, seed=0)
    buffer.add(recurrent("a", 6, offset=100))
    buffer.add(recurrent("a", 4, start=6, offset=100))
    found = drawn(buffer, 1000, longest=3)
    whole = {(n, n + 1, n + 2) for n in range(103, 108)}
    assert {tuple(numbers(episode)) for episode in found} == {*whole, (108, 109), (109,)}
    assert all(state_before(episode) == numbers(episode)[0] - 1 for episode in found)
    starts = [numbers(episode)[0] for episode in found]
    others = np.mean([starts.count(n) for n in range(104, 110)])
    assert 1.3 < starts.count(103) / others < 2.7  # its own draws and 102's


def test_prioritized_starts_and_their_weights() -> None:
    buffer = filled("prioritized", priority_exponent=1.0, importance_exponent=1.0, priority_offset=0.0)
    numbers_stored = buffer.replay.storage.get(slice(0, 15))["observation"][:, 0]
    buffer.replay.update_priority(torch.arange(15), torch.where(numbers_stored < 100, 4.0, 1.0))
    episodes = drawn(buffer, 3000, longest=3)
    low = [episode for episode in episodes if numbers(episode)[0] < 100]
    assert 0.6 < len(low) / len(episodes) < 0.73  # 5 rows of 4 among 5 of 4 and 10 of 1: two thirds
    for episode in episodes:
        expected = 0.25 if numbers(episode)[0] < 100 else 1.0
        np.testing.assert_allclose(episode.get_extra_model_outputs("weights"), expected, rtol=1e-6)


def test_a_lost_fragment_and_one_sent_twice() -> None:
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=50, seed=0)
    buffer.add(recurrent("a", 3))
    buffer.add(recurrent("a", 3))
    buffer.add(recurrent("a", 2, start=1, lookback=1))
    buffer.add(recurrent("a", 3, start=5, lookback=1))  # 3 and 4 were lost: the state before 5 is not stored
    buffer.add(recurrent("a", 1, start=9, lookback=1))  # 8 was lost, and nothing follows 9
    episodes = drawn(buffer, 500, longest=9)
    assert {tuple(numbers(episode)) for episode in episodes} == {(0, 1, 2), (1, 2), (2,), (6, 7), (7,)}
    assert all(episode.observations.lookback == min(episode.t_started, 1) for episode in episodes)


@pytest.mark.parametrize("numpy", [True, False])
def test_nested_spaces_and_states(numpy: bool) -> None:
    space = gym.spaces.Dict({"camera": gym.spaces.Box(0, 255, (2, 2), np.uint8), "goal": gym.spaces.Discrete(3)})
    space.seed(0)
    columns = {
        "observations": [space.sample() for _ in range(4)],
        "actions": [(np.int64(t), np.full(2, t, np.float32)) for t in range(3)],
        "extra_model_outputs": {"state_out": [{"encoder": {"lstm": state_after(t)}} for t in range(3)]},
    }
    whole = numbered("a", 3, numpy=numpy, **columns)
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=10, seed=0)
    buffer.add(whole)
    whole.to_numpy()
    for part in drawn(buffer, 30, longest=2):
        rows = slice(part.t_started, part.t_started + len(part))
        observations = part.get_observations()
        expected = whole.get_observations(slice(rows.start, rows.stop + 1))
        for name in ("camera", "goal"):
            assert observations[name].tolist() == expected[name].tolist()
            assert observations[name].dtype == expected[name].dtype
        assert part.get_actions()[1].tolist() == whole.get_actions(rows)[1].tolist()
        states = part.get_extra_model_outputs("state_out")["encoder"]["lstm"]
        assert states["h"][:, 0, 0].tolist() == list(range(rows.start, rows.stop))


def learner_batch(episodes: list[SingleAgentEpisode]) -> dict[str, Any]:
    """What the connectors of a DQN Learner make of sequences of up to 6 steps, for an LSTM of two cells."""
    if not hasattr(learner_batch, "learner"):
        config = DQNConfig().environment(
            observation_space=gym.spaces.Box(-1e3, 1e3, (2,)), action_space=gym.spaces.Discrete(2)
        )
        model = {"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 2, "max_seq_len": 6}
        learner_batch.learner = config.rl_module(model_config=model).build_learner()  # type: ignore[attr-defined]
        learner_batch.learner.build()  # type: ignore[attr-defined]
    learner = learner_batch.learner  # type: ignore[attr-defined]
    connector = learner._learner_connector
    return connector(rl_module=learner.module, batch={}, episodes=episodes, shared_data={})["default_policy"]


def test_batches_equal_those_of_rllibs_own_buffer() -> None:
    import tree

    fragments = [
        recurrent("a", 9),
        recurrent("b", 4, offset=100, terminated=True),
        recurrent("a", 5, start=9, truncated=True),
        recurrent("c", 8, offset=200),
    ]
    buffer, theirs = RecipeEpisodeReplayBuffer("uniform", capacity=100, seed=0), EpisodeReplayBuffer(capacity=100)
    buffer.add(fragments)
    for fragment in fragments:
        theirs.add(fragment)
    theirs.rng = np.random.default_rng(0)
    sampled = theirs.sample(600, n_step=1, batch_length_T=6, lookback=1, sample_episodes=True)
    known = {numbers(episode)[0]: episode for episode in sampled}
    assert len(known) == 26
    mine = drawn(buffer, 60, longest=6, burn_in=2)
    same = [known[numbers(episode)[0]] for episode in mine]
    for copy, original in enumerate(same):  # drawn twice, it needs two names
        same[copy] = original[:]
        same[copy].id_ = f"copy{copy}"
    ours, expected = learner_batch(mine), learner_batch(same)
    assert {"state_in", "next_state_in", "loss_mask", "seq_lens", "new_obs", "weights", "n_step"} <= set(ours)
    assert set(ours) == set(expected)
    for name in expected:
        tree.map_structure(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), ours[name], expected[name])
        if name not in ("weights", "n_step"):
            dtypes = [tree.map_structure(lambda a: a.dtype, one[name]) for one in (ours, expected)]
            assert dtypes[0] == dtypes[1]
    starts = torch.tensor([numbers(episode)[0] for episode in mine])
    inner = starts % 100 > 0
    assert ours["state_in"]["h"][inner][:, 0, 0].tolist() == (starts[inner] - 1).tolist()
    assert not ours["state_in"]["h"][~inner].any() and not inner.all()
    assert ours["next_state_in"]["c"][:, 0, 0].tolist() == (-starts).tolist()


def test_parts_of_one_sequence_in_one_learner_stay_apart() -> None:
    # RLlib deals sequences of 6, 5, 5 and 5 steps so that the first of two Learners gets both parts of one
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=100, seed=0)
    buffer.add([recurrent(f"e{n}", n, offset=100 * i, terminated=True) for i, n in enumerate([6, 5, 5, 5])])
    for _ in range(50):
        episodes = drawn(buffer, 20, longest=6, burn_in=4)
        if [len(episode) for episode in episodes] == [6, 5, 5, 5]:
            break
    first, second = ShardEpisodesIterator(episodes, num_shards=2, len_lookback_buffer=1)
    assert [len(part) for part in first] == [6, 4, 1] and [len(part) for part in second] == [5, 5]
    batch = learner_batch(first)
    assert batch["obs"].shape[:2] == batch["loss_mask"].shape == (3, 6)
    assert batch["loss_mask"].sum(1).tolist() == [6, 4, 1]


def test_episodes_no_longer_than_the_burn_in_are_refused() -> None:
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=50, seed=0)
    buffer.add([recurrent(f"e{n}", 4, offset=10 * n, terminated=True) for n in range(5)])
    drawn(buffer, 20, longest=9, burn_in=3)
    with pytest.raises(ValueError, match=r"no sequence of 5 steps or more among the 20 steps .* burn_in_len=4"):
        drawn(buffer, 20, longest=9, burn_in=4)


def test_rows_without_state_are_refused() -> None:
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=50)
    buffer.add(numbered("a", 5))
    with pytest.raises(ValueError, match="batch_length_T is 20: .* carry no state_out"):
        drawn(buffer, 3, longest=20)


@pytest.mark.parametrize(
    ("recipe", "options", "reason"),
    [
        ("mixup", {"keys": ["observation"]}, "RandomPairSampler draws pairs"),
        ("noisy", {"keys": ["observation"]}, "GaussianNoise changes single transitions"),
        ("surprise_retention", {}, "RetentionWriter keeps single transitions, scattered over the episodes"),
    ],
)
def test_recipes_of_more_than_single_rows_are_refused(recipe: str | None, options: dict, reason: str) -> None:
    buffer = RecipeEpisodeReplayBuffer(recipe, capacity=50, **options)
    with pytest.raises(ValueError, match=f"{reason}.* learns from sequences as they were played"):
        buffer.add(recurrent("a", 5))
    assert len(buffer) == 0


def test_replays_that_draw_sequences_themselves_are_refused() -> None:
    sampler = {"class_path": "lightning_replay.samplers.SequenceSampler", "init_args": {"length": 4}}
    for options in ({"recipe": "sequences", "length": 4}, {"sampler": sampler}):
        with pytest.raises(ValueError, match='SequenceSampler draws sequences, .* Use replay_config."uniform"'):
            RecipeEpisodeReplayBuffer(capacity=50, **options)


def played_by_two(state: bool) -> MultiAgentEpisode:
    outputs = {"state_out": state_after(0)} if state else {"action_logp": 0.0}
    return MultiAgentEpisode(
        observations=[{"x": np.zeros(2, np.float32), "y": np.zeros(2, np.float32)}] * 2,
        actions=[{"x": np.int64(0), "y": np.int64(0)}],
        rewards=[{"x": 0.0, "y": 0.0}],
        extra_model_outputs=[{"x": outputs, "y": outputs}],
        agent_module_ids={"x": "p", "y": "q"},
        agent_to_module_mapping_fn=lambda agent, *rest: {"x": "p", "y": "q"}[agent],
        len_lookback_buffer=0,
    )


def test_each_of_several_modules_draws_its_sequences_with_one_learner_alone() -> None:
    buffer = RecipeEpisodeReplayBuffer("prioritized", capacity=50, seed=0)
    buffer.add(played_by_two(state=True))
    found = drawn(buffer, 3, longest=2)
    assert [episode.module_id for episode in found] == ["p"] * 3 + ["q"] * 3
    assert len({(episode.module_id, episode.agent_id) for episode in found}) == 6
    assert all(episode.multi_agent_episode_id == episode.agent_id for episode in found)
    for name in ("p", "q"):
        buffer.update_priorities(np.full((3, 2), 4.0 if name == "p" else 7.0), name)
    priorities = [module.replay.sampler.priority_of(torch.tensor([0])).item() for module in buffer.modules.values()]
    assert priorities == pytest.approx([4, 7])
    buffer.num_learners = 2
    with pytest.raises(ValueError, match="modules with memory of several agents need a single Learner"):
        drawn(buffer, 3, longest=2)


def test_episodes_interrupted_by_a_restore_end_there() -> None:
    again = RecipeEpisodeReplayBuffer("uniform", capacity=100, seed=0)
    again.set_state(filled().get_state())
    again.add(recurrent("c", 2, start=3, offset=200))  # the same name, from a runner that was started anew
    found = {tuple(numbers(episode)): episode for episode in drawn(again, 1000, longest=9)}
    assert found[200, 201, 202].is_truncated
    assert not any({202, 203} <= set(sequence) for sequence in found)


@st.composite
def plays(draw: st.DrawFn) -> list[tuple[int, int, int, bool, bool]]:
    """Fragments (episode, first step, steps, whether the episode ends, whether the fragment is sent) of two runners."""
    fragments, episodes, running = [], itertools.count(), {}
    for _ in range(draw(st.integers(1, 12))):
        runner = draw(st.integers(0, 1))
        episode, step = running.get(runner) or (next(episodes), 0)
        length, ends = draw(st.integers(1, 5)), draw(st.booleans())
        fragments.append((episode, step, length, ends, draw(st.sampled_from([True, True, True, False]))))
        running[runner] = None if ends else (episode, step + length)
    return fragments


@pytest.mark.slow
@given(plays(), st.integers(1, 5), st.integers(0, 2))
def test_sequences_are_consecutive_steps_of_the_true_episodes(
    fragments: list[tuple[int, int, int, bool, bool]], longest: int, burn_in: int
) -> None:
    capacity = 11
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=capacity, seed=0)
    ring: list[tuple[int, bool]] = []  # number, whether it ends its episode; 100 * episode + step
    for episode, step, length, ends, sent in fragments:
        if sent:
            buffer.add(recurrent(str(episode), length, start=step, offset=100 * episode, terminated=ends))
            rows = range(100 * episode + step, 100 * episode + step + length)
            ring = [*ring, *((number, ends and number == rows[-1]) for number in rows)][-capacity:]
    stored = dict(ring)
    starts = {}  # start -> the whole sequence
    for number in stored:
        if number % 100 == 0 or number - 1 in stored:
            run = [number]
            while len(run) < longest and run[-1] + 1 in stored:
                run.append(run[-1] + 1)
            if len(run) > burn_in:
                starts[number] = run
    if burn_in >= longest or not starts:
        if stored:
            with pytest.raises(ValueError, match="burn_in_len"):
                drawn(buffer, 20, longest, burn_in)
        return
    for episode in drawn(buffer, 20, longest, burn_in):
        number = numbers(episode)[0]
        assert numbers(episode) == starts[number]
        assert episode.t_started == number % 100
        assert episode.observations.lookback == min(episode.t_started, 1)
        assert state_before(episode) == (number - 1 if number % 100 else None)
        assert episode.is_terminated == stored[starts[number][-1]] and not episode.is_truncated
        assert episode.get_observations(-1)[0] == starts[number][-1] + 1


def test_burn_in_and_padding_do_not_count() -> None:
    priorities = SequencePriorities([4, 3, 2], num_learners=0, longest=5, burn_in=1)
    sequences, magnitude = priorities.of(
        [
            [99, -4, 1, 1, 99],  # 0.9 * 4 + 0.1 * 2
            [99, 0, 3, 99, 99],  # 0.9 * 3 + 0.1 * 1.5
            [99, -5, 99, 99, 99],
        ]
    )
    assert sequences.tolist() == [0, 1, 2]
    assert magnitude.tolist() == pytest.approx([3.8, 2.85, 5.0])


def test_a_sequence_cut_for_two_learners() -> None:
    # aaaa bb: the first Learner gets aaa-, the second a--- and bb--; each chunk begins with a burn-in of its own
    priorities = SequencePriorities([4, 2], num_learners=2, longest=4, burn_in=1)
    sequences, magnitude = priorities.of([[99, 2, 4, 99], [99, 99, 99, 99], [99, 7, 99, 99]])
    assert sequences.tolist() == [0, 1]
    assert magnitude.tolist() == pytest.approx([0.9 * 4 + 0.1 * 3, 7])
    # without a burn-in both parts count
    priorities = SequencePriorities([4, 2], num_learners=2, longest=4, burn_in=0)
    _, magnitude = priorities.of([[1, 2, 4, 99], [9, 99, 99, 99], [7, 7, 99, 99]])
    assert magnitude.tolist() == pytest.approx([0.9 * 9 + 0.1 * 4, 7])


def test_a_sequence_of_which_nothing_was_learned_keeps_its_priority() -> None:
    # aaa bbb cc: each Learner gets one whole sequence and one step of cc, which is all burn-in
    priorities = SequencePriorities([3, 3, 2], num_learners=2, longest=3, burn_in=1)
    sequences, _ = priorities.of(np.ones((4, 3)))
    assert sequences.tolist() == [0, 1]


def echoed(episodes: list[SingleAgentEpisode], num_learners: int, width: int, burn_in: int) -> tuple[Any, dict]:
    """What Learners return that take each step's number as its TD error, and the priority of each sequence by hand."""
    chunks: list[list[float]] = []
    counted: dict[str, list[float]] = {episode.id_: [] for episode in episodes}
    shards = ShardEpisodesIterator(episodes, num_shards=max(num_learners, 1), len_lookback_buffer=1)
    for part in itertools.chain.from_iterable(shards):
        assert state_before(part) == (numbers(part)[0] - 1 if part.t_started else None)
        counted[part.id_] += numbers(part)[burn_in:]
        chunks.append(numbers(part) + [1e6] * (width - len(part)))
        chunks[-1][:burn_in] = [1e6] * burn_in
    expected = {name: 0.9 * max(seen) + 0.1 * np.mean(seen) for name, seen in counted.items() if seen}
    return np.array(chunks), expected


@pytest.mark.slow
@pytest.mark.parametrize("burn_in", [0, 2])
@pytest.mark.parametrize("num_learners", [0, 1, 2, 3])
def test_td_errors_come_home(num_learners: int, burn_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = filled("prioritized", num_learners=num_learners)
    seen: list[tuple[list[int], list[float]]] = []

    def compared(index: torch.Tensor, td_error: torch.Tensor, **rest: object) -> None:
        stored = buffer.replay.storage.get(index)["observation"][:, 0]
        seen.append((stored.int().tolist(), td_error.tolist()))

    monkeypatch.setattr(buffer.replay, "update_priority", compared)
    for _ in range(30):
        episodes = drawn(buffer, 16, longest=5, burn_in=burn_in)
        errors, expected = echoed(episodes, num_learners, width=5, burn_in=burn_in)
        buffer.update_priorities(errors, "default_policy")
        starts, priorities = seen.pop()
        assert starts == [numbers(episode)[0] for episode in episodes if episode.id_ in expected]
        assert priorities == pytest.approx([expected[episode.id_] for episode in episodes if episode.id_ in expected])


def test_td_errors_of_another_shape_are_refused() -> None:
    buffer = filled("prioritized")
    episodes = drawn(buffer, 10, longest=5)
    with pytest.raises(ValueError, match=rf"came back in {len(episodes)} chunks of 5 steps"):
        buffer.update_priorities(np.zeros((len(episodes) + 1, 5)))
    with pytest.raises(ValueError, match="have shape"):
        buffer.update_priorities(np.zeros(len(episodes) * 5))
    with pytest.raises(ValueError, match="finite"):
        buffer.update_priorities(np.full((len(episodes), 5), np.nan))
    buffer.update_priorities(np.zeros((len(episodes), 5)))
    with pytest.raises(ValueError, match="nothing was drawn since"):
        buffer.update_priorities(np.zeros((len(episodes), 5)))


def test_feedback_and_weight_of_a_moved_start_are_the_drawn_rows() -> None:
    # one row is ever drawn: the oldest, whose state is unknown
    buffer = RecipeEpisodeReplayBuffer("prioritized", capacity=4, seed=0, priority_exponent=1.0, priority_offset=0.0)
    buffer.add(recurrent("a", 4))
    buffer.add(recurrent("a", 1, start=4))
    replay = buffer.replay
    replay.update_priority(torch.arange(4), torch.tensor([0.0, 7.0, 0.0, 0.0]))  # slot 1 holds step 1, step 0 is gone
    (episode,) = drawn(buffer, 1, longest=3)
    assert numbers(episode) == [2, 3, 4] and state_before(episode) == 1
    buffer.update_priorities(np.array([[1.0, -3.0, 2.0]]))
    assert replay.sampler.state_dict()["tree"]["leaves"][:4].tolist() == pytest.approx([0, 0.9 * 3 + 0.1 * 2, 0, 0])
