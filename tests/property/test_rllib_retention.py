# SPDX-License-Identifier: Apache-2.0
"""Rows kept by importance behind RLlib: whatever fragments come and are lost, what is stored is what was played."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.n_step import MAX_LAG
from tests.stored import stored_rows

DISCOUNT = 0.5
Row = tuple[float, ...]


class Sent(NamedTuple):
    """What an EnvRunner does with its running episode in one round."""

    length: int
    terminated: bool
    truncated: bool
    is_lost: bool  # on the way to the buffer
    comes_twice: bool
    breaks_off: bool  # the EnvRunner is lost after it


ROUNDS = st.lists(
    st.lists(
        st.builds(
            Sent,
            st.integers(1, 4),
            st.booleans(),
            st.booleans(),
            st.sampled_from([False] * 5 + [True]),
            st.sampled_from([False] * 5 + [True]),
            st.sampled_from([False] * 8 + [True]),
        ),
        min_size=1,
        max_size=3,
    ),
    min_size=1,
    max_size=8,
)


def fragment(name: str, offset: int, start: int, sent: Sent) -> SingleAgentEpisode:
    steps = range(start, start + sent.length)
    return SingleAgentEpisode(
        id_=name,
        observations=[np.array([offset + t], np.float32) for t in range(start, start + sent.length + 1)],
        actions=[np.int64(0) for _ in steps],
        rewards=[float((offset + t) % 8) for t in steps],
        t_started=start,
        len_lookback_buffer=0,
        terminated=sent.terminated,
        truncated=sent.truncated and not sent.terminated,
    ).to_numpy()


def returns_of(first: int, last: int, n_step: int, terminated: bool) -> Counter[Row]:
    """Rows of consecutive steps ``first .. last`` that nothing follows."""
    rows: Counter[Row] = Counter()
    for number in range(first, last):
        steps = min(n_step, last - number)
        summed = sum(DISCOUNT**step * ((number + step) % 8) for step in range(steps))
        rows[number, summed, number + steps, terminated and number + steps == last] += 1
    return rows


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(ROUNDS, st.integers(1, 4))
def test_stored_rows_are_the_returns_of_unbroken_stretches(rounds: list[list[Sent]], n_step: int) -> None:
    buffer = RecipeEpisodeReplayBuffer("surprise_retention", capacity=500, seed=0)
    buffer.form_returns(n_step, DISCOUNT)
    expected: Counter[Row] = Counter()
    running: dict[int, tuple[str, int, int, int]] = {}  # runner -> name, offset, step, first step of the stretch
    episodes = steps_received = 0
    for actions in rounds:
        arrived = []
        for runner, sent in enumerate(actions):
            if runner not in running:
                running[runner] = (f"e{episodes}", 1000 * episodes, 0, 0)
                episodes += 1
            name, offset, step, first = running.pop(runner)
            after = step + sent.length
            if sent.is_lost:  # what came before it is complete, and nothing follows
                expected += returns_of(offset + first, offset + step, n_step, False)
                first = after
            else:
                arrived += [fragment(name, offset, step, sent)] * (1 + sent.comes_twice)
                steps_received += sent.length
            ends = sent.terminated or sent.truncated
            if ends or sent.breaks_off:
                expected += returns_of(offset + first, offset + after, n_step, sent.terminated)
            else:
                running[runner] = name, offset, after, first
        if arrived:
            buffer.add(arrived)
    for _, offset, step, first in running.values():
        expected += returns_of(offset + first, offset + step, n_step, False)
    for call in range(MAX_LAG):  # until nobody waits any more
        filler = Sent(1, True, False, False, False, False)
        buffer.add(fragment(f"f{call}", 500_000 + 1000 * call, 0, filler))
    rows = stored_rows(buffer.replay)
    columns = (rows["observation"], rows["next", "reward"], rows["next", "observation"], rows["next", "terminated"])
    stored = Counter(row for row in map(tuple, torch.cat(columns, 1).tolist()) if row[0] < 500_000)
    assert stored == expected
    assert buffer.get_added_timesteps() == steps_received + MAX_LAG
