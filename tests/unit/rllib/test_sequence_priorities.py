# SPDX-License-Identifier: Apache-2.0
"""TD errors of sequences on their way home, from any number of Learners."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.sequences import SequencePriorities

from .recurrent_episodes import drawn, filled, numbers, recurrent, state_before


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
