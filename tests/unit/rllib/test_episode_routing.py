# SPDX-License-Identifier: Apache-2.0
"""Which shard an episode goes to, and which row a TD error."""

from __future__ import annotations

import pickle
from collections import Counter

import tree
from hypothesis import given
from hypothesis import strategies as st

from rllib_ext.sharded.routing import EpisodeReference, Router

FRAGMENTS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9), st.booleans()), max_size=60)


@given(fragments=FRAGMENTS, num_shards=st.integers(1, 5), first=st.integers(0, 9))
def test_an_episode_stays_in_one_shard_and_a_new_one_goes_to_that_with_the_fewest_steps(
    fragments: list[tuple[int, int, bool]], num_shards: int, first: int
) -> None:
    router, homes, lives = Router(num_shards, first), {}, Counter()
    steps = [0] * num_shards
    for number, length, ended in fragments:
        name = f"{number}-{lives[number]}"
        shard = router.shard_of(name, length, ended=ended)
        if name in homes:
            assert shard == homes[name]
        else:
            assert steps[shard] == min(steps)
        homes[name] = shard
        steps[shard] += length
        lives[number] += ended
    assert router.num_steps == steps


def test_env_runners_that_start_together_begin_with_different_shards() -> None:
    first = [Router(4, number).shard_of("a", 1, ended=False) for number in range(5)]
    assert first == [0, 1, 2, 3, 0]


def test_an_episode_that_never_ends_is_forgotten() -> None:
    router = Router(2, remembered=2)
    for name in "abc":
        router.shard_of(name, 1, ended=False)
    assert router.shard_of("c", 1, ended=False) == 0  # as before
    assert router.shard_of("a", 1, ended=False) == 1  # again a new one: 3 steps are in shard 0, one in shard 1


def test_a_reference_is_one_leaf_for_rllib_and_can_be_pickled() -> None:
    reference = EpisodeReference(2, None, 7)  # type: ignore[arg-type]
    assert tree.flatten([[reference], [reference]]) == [reference, reference]
    copy = pickle.loads(pickle.dumps(reference))
    assert (copy.shard, copy.reference, copy.num_steps) == (2, None, 7)
