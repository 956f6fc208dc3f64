# SPDX-License-Identifier: Apache-2.0
"""Environment steps become rows: true last observations, no reset rows, exact counts, interrupted episodes."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from lightning_replay.envs.building import UnknownEnvironmentError
from lightning_replay.extras import MissingExtraError
from lightning_replay.lit.collectors.replay import Collection, Rollout
from lightning_replay.lit.environments import (
    make_environment,
    make_environments,
    random_actions,
)
from lightning_replay.storage.rows_of_columns import rows_of_columns
from tests.unit.lit.toys import Counting, Tiny, make_replay


def make_vector(*lengths: int, truncates: bool = False) -> gymnasium.vector.VectorEnv:
    constructors = [lambda n=n: Counting(n, truncates) for n in lengths]
    return gymnasium.vector.SyncVectorEnv(constructors, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)


@pytest.mark.parametrize("truncates", [False, True])
def test_rows_of_two_environments(truncates: bool) -> None:
    # environment 0 (3 steps):  0-1-2-3| 0-1-2-3|    environment 1 (4 steps):  0-1-2-3-4| 0-1-2
    rollout = Rollout(make_vector(3, 4, truncates=truncates), seed=0)
    episodes = [e for step in range(6) for e in rollout.step(np.zeros((2, 1), np.float32), 2 * (step + 1))]
    rows = rows_of_columns(rollout.take_columns(12))
    first, second = rows[0::2], rows[1::2]
    assert first["observation"].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert first["next", "observation"].tolist() == [[0, 1], [0, 2], [0, 3], [1, 1], [1, 2], [1, 3]]
    assert first["next", "reward"].flatten().tolist() == [1, 2, 3, 1, 2, 3]
    assert second["observation"].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]]
    assert second["next", "observation"].tolist() == [[0, 1], [0, 2], [0, 3], [0, 4], [1, 1], [1, 2]]
    done = [False, False, True, False, False, True]
    assert first["next", "done"].flatten().tolist() == done
    assert first["next", "terminated"].flatten().tolist() == [ends and not truncates for ends in done]
    assert first["next", "truncated"].flatten().tolist() == [ends and truncates for ends in done]
    assert first["trajectory"].tolist() == [0, 0, 0, 2, 2, 2]
    assert second["trajectory"].tolist() == [1, 1, 1, 1, 3, 3]
    assert rows["trajectory"].dtype == torch.int64
    assert rows["observation"].dtype == rows["next", "reward"].dtype == torch.float32
    assert [(e.env_steps, e.episode_return, e.length) for e in episodes] == [(6, 6.0, 3), (8, 10.0, 4), (12, 6.0, 3)]


def test_episodes_that_end_together_get_different_numbers() -> None:
    rollout = Rollout(make_vector(2, 2), seed=0, first_trajectory=7)
    for _ in range(4):
        rollout.step(np.zeros((2, 1), np.float32), 0)
    assert rows_of_columns(rollout.take_columns(8))["trajectory"].tolist() == [7, 8, 7, 8, 9, 10, 9, 10]


def make_collection(num_envs: int = 1, env_steps: int = 100, warmup_steps: int = 10, length: int = 5):
    replay = make_replay()
    vector = lambda: make_environments(lambda: Counting(length), {}, num_envs, asynchronous=False)  # noqa: E731
    return replay, Collection(replay, vector, warmup_steps, env_steps, seed=0)


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_the_last_step_of_several_environments_is_cut(num_envs: int) -> None:
    replay, collection = make_collection(num_envs)
    collection.collect_until(100, Tiny())
    assert len(replay) == collection.env_steps == 100


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


def test_state_restores_clock_generator_and_open_episodes() -> None:
    replay, collection = make_collection(num_envs=2, warmup_steps=50)
    collection.collect_until(14, Tiny())
    other_replay, other = make_collection(num_envs=2, warmup_steps=50)
    other_replay.extend(replay[:].exclude("generation", "index"))
    other.load_state_dict(collection.state_dict())
    assert other.env_steps == 14
    collection.close()
    for one in (collection, other):
        one.collect_until(20, Tiny())
    for key in (("next", "truncated"), "trajectory", "action", "observation"):
        assert torch.equal(replay[:][key], other_replay[:][key]), key


@pytest.mark.slow
def test_processes_of_their_own() -> None:
    replays = []
    for asynchronous in (False, True):
        replays.append(make_replay())
        vector = lambda: make_environments("Pendulum-v1", {}, 2, asynchronous)  # noqa: B023, E731
        collection = Collection(replays[-1], vector, 50, 500, seed=0)
        collection.collect_until(450, Tiny())
        collection.close()
    rows, others = replays[0][:], replays[1][:]
    assert rows["next", "truncated"].sum() == 2
    torch.testing.assert_close(rows["observation"][:50], others["observation"][:50])


@pytest.mark.parametrize(
    "space",
    [gymnasium.spaces.Discrete(5, start=2), gymnasium.spaces.Box(np.float32([-1, 0]), np.float32([1, 3]))],
)
def test_random_actions_cover_the_space(space: gymnasium.Space) -> None:
    actions = random_actions(space, 2_000, np.random.default_rng(0))
    assert all(space.contains(action) for action in actions)
    assert actions.dtype == space.dtype
    if isinstance(space, gymnasium.spaces.Discrete):
        assert set(actions) == {2, 3, 4, 5, 6}
    else:
        np.testing.assert_allclose(actions.mean(0), [0, 1.5], atol=0.1)


def test_random_actions_need_bounds() -> None:
    with pytest.raises(ValueError, match="must be Discrete or a bounded Box"):
        random_actions(gymnasium.spaces.Box(-np.inf, np.inf, (1,)), 1, np.random.default_rng(0))


class Importing(Counting):
    """An environment of a user that imports a package when it is built."""

    def __init__(self, module: str) -> None:
        super().__init__()
        importlib.import_module(module)


def test_a_missing_package_of_an_environment_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minigrid", None)
    with pytest.raises(MissingExtraError, match=r"needs MiniGrid, .*: pip install 'lightning-replay\[grids\]'"):
        make_environment(Importing, {"module": "minigrid"})
    for module in [name for name in sys.modules if name.split(".")[0] == "Box2D"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "gymnasium.envs.box2d.lunar_lander", raising=False)
    monkeypatch.setitem(sys.modules, "Box2D", None)
    message = r"environment 'LunarLander-v3' needs Box2D, .*: pip install 'lightning-replay\[box2d\]'"
    with pytest.raises(MissingExtraError, match=message):
        make_environment("LunarLander-v3", {})


def test_an_import_that_fails_in_the_code_of_a_user_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_observations_must_be_arrays() -> None:
    with pytest.raises(ValueError, match=r"observation space Discrete.*FlattenObservation"):
        make_environment("Taxi-v3", {})


def test_an_agent_without_act_is_named() -> None:
    _, collection = make_collection()
    with pytest.raises(TypeError, match=r"LightningModule has no method act\(observation, explore\)"):
        import lightning as L

        collection.collect_until(1, L.LightningModule())
