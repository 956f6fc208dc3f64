# SPDX-License-Identifier: Apache-2.0
"""Environment steps become rows: true last observations, no reset rows, exact counts, interrupted episodes."""

from __future__ import annotations

import importlib
import re
import sys
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from lightning_replay import recipes
from lightning_replay.agents.spaces import ParameterizedActions
from lightning_replay.envs.building import UnknownEnvironmentError, with_checked_steps
from lightning_replay.lit import Evaluate, ReplayDataModule
from lightning_replay.lit.collection import Collection
from lightning_replay.lit.rollouts import make_environment, make_environments, random_actions
from lightning_replay.options import MissingExtraError
from lightning_replay.replay import Replay
from lightning_replay.storage.packed import PackedStorage
from tests.unit.lit.toys import Counting, Tiny, make_replay, make_trainer


def make_vector(*lengths: int, truncates: bool = False) -> gymnasium.vector.VectorEnv:
    constructors = [lambda n=n: Counting(n, truncates) for n in lengths]
    return gymnasium.vector.SyncVectorEnv(constructors, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)


@pytest.mark.parametrize("truncates", [False, True])
def test_rows_and_episodes_of_two_environments(truncates: bool) -> None:
    # environment 0 (3 steps):  0-1-2-3| 0-1-2-3|    environment 1 (4 steps):  0-1-2-3-4| 0-1-2
    replay = make_replay()
    collection = Collection(replay, lambda: make_vector(3, 4, truncates=truncates), 12, 100, seed=0)
    collection.collect_until(12, Tiny())
    rows, episodes = replay[:], collection.episodes
    first, second = rows[0::2], rows[1::2]
    assert first["next", "observation"].tolist() == [[0, 1], [0, 2], [0, 3], [1, 1], [1, 2], [1, 3]]
    assert second["observation"].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]]
    assert first["next", "truncated" if truncates else "terminated"].flatten().tolist() == [0, 0, 1, 0, 0, 1]
    assert rows["trajectory"].tolist() == [0, 1, 0, 1, 0, 1, 2, 1, 2, 3, 2, 3]
    assert [(e.env_steps, e.episode_return, e.length) for e in episodes] == [(6, 6.0, 3), (8, 10.0, 4), (12, 6.0, 3)]


def make_collection(num_envs: int = 1, env_steps: int = 100, warmup_steps: int = 10, length: int = 5):
    replay = make_replay()
    vector = lambda: make_environments(lambda: Counting(length), {}, num_envs, asynchronous=False)  # noqa: E731
    return replay, Collection(replay, vector, warmup_steps, env_steps, seed=0)


def test_actions_are_random_first_and_the_agents_after_in_eval_mode_without_gradients() -> None:
    replay, collection = make_collection(warmup_steps=20)
    agent = Tiny().train()
    collection.collect_until(20, agent)
    assert agent.modes == []
    warm = replay[:]["action"]
    assert warm.min() < -0.5 and warm.max() > 0.5
    collection.collect_until(30, agent)
    assert agent.modes == [(False, False)] * 10
    assert agent.training and torch.is_grad_enabled()
    assert (replay[:]["action"][20:] - 0.5).abs().max() < 0.5


def test_interrupted_episodes_are_truncated_just_before_the_next_step() -> None:
    replay, collection = make_collection(num_envs=2, length=5)
    collection.collect_until(14, Tiny())  # seven steps each: one whole episode, two steps of the next
    collection.close()
    assert not replay[:]["next", "truncated"].any()
    collection.collect_until(16, Tiny())
    rows = replay[:]
    assert rows["next", "truncated"].flatten().nonzero().flatten().tolist() == [12, 13]
    assert rows["next", "done"].flatten().nonzero().flatten().tolist() == [8, 9, 12, 13]
    assert not rows["next", "terminated"].flatten()[[12, 13]].any()
    assert rows["trajectory"][[12, 13, 14, 15]].tolist() == [2, 3, 4, 5]
    assert rows["observation"][14:].tolist() == [[0, 0], [0, 0]]


def test_an_episode_that_had_ended_is_not_truncated() -> None:
    replay, collection = make_collection(length=5)
    collection.collect_until(10, Tiny())
    collection.close()
    collection.collect_until(11, Tiny())
    assert not replay[:]["next", "truncated"].any()


class Reusing(gymnasium.Env):
    """Observation ``[episode, step]``, reward and info the step; one array and one dictionary for all steps."""

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (2,), np.float32)

    def __init__(self, terminates: bool, action_space: gymnasium.Space | None = None) -> None:
        self.action_space = action_space or gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.seen, self.info, self.terminates = np.zeros(2, np.float32), {}, terminates

    def _shown(self):
        self.info["count"], self.info["view"] = int(self.seen[1]), self.seen[1:].reshape(())  # which changes too
        return self.seen, self.info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen[:] = self.seen[0] + 1, 0
        return self._shown()

    def step(self, action):
        self.seen[1] += 1
        ends = bool(self.seen[1] == 5)
        observation, info = self._shown()
        return observation, float(self.seen[1]), ends and self.terminates, ends and not self.terminates, info


def assert_played(rows) -> None:
    before, after = rows["observation"], rows["next", "observation"]
    assert (before[:, 0] == after[:, 0]).all() and (after[:, 1] == before[:, 1] + 1).all()
    assert (rows["next", "reward"].flatten() == after[:, 1]).all()
    assert (rows["next", "done"].flatten() == (after[:, 1] == 5)).all()


@pytest.mark.parametrize(
    ("num_envs", "asynchronous", "terminates"), [(1, False, True), (3, False, False), (2, True, True)]
)
def test_arrays_and_infos_that_an_environment_reuses_are_copied(num_envs: int, asynchronous: bool, terminates) -> None:
    replay, env = make_replay(), partial(Reusing, terminates)
    vector = partial(make_environments, env, {}, num_envs, asynchronous=False)
    if asynchronous:  # the same with processes that start at once
        makers, mode = [partial(with_checked_steps, env)] * num_envs, gymnasium.vector.AutoresetMode.SAME_STEP
        vector = partial(gymnasium.vector.AsyncVectorEnv, makers, context="fork", autoreset_mode=mode)
    collection = Collection(replay, vector, 20, 1_000, seed=0, info_keys=["count", "view"])
    collection.collect_until(120, Tiny())
    collection.close()
    rows = replay[:]
    assert len(rows) == 120 and rows["next", "done"].sum() >= 20
    assert_played(rows)
    for key in ("count", "view"):
        assert torch.equal(rows["next", key].flatten(), rows["next", "observation"][:, 1])


class Repeating(Tiny):
    def act(self, observation, explore):
        if not hasattr(self, "returned"):
            self.returned = torch.zeros(len(observation), 1)
        self.returned += 1 / 64
        return self.returned


def test_actions_that_an_agent_reuses_are_copied() -> None:
    replay, collection = make_collection(num_envs=2, warmup_steps=0)
    collection.collect_until(40, Repeating())  # stored in one call
    assert replay[:]["action"][::2].flatten().tolist() == [step / 64 for step in range(1, 21)]


class Own(Tiny):
    def __init__(self, space: gymnasium.Space) -> None:
        super().__init__()
        self.space = space

    def act(self, observation, explore):
        return torch.as_tensor(np.stack([self.space.sample() for _ in range(len(observation))]))


@pytest.mark.parametrize(
    "space", [gymnasium.spaces.MultiDiscrete([3, 2], start=[-1, 4]), gymnasium.spaces.MultiBinary([2, 2])]
)
def test_several_discrete_actions(space: gymnasium.Space, tmp_path: Path) -> None:
    replay = make_replay()
    data = ReplayDataModule(partial(Reusing, True, space), replay, env_steps=60, warmup_steps=10, num_envs=2, seed=0)
    make_trainer(tmp_path, [Evaluate(30, 1)]).fit(Own(space), datamodule=data)
    rows = replay[:]
    assert_played(rows)
    assert all(space.contains(action) for action in rows["action"].numpy())
    assert len(rows["action"].flatten(1).unique(dim=0)) > 3


class Corner(gymnasium.spaces.Box):
    def sample(self, mask=None, probability=None):
        return np.where(self.np_random.random(self.shape) < 0.25, self.low, self.high)


@pytest.mark.parametrize(
    "space", [gymnasium.spaces.Discrete(5, start=2), gymnasium.spaces.MultiBinary([2, 2]), Corner(-1.0, 2.0, (2,))]
)
def test_random_actions_are_those_of_the_space(space: gymnasium.Space) -> None:
    space.seed(1)
    actions = random_actions(space, 50)
    assert actions.dtype == space.dtype and actions.shape == (50, *space.shape)
    space.seed(1)
    assert np.array_equal(actions, [space.sample() for _ in range(50)])


def test_parameters_of_integer_boxes_reach_their_bounds() -> None:
    space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(1), gymnasium.spaces.Box(-2, 2, (1,), np.int64)], seed=0)
    (given,) = ParameterizedActions.of(space).for_environments(*random_actions(space, 20_000))[1:]
    assert given.dtype == np.int64
    assert chisquare(np.bincount(given[:, 0] + 2, minlength=5)).pvalue > 1e-4
    near = np.array([[1.9], [-1.9], [0.4], [-0.4]], np.float32)  # of an agent
    assert ParameterizedActions.of(space).for_environments(np.zeros(4), near)[1].flatten().tolist() == [2, -2, 0, 0]


def test_no_random_actions_of_a_space_without_arrays() -> None:
    with pytest.raises(ValueError, match=r"no random warm-up actions in the action space Text.*TransformAction"):
        random_actions(gymnasium.spaces.Text(5), 3)


def test_demonstrations_without_a_number_of_their_episode_are_not_continued() -> None:
    """They were cut off at the observation with which every environment begins; one environment needs no number."""
    replay, collection = make_collection()
    collection.collect_until(10, Tiny())
    demonstrations = replay[:].exclude("trajectory", "generation", "index")[:8]
    demonstrations["next", "observation"][-1] = torch.tensor([0.0, 0.0])
    replay = Replay(storage=PackedStorage(50), batch_size=4, n_steps=3, seed=0)
    replay.extend(demonstrations)
    collection = Collection(replay, lambda: make_vector(5), warmup_steps=0, env_steps=100, seed=0)
    collection.collect_until(6, Tiny())
    assert len(replay) == 14 and "trajectory" not in replay[:].keys()  # noqa: SIM118
    assert replay[:8]["next", "truncated"].flatten().tolist() == [False] * 7 + [True]
    assert replay.successors(torch.arange(14)).tolist() == [1, 2, 3, 4, -1, 6, 7, -1, 9, 10, 11, 12, -1, -1]
    rewards = replay.sample(64)["next", "reward"].flatten().unique()
    assert len(rewards) and (rewards <= 3 + 0.99 * 4 + 0.99**2 * 5 + 1e-4).all()


def test_rows_of_several_environments_need_the_number_of_their_episode() -> None:
    replay, collection = make_collection()
    collection.collect_until(10, Tiny())
    demonstrations = replay[:].exclude("trajectory", "generation", "index")
    replay, collection = make_collection(num_envs=2)
    replay.extend(demonstrations)
    with pytest.raises(ValueError, match="Different: 'trajectory': stored no such column"):
        collection.collect_until(10, Tiny())
    assert len(replay) == 10 and collection.env_steps == 0
    demonstrations["trajectory"] = torch.full([10], 0)
    replay, collection = make_collection(num_envs=2)
    replay.extend(demonstrations)
    collection.collect_until(10, Tiny())
    assert len(replay) == 20


class Importing(Counting):
    def __init__(self, module: str) -> None:
        super().__init__()
        importlib.import_module(module)


def test_a_missing_package_of_an_environment_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minigrid", None)
    with pytest.raises(MissingExtraError, match=r"needs MiniGrid, .*: pip install 'lightning-replay\[grids\]'"):
        make_environment(Importing, {"module": "minigrid"})


def test_an_import_that_fails_in_the_code_of_a_user_is_left_as_it_is(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "registers_and_fails.py").write_text("import nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    for env, arguments in [(Importing, {"module": "nowhere"}), ("registers_and_fails:Own-v0", {})]:
        with pytest.raises(ModuleNotFoundError, match="No module named 'nowhere'") as found:
            make_environment(env, arguments)
        assert found.type is ModuleNotFoundError


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ("CartPol-v1", "Environment `CartPol` doesn't exist. Did you mean: `CartPole`? Give a registered id"),
        ("nowhere.envs:Own-v0", "No module named 'nowhere'. Give a registered id"),
        ("gymnasium.nowhere:Own-v0", "No module named 'gymnasium.nowhere'. Give a registered id"),
    ],
)
def test_an_unknown_environment_is_refused(env: str, reason: str) -> None:
    with pytest.raises(UnknownEnvironmentError, match=re.escape(f"environment {env!r}: {reason}")):
        make_environment(env, {})


def test_a_replay_that_draws_pairs_alone_is_filled_again() -> None:
    replay = recipes.neighborhood_mixup(capacity=100, batch_size=4, num_neighbors=2, seed=0)
    for env_steps in (20, 30):
        collection = Collection(replay, lambda: make_vector(5), warmup_steps=env_steps, env_steps=env_steps, seed=0)
        collection.collect_until(env_steps, Tiny())
    assert len(replay) == 50
