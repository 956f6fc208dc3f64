# SPDX-License-Identifier: Apache-2.0
"""DQN with an LSTM on a real Ray: training, and TD errors that come home from one and several Learners."""

from __future__ import annotations

import functools
import itertools
import sys
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.dqn.torch.dqn_torch_learner import DQNTorchLearner
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.algorithms.tqc import TQCConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_env import make_multi_agent
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import TD_ERROR_KEY
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator

import rllib_ext
from rllib_ext.checks import check_recurrent

from .rllib_algorithms import Counting

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray", "algorithms_end")]

BITS = "lightning_replay.envs:BitFlipping-v0"
LSTM = {"fcnet_hiddens": [8], "head_fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 6}


class CountingLonger(Counting):
    """Episodes of 9, 4, 9, 4, ... steps."""

    def ends(self) -> tuple[bool, bool]:
        place = self.count % 15
        return place == 9, place == 14


class EchoLearner(DQNTorchLearner):
    """Returns the first number of each step's observation as its TD error, and a million for padding."""

    def compute_loss_for_module(self, *, module_id: Any, config: Any, batch: Any, fwd_out: Any) -> torch.Tensor:
        echo = batch["obs"][..., 0]
        if "loss_mask" in batch:
            echo = torch.where(batch["loss_mask"], echo, 1e6)
        self.metrics.log_value((module_id, TD_ERROR_KEY), echo, reduce="item_series")
        return (fwd_out["qf_preds"] ** 2).mean()


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def recurrent(env: Any, recipe: str, num_learners: int, burn_in: int, batch: int = 24) -> DQNConfig:
    """DQN with a tiny LSTM and short iterations."""
    config = (
        DQNConfig()
        .environment(env)
        .training(
            replay_buffer_config=rllib_ext.replay_config(recipe, capacity=300, seed=0),
            train_batch_size_per_learner=batch,
            num_steps_sampled_before_learning_starts=60,
            burn_in_len=burn_in,
        )
        .rl_module(model_config=LSTM)
        .learners(num_learners=num_learners)
        .reporting(min_sample_timesteps_per_iteration=60, min_time_s_per_iteration=0)
        .debugging(seed=1, log_sys_usage=False)
    )
    return rllib_ext.configure(config)


def priorities_by_hand(episodes: list[SingleAgentEpisode], num_learners: int, burn_in: int) -> list[tuple[int, float]]:
    """First step and priority of each sequence from which Learners learn, when a step's number is its TD error."""
    names = [episode.id_.split("_")[0] for episode in episodes]
    steps: dict[str, list[float]] = {name: [] for name in names}
    shards = ShardEpisodesIterator(episodes, num_shards=max(num_learners, 1), len_lookback_buffer=1)
    for part in itertools.chain.from_iterable(shards):
        numbers = part.get_observations(slice(0, len(part)))[:, 0].tolist()
        steps[part.id_.split("_")[0]] += numbers[burn_in:]
    return [
        (int(episode.get_observations(0)[0]), 0.9 * max(steps[name]) + 0.1 * float(np.mean(steps[name])))
        for name, episode in zip(names, episodes, strict=True)
        if steps[name]
    ]


@pytest.mark.parametrize(("num_learners", "burn_in"), [(0, 0), (2, 2)])
def test_every_td_error_comes_home(num_learners: int, burn_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = recurrent(CountingLonger, "prioritized", num_learners, burn_in, batch=19)
    algorithm = config.learners(learner_class=EchoLearner).build_algo()
    buffer = algorithm.local_replay_buffer
    draw, update = buffer.sample, buffer.replay.update_priority
    drawn: list[list[SingleAgentEpisode]] = []
    home: list[bool] = []

    def remembered(**request: Any) -> list[SingleAgentEpisode]:
        drawn.append(draw(**request))
        return drawn[-1]

    def compared(index: torch.Tensor, td_error: torch.Tensor, **rest: Any) -> None:
        starts = buffer.replay.storage.get(index)["observation"][:, 0].int().tolist()
        expected = priorities_by_hand(drawn[-1], num_learners, burn_in)
        for start, magnitude, (first, priority) in zip(starts, td_error.tolist(), expected, strict=True):
            home.append(start == first and abs(magnitude - priority) < 1e-3)
        update(index, td_error, **rest)

    monkeypatch.setattr(buffer, "sample", remembered)
    monkeypatch.setattr(buffer.replay, "update_priority", compared)
    for _ in range(2):
        result = algorithm.train()
    assert len(home) > 100 and all(home)
    assert np.isfinite(result["learners"]["default_policy"]["total_loss"])
    assert buffer.replay.stats()["priorities_updated"] > 100 and buffer.replay.stats()["stale_updates_dropped"] == 0


def test_an_agent_with_memory_learns_beside_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {"0": RLModuleSpec(model_config=LSTM), "1": RLModuleSpec(model_config=LSTM | {"use_lstm": False})}
    config = recurrent(make_multi_agent(CountingLonger), "prioritized", 0, burn_in=1)
    config.environment(env_config={"num_agents": 2}).learners(learner_class=EchoLearner)
    config.multi_agent(policies={"0", "1"}, policy_mapping_fn=lambda agent, *args, **rest: str(agent))
    config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
    with pytest.raises(ValueError, match="modules with memory of several agents need a single Learner"):
        check_recurrent(config.copy(copy_frozen=False).learners(num_learners=2), ["0"])  # as when it is built
    algorithm = config.build_algo()
    buffer = algorithm.local_replay_buffer
    drawn: list[SingleAgentEpisode] = []
    home: dict[str, list[bool]] = {"0": [], "1": []}
    draw = buffer.sample
    monkeypatch.setattr(buffer, "sample", lambda **request: drawn.__setitem__(slice(None), draw(**request)) or drawn)

    def compared(name: str, replay: Any, update: Any, index: torch.Tensor, td_error: torch.Tensor, **rest: Any) -> None:
        first = replay.storage.get(index)["observation"][:, 0].tolist()
        own = [episode for episode in drawn if episode.module_id == name]
        expected = priorities_by_hand(own, 0, 1) if name == "0" else [(number, number) for number in first]
        for number, magnitude, (start, priority) in zip(first, td_error.tolist(), expected, strict=True):
            home[name].append(number == start and abs(magnitude - priority) < 1e-3)
        update(index, td_error, **rest)

    while len(buffer.modules) < 2 or not home["1"]:
        algorithm.train()
        for name, module in buffer.modules.items():
            if not home[name]:
                update = functools.partial(compared, name, module.replay, module.replay.update_priority)
                monkeypatch.setattr(module.replay, "update_priority", update)
    algorithm.train()
    assert all(len(one) > 50 and all(one) for one in home.values())


@pytest.mark.parametrize(
    ("kind", "options", "changed", "reason"),
    [
        (SACConfig, {}, {}, r"SAC of RLlib learns from single steps alone, .* Train with DQN"),
        (TQCConfig, {}, {}, r"TQC of RLlib learns from single steps alone"),
        (DQNConfig, {"recipe": "hindsight", "env": BITS}, {}, r"RelabelGoals changes .* Use replay_config.\"uniform\""),
        (DQNConfig, {"recipe": "neighborhood_mixup"}, {}, r"NeighborhoodMixupSampler draws pairs"),
        (DQNConfig, {"recipe": "surprise_retention"}, {}, r"RetentionWriter keeps single transitions"),
        (DQNConfig, {"modules": {"default_policy": {"recipe": "noisy", "keys": ["x"]}}}, {}, r"GaussianNoise changes"),
        (DQNConfig, {"num_shards": 2}, {}, r"Leave num_shards out"),
        (DQNConfig, {}, {"n_step": 3}, r"n_step is 3; .* Set it to 1"),
        (DQNConfig, {}, {"max_seq_len": 0}, r"no length for them. Give .rl_module\(model_config=.\"max_seq_len\": 20"),
    ],
)
def test_what_cannot_learn_from_sequences_is_refused_when_it_is_built(
    kind: Any, options: dict[str, Any], changed: dict[str, Any], reason: str
) -> None:
    n_step, model = changed.get("n_step", 1), {**LSTM, "max_seq_len": changed.get("max_seq_len", 6)}
    settings = {"recipe": "uniform", "capacity": 300, **options}
    config = kind().environment("Pendulum-v1" if kind is not DQNConfig else CountingLonger)
    config.training(replay_buffer_config=rllib_ext.replay_config(**settings), n_step=n_step)
    config.rl_module(model_config=model).env_runners(num_env_runners=0).debugging(log_sys_usage=False)
    with pytest.raises(ValueError, match=reason):
        rllib_ext.configure(config).build_algo()


def test_states_stored_are_those_of_the_module() -> None:
    algorithm = recurrent(CountingLonger, "uniform", 0, 0).build_algo()
    buffer = algorithm.local_replay_buffer
    module = algorithm.env_runner.module
    for _ in range(10):
        buffer.add(algorithm.env_runner.sample(num_timesteps=7))  # fragments that end anywhere, one set of weights
    episodes = buffer.sample(num_items=200, n_step=1, batch_length_T=6, min_batch_length_T=0)
    assert any(episode.t_started for episode in episodes) and any(not episode.t_started for episode in episodes)
    for episode in episodes:
        if episode.t_started:
            state = episode.get_extra_model_outputs("state_out", -1, neg_index_as_lookback=True)
        else:
            state = {name: value.numpy() for name, value in module.get_initial_state().items()}
        batch = {
            "obs": torch.from_numpy(episode.get_observations(slice(0, len(episode))))[None],
            "state_in": {name: torch.from_numpy(np.asarray(value))[None] for name, value in state.items()},
        }
        with torch.no_grad():
            after = module.compute_q_values(batch)["state_out"]
        for name, value in after.items():
            last = episode.get_extra_model_outputs("state_out", -1)[name]
            np.testing.assert_allclose(value[0].numpy(), last, rtol=1e-4, atol=1e-6)
