# SPDX-License-Identifier: Apache-2.0
"""Reduced loops of CleanRL and LeanRL, whose buffer is that of Stable-Baselines3 or ours, by the import line alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from stable_baselines3.common.buffers import ReplayBuffer
from torch import nn
from torch.nn import functional

from lightning_replay.sb3 import RecipeBuffer

GAMMA = 0.9
NAMES = {1: ("final_obs", "final_info"), 0: ("final_observation", "final_info")}  # of Gymnasium 1 and 0.29
ACTIONS = {"discrete": spaces.Discrete(2), "continuous": spaces.Box(-1, 1, (1,), np.float32)}


class Line(gymnasium.Env[Any, Any]):
    """A walk on a line that terminates at 3 and is cut after 5 steps."""

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        self.observation_space = spaces.Box(-9, 9, (2,), np.float32)
        self.action_space = action_space
        self.place = self.time = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.place, self.time = 0, 0
        return np.array([0, 0], np.float32), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        self.place += 1 if np.all(action > 0) else -1
        seen = np.array([self.place, self.time], np.float32)
        return seen, float(self.place), self.place == 3, self.time == 5, {}


def vector_of(kind: str, num_envs: int = 1, mode: AutoresetMode = AutoresetMode.SAME_STEP) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Line, ACTIONS[kind])] * num_envs, autoreset_mode=mode)


def infos_named(infos: dict[str, Any], version: int) -> dict[str, Any]:
    """Returns the infos of a vector by the names of a version of Gymnasium."""
    name = NAMES[version][0]
    return {key.replace("final_obs", name): value for key, value in infos.items()}


def collect(buffers: list[Any], kind: str, *, steps: int, version: int = 0, num_envs: int = 1) -> None:
    """The scripts' loop: the last observation replaces the next one where a time limit cut, and infos are the vector's.

    Each buffer gets the same steps.
    """
    envs = vector_of(kind, num_envs)
    rng = np.random.default_rng(0)
    obs, _ = envs.reset(seed=0)
    for _ in range(steps):
        if kind == "discrete":
            actions: Any = rng.integers(2, size=num_envs)
        else:
            actions = rng.uniform(-1, 1, (num_envs, 1)).astype(np.float32)
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        infos = infos_named(infos, version)
        real_next_obs = next_obs.copy()
        for place in np.flatnonzero(truncations):
            real_next_obs[place] = infos[NAMES[version][0]][place]
        for buffer in buffers:
            buffer.add(obs, real_next_obs, actions, rewards, terminations, infos)
        obs = next_obs


def network(inputs: int, outputs: int, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


def dqn_loss(data: Any) -> torch.Tensor:
    value, target = network(2, 2, 0), network(2, 2, 1)
    with torch.no_grad():
        best, _ = target(data.next_observations).max(dim=1)
        goal = data.rewards.flatten() + GAMMA * best * (1 - data.dones.flatten())
    chosen = value(data.observations).gather(1, data.actions).squeeze()
    return functional.mse_loss(goal, chosen)


def critics_loss(data: Any) -> torch.Tensor:
    """Of TD3, DDPG, and SAC: one target for two critics."""
    critics = [network(3, 1, seed) for seed in (0, 1)]
    actor, target = network(2, 1, 2), network(3, 1, 3)
    with torch.no_grad():
        noise = (torch.ones_like(data.actions) * 0.1).clamp(-0.5, 0.5)
        next_actions = (actor(data.next_observations) + noise).clamp(-1, 1)
        best = target(torch.cat([data.next_observations, next_actions], 1))
        goal = data.rewards.flatten() + (1 - data.dones.flatten()) * GAMMA * best.view(-1)
    inputs = torch.cat([data.observations, data.actions], 1)
    first, second = (functional.mse_loss(critic(inputs).view(-1), goal) for critic in critics)
    return first + second


def c51_loss(data: Any) -> torch.Tensor:
    """A distribution over five returns, whose loss is a cross entropy."""
    atoms = torch.linspace(-10, 10, 5)
    value, target = network(2, 10, 0), network(2, 10, 1)
    with torch.no_grad():
        following = target(data.next_observations).view(-1, 2, 5).softmax(2)
        best = (following * atoms).sum(2).argmax(1)
        masses = following[torch.arange(len(best)), best]
        places = (data.rewards + GAMMA * atoms * (1 - data.dones)).clamp(-10, 10).add(10) / 5
        low, high = places.floor().clamp(max=4), places.ceil().clamp(max=4)
        projected = torch.zeros_like(masses)
        for row in range(len(masses)):
            projected[row].index_add_(0, low[row].long(), (high + (low == high) - places)[row] * masses[row])
            projected[row].index_add_(0, high[row].long(), (places - low)[row] * masses[row])
    chosen = value(data.observations).view(-1, 2, 5).softmax(2)[torch.arange(len(best)), data.actions.flatten()]
    return (-(projected * chosen.clamp(1e-5, 1 - 1e-5).log()).sum(-1)).mean()


SCRIPTS: dict[str, tuple[str, Callable[[Any], torch.Tensor]]] = {
    "dqn": ("discrete", dqn_loss),
    "c51": ("discrete", c51_loss),
    "td3, ddpg, sac": ("continuous", critics_loss),
}


def built(kind: str, of: Callable[..., Any], **options: Any) -> Any:
    """As the scripts build it."""
    envs = vector_of(kind)
    return of(
        400, envs.single_observation_space, envs.single_action_space, torch.device("cpu"),
        handle_timeout_termination=False, **options,
    )  # fmt: skip


def every_row(buffer: Any) -> Any:
    """Returns all rows in the order of their steps, as one batch."""
    if isinstance(buffer, ReplayBuffer) and not isinstance(buffer, RecipeBuffer):
        return buffer._get_samples(np.arange(buffer.size()))
    replay = buffer.replay
    replay.sampler.sample = lambda storage, batch_size: (torch.arange(batch_size), {})
    return buffer.sample(len(replay))


@pytest.mark.parametrize("version", NAMES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_same_rows_have_the_same_loss(script: str, version: int) -> None:
    kind, loss = SCRIPTS[script]
    theirs = built(kind, ReplayBuffer)
    ours = built(kind, RecipeBuffer, recipe="uniform")
    collect([theirs, ours], kind, steps=200, version=version)
    batches = [every_row(one) for one in (theirs, ours)]
    alive = batches[0].dones.flatten() == 0
    for name in ("observations", "actions", "rewards", "dones"):
        one, other = (getattr(batch, name) for batch in batches)
        assert torch.equal(one, other) and one.dtype is other.dtype, name
    assert torch.equal(*(batch.next_observations[alive] for batch in batches))
    assert 0 < int(batches[0].dones.sum()) < int(ours.replay[:]["next", "done"].sum())  # some were cut
    # After a termination the scripts give the first observation of the next episode, which no target uses.
    assert (batches[1].next_observations[~alive, 0] == 3).all()
    assert loss(batches[0]).item() == pytest.approx(loss(batches[1]).item(), rel=1e-5)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_learns_with_its_import_line_changed(script: str) -> None:
    kind, loss = SCRIPTS[script]
    buffer = built(kind, RecipeBuffer)
    collect([buffer], kind, steps=100)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(5):
            assert loss(buffer.sample(16)).requires_grad
            collect([buffer], kind, steps=1)
    has_errors = script != "c51"
    assert buffer.replay.stats()["priorities_updated"] == (80 if has_errors else 0)
    assert [one.category for one in found] == ([] if has_errors else [UserWarning])


def test_episodes_of_a_script_are_told_apart() -> None:
    """Its flags are terminations alone, so that only the infos tell where a time limit cut."""
    buffer = built("discrete", RecipeBuffer, recipe="uniform", n_steps=3, discount=GAMMA, n_envs=2)
    collect([buffer], "discrete", steps=60, num_envs=2)
    rows = buffer.replay[:]
    for name in rows["trajectory"].unique():
        episode = rows[rows["trajectory"] == name]
        assert episode["observation"][:, 1].tolist() == [*range(len(episode))]
        assert not episode["next", "done"][:-1].any() and len(episode) <= 5
        assert torch.equal(episode["next", "observation"][:-1], episode["observation"][1:])


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("last", [3, 9])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_resets_among_the_rows_are_reported_once(mode: AutoresetMode, last: int, num_envs: int) -> None:
    """Episodes end at 3, or only by the time limit, which flags of terminations do not tell."""
    envs = RecordEpisodeStatistics(vector_of("discrete", num_envs, mode))
    buffer = RecipeBuffer(
        400, envs.single_observation_space, envs.single_action_space, "cpu", num_envs, handle_timeout_termination=False
    )
    obs, _ = envs.reset(seed=0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(60):
            actions = np.full(num_envs, last == 3)
            next_obs, rewards, terminations, _, infos = envs.step(actions)
            buffer.add(obs, next_obs, actions, rewards, terminations, infos)
            obs = next_obs
    assert len(found) == (mode is AutoresetMode.NEXT_STEP)
    assert all("autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP" in str(one.message) for one in found)
    assert all(one.filename == __file__ for one in found)
    assert len(buffer.replay) == 60 * num_envs
