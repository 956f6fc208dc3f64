# SPDX-License-Identifier: Apache-2.0
"""What TorchRL and Minari bring along works on a Replay: collectors write into it, a data set fills it in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import minari
import pytest
import torch
from minari.data_collector import EpisodeBuffer
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.nn.distributions import NormalParamExtractor
from torch import nn
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import Collector
from torchrl.data import TensorDictReplayBuffer, TensorStorage
from torchrl.data.replay_buffers import ImmutableDatasetWriter
from torchrl.envs import GymEnv, SerialEnv
from torchrl.modules import MLP, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import DQNLoss, HardUpdate, SACLoss, SoftUpdate
from torchrl.trainers import ReplayBufferTrainer
from torchrl.trainers.algorithms import DQNTrainer, SACTrainer

from lightning_replay import recipes
from lightning_replay.datasets import fill, from_minari, from_torchrl
from lightning_replay.replay import Replay
from tests.stored import stored_rows

EPISODE_STEPS = 200  # Pendulum truncates here
# What TorchRL's trainers and collectors warn of themselves.
OF_TRAINERS = ("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*is an experimental/prototype feature")
METADATA = {name: "none" for name in ("algorithm_name", "author", "author_email", "code_permalink", "description")}


def _assert_rows_follow_each_other(rows: TensorDictBase) -> None:
    """Within an episode the next observation is the following row's observation; the reward belongs to the step."""
    same_episode = ~rows["next", "done"][:-1, 0]
    torch.testing.assert_close(rows["next", "observation"][:-1][same_episode], rows["observation"][1:][same_episode])
    angle = torch.atan2(rows["observation"][:, 1], rows["observation"][:, 0])
    speed, torque = rows["observation"][:, 2], rows["action"][:, 0].clamp(-2, 2)
    cost = angle**2 + 0.1 * speed**2 + 0.001 * torque**2
    torch.testing.assert_close(rows["next", "reward"][:, 0].float(), -cost.float(), atol=1e-3, rtol=1e-3)


def test_a_collector_writes_into_a_replay() -> None:
    replay = recipes.neighborhood_mixup(capacity=1_000, batch_size=32, num_neighbors=3, seed=0)
    collector = Collector(GymEnv("Pendulum-v1"), None, frames_per_batch=50, total_frames=450, replay_buffer=replay)
    for yielded in collector:
        assert yielded is None  # the rows go into the buffer instead
    collector.shutdown()
    assert len(replay) == 450
    rows = replay.storage.get(torch.arange(450))
    assert rows["next", "truncated"].nonzero()[:, 0].tolist() == [199, 399]
    _assert_rows_follow_each_other(rows)
    assert replay.sample()["observation"].shape == (32, 3)


def test_the_rows_of_several_environments_are_kept_apart_by_their_trajectories() -> None:
    replay = recipes.uniform(capacity=1_000, batch_size=256, n_steps=3, discount=0.9, seed=0)
    environments = SerialEnv(2, lambda: GymEnv("Pendulum-v1"))
    collector = Collector(
        environments,
        None,
        frames_per_batch=60,
        total_frames=600,
        replay_buffer=replay,
        postproc=lambda rollout: rollout.reshape(-1),
    )
    for _ in collector:
        pass
    collector.shutdown()
    assert len(replay) == 600
    rows = replay.storage.get(torch.arange(600))
    batch = replay.sample()
    first = batch["index"]
    steps = batch["steps_to_next_obs"][:, 0]
    assert set(steps.tolist()) == {1, 2, 3}
    trajectory = rows["collector", "traj_ids"]
    for row, slot, used in zip(batch.unbind(0), first.tolist(), steps.tolist(), strict=True):
        own = (trajectory == trajectory[slot]).nonzero()[:, 0]
        chain = own[own >= slot][:used]
        rewards = rows["next", "reward"][chain, 0]
        expected = (rewards * 0.9 ** torch.arange(len(chain))).sum()
        torch.testing.assert_close(row["next", "reward"][0], expected)
        torch.testing.assert_close(row["next", "observation"], rows["next", "observation"][chain[-1]])


def _recorded_episode(environment: gymnasium.Env, seed: int) -> EpisodeBuffer:
    """One episode of random actions, as Minari's own recorder keeps it."""
    observation, _ = environment.reset(seed=seed)
    environment.action_space.seed(seed)
    episode = EpisodeBuffer(id=seed, seed=seed, observations=[observation], actions=[])
    while not (episode.truncations and episode.truncations[-1]):
        action = environment.action_space.sample()
        observation, reward, terminated, truncated, _ = environment.step(action)
        episode.observations.append(observation)
        episode.actions.append(action)
        episode.rewards.append(float(reward))
        episode.terminations.append(terminated)
        episode.truncations.append(truncated)
    return episode


@pytest.fixture
def minari_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> minari.MinariDataset:
    """Three Pendulum episodes written and read back by Minari, nothing downloaded."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    episodes = [_recorded_episode(gymnasium.make("Pendulum-v1"), seed) for seed in range(3)]
    minari.create_dataset_from_buffers(
        "pendulum/random-v0", buffer=episodes, env="Pendulum-v1", eval_env="Pendulum-v1", data_format="hdf5", **METADATA
    )
    return minari.load_dataset("pendulum/random-v0")


def test_a_minari_dataset_fills_a_replay_in_one_call(minari_dataset: minari.MinariDataset) -> None:
    replay = recipes.continuous_transition(capacity=1_000, batch_size=64, seed=0)
    fill(replay, from_minari(minari_dataset))
    assert len(replay) == 3 * EPISODE_STEPS
    rows = stored_rows(replay)
    assert rows["next", "truncated"].nonzero()[:, 0].tolist() == [199, 399, 599]
    assert rows["next", "reward"].dtype == torch.float32
    _assert_rows_follow_each_other(rows)
    index = replay.sample()["index"]
    assert ((index[:, 1] - index[:, 0]).abs() <= 1).all()
    assert (index[:, 0] // EPISODE_STEPS == index[:, 1] // EPISODE_STEPS).all()


def test_a_torchrl_dataset_fills_a_replay_in_one_call(tmp_path: Path) -> None:
    """TorchRL's data sets are buffers over memory-mapped rows; this one is written and opened the same way."""
    rollout = GymEnv("Pendulum-v1").rollout(2 * EPISODE_STEPS, break_when_any_done=False)
    rollout.memmap_(tmp_path / "pendulum")
    stored = TensorStorage(TensorDict.load_memmap(tmp_path / "pendulum"))
    dataset = TensorDictReplayBuffer(storage=stored, writer=ImmutableDatasetWriter(), batch_size=16)
    replay = recipes.neighborhood_mixup(capacity=1_000, batch_size=16, seed=0)
    fill(replay, from_torchrl(dataset))
    assert len(replay) == 2 * EPISODE_STEPS
    _assert_rows_follow_each_other(stored_rows(replay))
    assert replay.sample()["observation"].shape == (16, 3)


def options_of(env: Any, actor: Any, loss: Any, replay: Replay) -> dict[str, Any]:
    """What both trainers are given."""
    return {
        "collector": Collector(env, actor, frames_per_batch=50, total_frames=200, auto_register_policy_transforms=True),
        **{"total_frames": 200, "frame_skip": 1, "progress_bar": False, "enable_logging": False},
        **{"loss_module": loss, "optimizer": torch.optim.Adam(loss.parameters(), 1e-3), "replay_buffer": replay},
    }


def dqn_trainer(replay: Replay, **options: Any) -> DQNTrainer:
    torch.manual_seed(0)
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    network = MLP(in_features=4, out_features=2, num_cells=[8])
    actor = QValueActor(network, in_keys=["observation"], spec=env.action_spec)
    loss = DQNLoss(actor, action_space="categorical", delay_value=True)
    loss.make_value_estimator(gamma=0.9)  # before a state is loaded, which has γ
    target = HardUpdate(loss, value_network_update_interval=50)
    options |= options_of(env, actor, loss, replay)
    return DQNTrainer(optim_steps_per_batch=3, target_net_updater=target, **options)


def sac_trainer(replay: Replay) -> SACTrainer:
    torch.manual_seed(0)
    env = GymEnv("Pendulum-v1")
    network = nn.Sequential(MLP(in_features=3, out_features=2, num_cells=[8]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
    )
    critic = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[8]), in_keys=["observation", "action"])
    loss = SACLoss(actor, critic, action_spec=env.action_spec)
    options = options_of(env, actor, loss, replay)
    return SACTrainer(optim_steps_per_batch=2, target_net_updater=SoftUpdate(loss, tau=0.01), **options)


@pytest.mark.slow
@pytest.mark.filterwarnings(*OF_TRAINERS)
@pytest.mark.parametrize("make", [dqn_trainer, sac_trainer])
@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_torchrls_trainers_fill_and_draw_from_a_replay(make, recipe) -> None:
    replay = getattr(recipes, recipe)(capacity=1_000, batch_size=32, n_steps=3, discount=0.9, seed=0)
    make(replay).train()
    rows = stored_rows(replay)
    assert len(rows) == 200
    continued = (rows["next", "observation"][:-1] == rows["observation"][1:]).all(1)
    assert (rows["next", "done"][:-1, 0] == ~continued | (torch.arange(1, 200) % 50 == 0)).all(), "also between batches"
    assert (rows["next", "truncated"] == rows["next", "done"] & ~rows["next", "terminated"]).all()
    steps = replay.sample(256)["steps_to_next_obs"]
    assert (steps == 3).float().mean() > 0.5
    if recipe == "prioritized":
        assert len(replay.sampler.priority_of(torch.arange(200)).unique()) > 20


@pytest.mark.filterwarnings(*OF_TRAINERS)
@pytest.mark.parametrize("unified", [True, False], ids=["Checkpoint", "one file"])
def test_a_trainer_saves_and_loads_the_replay_it_was_given(tmp_path: Path, unified: bool) -> None:
    def build() -> tuple[Replay, DQNTrainer]:
        replay = recipes.prioritized(capacity=1_000, batch_size=32, seed=0)
        options = {"checkpoint": Checkpoint()} if unified else {}
        trainer = dqn_trainer(replay, save_trainer_file=tmp_path / "saved", save_trainer_interval=199, **options)
        if not unified:  # the file holds the modules that were registered
            trainer.register_module("replay_buffer", ReplayBufferTrainer(replay))
        return replay, trainer

    replay, trainer = build()
    trainer.train()
    again, resumed = build()
    resumed.load_from_file(tmp_path / "saved")
    assert len(again) == 200 and resumed.collected_frames == 200
    assert (again[:] == replay[:]).all()
    slots = torch.arange(200)
    assert again.sampler.priority_of(slots).equal(replay.sampler.priority_of(slots))
    assert again.sample()["index"].equal(replay.sample()["index"])


@pytest.mark.slow
def test_an_lstm_of_torchrl_learns_from_sequences_with_the_states_of_its_collector(run_script: Any) -> None:
    (last,) = run_script("torchrl_recurrent.py")
    assert last.startswith("36 episodes, mean return of the last 20: 0.")
