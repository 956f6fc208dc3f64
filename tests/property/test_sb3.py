# SPDX-License-Identifier: Apache-2.0
"""What a buffer of Stable-Baselines3 over a recipe holds is what Stable-Baselines3's own buffers hold."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.buffers import NStepReplayBuffer
from torch.nn import functional

from lightning_replay import PackedStorage, Replay
from lightning_replay.samplers import UniformSampler
from lightning_replay.sb3 import RecipeBuffer

SPACES = (spaces.Box(-(10**6), 10**6, (2,), np.float32), spaces.Discrete(9))


class EveryRow(UniformSampler):
    """Draws every row once."""

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        return torch.arange(batch_size), {}


def replay_of(capacity: int, **options: Any) -> Replay:
    return Replay(storage=PackedStorage(capacity), sampler=EveryRow(), **options)


def rows_of(drawn: Any) -> set[tuple[float, ...]]:
    """Rows of a batch; the discount of a terminal row multiplies nothing."""
    alive = 1 - drawn.dones
    columns = (drawn.observations, drawn.actions, drawn.next_observations, drawn.dones, drawn.rewards)
    return {tuple(row) for row in torch.cat([*columns, drawn.discounts * alive], 1).double().numpy().round(5).tolist()}


@settings(max_examples=60, deadline=None)
@given(
    num_envs=st.integers(1, 3),
    steps=st.integers(2, 5),
    buffer_size=st.integers(6, 20),
    ends=st.lists(st.lists(st.sampled_from(["", "", "", "end", "late"]), min_size=3, max_size=3), max_size=25),
)
def test_it_holds_what_their_buffer_holds(num_envs: int, steps: int, buffer_size: int, ends: list[list[str]]) -> None:
    """One of theirs for each environment, as theirs draws the environment of a row at random."""
    ours = RecipeBuffer(buffer_size, *SPACES, "cpu", num_envs, recipe=replay_of, n_steps=steps, discount=0.9)
    one: dict[str, Any] = {"n_steps": steps, "gamma": 0.9}
    theirs = [NStepReplayBuffer(buffer_size // num_envs, *SPACES, "cpu", **one) for _ in range(num_envs)]
    here = np.arange(2.0 * num_envs).reshape(num_envs, 2)
    for count, kinds in enumerate(ends, 1):
        there = here + 100.0 * count
        action, reward = np.arange(num_envs) + count % 5, np.cos(np.arange(num_envs) + count)
        done = np.array([kind != "" for kind in kinds[:num_envs]])
        infos = [{"TimeLimit.truncated": kind == "late"} for kind in kinds[:num_envs]]
        ours.add(here, there, action, reward, done, infos)
        for i, their in enumerate(theirs):
            its = slice(i, i + 1)
            their.add(here[its], there[its], action[its], reward[its], done[its], infos[its])
        here = np.where(done[:, None], there + 0.5, there)  # of the next episode
    assert (ours.size(), ours.pos, ours.full) == (theirs[0].size(), theirs[0].pos, theirs[0].full)
    if ends:
        expected = [rows_of(their._get_samples(np.arange(their.size()))) for their in theirs]
        assert rows_of(ours.sample(len(ours.replay))) == set.union(*expected)
        assert len(ours.replay) == num_envs * ours.size()


OPTIONS: list[dict[str, Any]] = [
    {"recipe": "uniform"},
    {"recipe": "prioritized", "priority_exponent": 0.7},
    {"recipe": "prioritized", "n_steps": 3, "discount": 0.9},
]


@settings(max_examples=60, deadline=None)
@given(
    options=st.sampled_from(OPTIONS),
    num_envs=st.integers(1, 3),
    buffer_size=st.integers(8, 300),
    calls=st.lists(st.sampled_from(["add", "end", "late", "add", "add", "draw", "draw", "save"]), max_size=60),
    repeats=st.integers(1, 90),
)
def test_steps_that_wait_lead_to_the_same_draws_as_steps_stored_at_once(
    options: dict[str, Any], num_envs: int, buffer_size: int, calls: list[str], repeats: int
) -> None:
    buffers = [RecipeBuffer(buffer_size, *SPACES, "cpu", num_envs, seed=0, **options) for _ in range(2)]
    assert not len(buffers[1].replay)  # From this read on, each step is stored at once.
    here = np.arange(2.0 * num_envs).reshape(num_envs, 2)
    count = 0
    for call in ["add"] * repeats + calls:
        if call == "draw":
            drawn = [buffer.sample(8) for buffer in buffers]
            for one, other in zip(*drawn, strict=True):
                assert (one is None and other is None) or torch.equal(torch.as_tensor(one), torch.as_tensor(other))
            for one in drawn:
                functional.mse_loss(torch.zeros(8, 1), one.rewards + 0.5)
        elif call == "save":
            buffers = [pickle.loads(pickle.dumps(buffer)) for buffer in buffers]
            assert len(buffers[1].replay) == len(buffers[1]._replay)
        else:
            count += 1
            there = here + 100.0 * count
            done = np.full(num_envs, call != "add")
            infos = [{"TimeLimit.truncated": call == "late"}] * num_envs
            for buffer in buffers:
                buffer.add(here, there, np.arange(num_envs), np.cos(np.arange(num_envs) + count), done, infos)
            here = there + 0.5 if call != "add" else there
    first, second = (buffer.replay for buffer in buffers)
    assert (first[:] == second[:]).all() and first.stats() == second.stats()
