# SPDX-License-Identifier: Apache-2.0
"""Dictionaries of observations, integers, and actions of several numbers in the data modules."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from tensordict import TensorDict, TensorDictBase

from lightning_replay import recipes
from lightning_replay.agents import DQN, PPO, SAC, TD3
from lightning_replay.envs.building import with_checked_steps
from lightning_replay.inspection.compare import inspect_buffers
from lightning_replay.levels import UniformLevels
from lightning_replay.lit import Evaluate, InspectBuffer, LevelDataModule, ReplayDataModule
from lightning_replay.lit.rollouts import level_returns, stochastic_policy
from tests.unit.lit.level_toys import Valuer
from tests.unit.lit.toys import Tiny, make_trainer

CAMERA = Box(0, 255, (6, 6, 3), np.uint8)


class House(gymnasium.Env):
    """All entries of an observation have the number of the step in an episode, which ends after ``length``."""

    def __init__(self, action_space: Any = None, length: int = 4, camera: bool = True) -> None:
        place = Dict({"room": Discrete(9, start=-1), "position": Box(-9, 9, (2,), np.float64)})
        entries = {"place": place, "goals": Tuple([Box(-9, 9, (2,), np.float64), Box(-9, 9, (2,), np.float64)])}
        self.observation_space = Dict(entries | ({"camera": CAMERA} if camera else {}))
        self.action_space = Discrete(2) if action_space is None else action_space
        self.length, self.camera = length, camera

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.level, self.count = seed or 0, 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.count += 1
        return self._seen(), float(self.count), self.count == self.length, False, {}

    def _seen(self) -> Any:
        # in another order than the space, with entries of the same shape
        position = np.full(2, self.count, np.float64)
        entries = {"place": {"position": position, "room": self.count}, "goals": (position + 0.25, position + 0.5)}
        return {"camera": np.full((6, 6, 3), self.count, np.uint8)} | entries if self.camera else entries


class Looker(Tiny):
    """Keeps the entries that it acted on."""

    def __init__(self, space: Any = None) -> None:
        super().__init__(gives_td_error=False)
        self.space, self.looked = Discrete(2) if space is None else space, []

    def act(self, observation: Any, explore: bool) -> Any:
        self.looked.append(observation)
        return np.stack([self.space.sample() for _ in range(len(observation))])

    def update(self, batch: TensorDict) -> dict[str, Any]:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.weight.sum())
        optimizer.step()
        return {"loss": self.weight.detach()}


def leaves(observation: TensorDict) -> dict[tuple[str, ...], torch.Tensor]:
    return {key if isinstance(key, tuple) else (key,): value for key, value in observation.items(True, True)}


DTYPES = {
    ("camera",): torch.uint8,
    ("goals", "0"): torch.float32,
    ("goals", "1"): torch.float32,
    ("place", "position"): torch.float32,
    ("place", "room"): torch.int64,
}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rows_and_observations_of_nested_spaces(tmp_path: Path, asynchronous: bool) -> None:
    replay, agent = recipes.uniform(capacity=100, batch_size=8, seed=0), Looker()
    options = {"env_steps": 24, "warmup_steps": 12, "num_envs": 2, "seed": 0, "evaluation_episodes": 1}
    data = ReplayDataModule(House, replay, asynchronous=asynchronous, **options)
    trainer = make_trainer(tmp_path)
    trainer.fit(agent, datamodule=data)
    rows = replay[:]
    steps = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3] * 3)
    for seen, expected in ((rows["observation"], steps), (rows["next", "observation"], steps + 1)):
        found = leaves(seen)
        assert {key: value.dtype for key, value in found.items()} == DTYPES
        assert found["camera",].shape == (24, 6, 6, 3) and found["place", "room"].shape == (24,)
        shifts = {("goals", "0"): 0.25, ("goals", "1"): 0.5}
        for key, value in found.items():
            assert torch.equal(value.reshape(24, -1)[:, 0].double(), expected + shifts.get(key, 0.0)), key
    assert len(agent.looked) == 6
    for one, step in zip(agent.looked, [2, 3, 0, 1, 2, 3], strict=True):
        assert isinstance(one, TensorDictBase) and one.batch_size == (2,)
        assert {key: value.dtype for key, value in leaves(one).items()} == DTYPES
        assert one["place", "room"].tolist() == [step, step]
    agent.looked.clear()
    (metrics,) = trainer.validate(agent, datamodule=data, verbose=False)
    assert metrics["eval/return"] == 10 and agent.looked[3].batch_size == (1,)
    assert agent.looked[3]["goals", "1"].tolist() == [[3.5, 3.5]] and agent.looked[3]["place", "room"].tolist() == [3]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "space"), [(DQN, None), (SAC, Box(-1, 1, (2,))), (TD3, Box(-1, 1, (2,)))])
def test_agents_learn_are_evaluated_and_resumed(tmp_path: Path, kind: Any, space: Any) -> None:
    def made(env_steps: int) -> ReplayDataModule:
        replay = recipes.prioritized(capacity=100, batch_size=8, n_steps=2, seed=0)
        return ReplayDataModule(partial(House, space), replay, env_steps=env_steps, warmup_steps=10, num_envs=2, seed=0)

    data, agent = made(20), kind()
    evaluate, inspect = Evaluate(every_n_env_steps=10, episodes=1), InspectBuffer(5, path=str(tmp_path / "page.html"))
    trainer = make_trainer(tmp_path, [evaluate, inspect])
    trainer.fit(agent, datamodule=data)
    assert trainer.callback_metrics["eval/return"] == 10 and [*agent.observation_encoder.parameters()]
    assert "camera" in (tmp_path / "page.html").read_text()
    found = inspect_buffers({"a": data.replay}, observation_key=("observation", "place", "position"))
    assert found["a"].points.shape == (20, 2)
    trainer.save_checkpoint(tmp_path / "house.ckpt")
    resumed, other = made(24), kind.load_from_checkpoint(tmp_path / "house.ckpt", weights_only=True)
    make_trainer(tmp_path, [evaluate, inspect]).fit(other, datamodule=resumed, ckpt_path=tmp_path / "house.ckpt")
    assert resumed.updates_done == 14 and len(resumed.replay) == 24
    whole = data.replay[:]["observation"]
    assert all(torch.equal(value[:20], whole[key]) for key, value in leaves(resumed.replay[:]["observation"]).items())
    with pytest.raises(
        ValueError, match=r"built with observation_size\['camera'\]=\[6, 6, 3\], and .* has no such entry\. "
    ):
        fewer = ReplayDataModule(partial(House, space, camera=False), made(20).replay, env_steps=20, warmup_steps=10)
        make_trainer(tmp_path).fit(other, datamodule=fewer)


@pytest.mark.parametrize("env", ["FrozenLake-v1", "Blackjack-v1"])
def test_integers_are_stored_as_they_are(tmp_path: Path, env: str) -> None:
    replay = recipes.uniform(capacity=100, batch_size=8, seed=0)
    data = ReplayDataModule(env, replay, env_steps=24, warmup_steps=20, num_envs=2, seed=0)
    make_trainer(tmp_path).fit(DQN.for_env(env), datamodule=data)
    observation = replay[:]["observation"]
    stored = observation if env == "FrozenLake-v1" else observation["0"]
    assert stored.dtype == torch.int64 and stored.shape == (24,) and len(stored.unique()) > 2


@pytest.mark.parametrize("space", [MultiDiscrete([3, 2]), MultiBinary(3)])
def test_actions_of_several_numbers(tmp_path: Path, space: Any) -> None:
    space.seed(0)

    def made(env_steps: int) -> ReplayDataModule:
        replay = recipes.uniform(capacity=100, batch_size=8, seed=0)
        return ReplayDataModule(partial(House, space), replay, env_steps=env_steps, warmup_steps=10, num_envs=2, seed=0)

    data, agent, evaluate = made(20), Looker(space), Evaluate(10, episodes=1)
    trainer = make_trainer(tmp_path, [evaluate])
    trainer.fit(agent, datamodule=data)
    assert trainer.callback_metrics["eval/return"] == 10
    action = data.replay[:]["action"]
    assert action.shape == (20, *space.shape) and action.numpy().dtype == space.dtype
    assert all(space.contains(one) for one in action.numpy()) and len(action[:10].unique(dim=0)) > 2
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = made(24)
    make_trainer(tmp_path, [evaluate]).fit(agent, datamodule=resumed, ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(resumed.replay[:]["action"][:20], action)


class Wordy(House):
    def __init__(self) -> None:
        super().__init__()
        more = {"mission": Text(9), "arm": Tuple([Discrete(2), Text(3)])}
        self.observation_space = Dict(self.observation_space.spaces | more)


def test_entries_that_are_no_arrays_are_all_named(tmp_path: Path) -> None:
    data = ReplayDataModule(Wordy, recipes.uniform(capacity=100), env_steps=20, warmup_steps=10)
    names = r"observation\['arm'\]\['1'\], Text.*; observation\['mission'\], Text.* among its observations; .*FilterObs"
    with pytest.raises(ValueError, match=names) as error:
        make_trainer(tmp_path).fit(Tiny(), datamodule=data)
    assert "camera" not in str(error.value)
    with pytest.raises(ValueError, match=r"DQN has no encoder for observation\['arm'\]\['1'\].*'mission'"):
        DQN.for_env(Wordy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"camera": np.zeros((6, 6), np.uint8)}, r"observation\['camera'\] of shape \[6, 6\], and .* \[6, 6, 3\]"),
        ({"place": {"room": 1}}, r"observation\['place'\] with the entries \['room'\], and .*\['position', 'room'\]"),
        ({"place": 3}, r"observation\['place'\] with the entries \[\], and its"),
        ({"more": 1}, r"observation with the entries \['camera', 'goals', 'more', 'place'\]"),
        ({"goals": (np.zeros(2), np.zeros(1))}, r"observation\['goals'\]\['1'\] of shape \[1\]"),
        ({"place": {"position": np.zeros(2), "room": 8}}, r"observation\['place'\]\['room'\] of 8, which Discrete\("),
        ({"camera": np.zeros((6, 6, 3))}, r"observation\['camera'\] of float64, and its .* has uint8\. "),
        ({"camera": np.zeros(3), "place": 3}, r"observation\['camera'\] of shape .*; an observation\['place'\] with"),
    ],
)
def test_observations_that_are_not_of_the_space_are_refused(change: dict[str, Any], message: str) -> None:
    class Wrong(House):
        def _seen(self) -> Any:
            return super()._seen() | (change if self.count else {})

    environment = with_checked_steps(Wrong)
    environment.reset()
    with pytest.raises(ValueError, match=f"step of .* returned an {message}"):
        environment.step(0)


class Walker(Valuer):
    """Values are those of the room."""

    def act(self, observation: Any, explore: bool) -> torch.Tensor:
        return torch.zeros(len(observation), dtype=torch.int64)

    def value(self, observation: Any) -> torch.Tensor:
        return observation["place", "room"].unsqueeze(-1).float()


class TimedHouse(House):
    def step(self, action: Any) -> Any:
        observation, reward, ended, _, info = super().step(action)
        return observation, reward, False, ended, info


def test_rollouts_of_nested_spaces(tmp_path: Path) -> None:
    options = {"env_steps": 24, "num_envs": 2, "rollout_length": 6, "check": False, "held_out_levels": 2}
    data, agent = LevelDataModule(TimedHouse, UniformLevels(50, seed=0), **options), Walker()
    trainer = make_trainer(tmp_path)
    trainer.fit(agent, datamodule=data)
    rooms = [rollout["observation", "place", "room"].tolist() for rollout in agent.rollouts]
    assert rooms == [[[0, 1, 2, 3, 0, 1]] * 2, [[2, 3, 0, 1, 2, 3]] * 2]
    assert agent.rollouts[1]["next", "state_value"][0, :, 0].tolist() == [3, 4, 1, 2, 3, 4]
    with stochastic_policy(agent, seed=0) as policy:
        assert level_returns(policy, House, [1, 2, 3], num_envs=2).tolist() == [10, 10, 10]
    with pytest.raises(ValueError, match="PPO got the observation space Dict.*DQN, SAC and TD3 encode dictionaries"):
        make_trainer(tmp_path).fit(PPO(), datamodule=LevelDataModule(House, UniformLevels(50, seed=0), **options))
