# SPDX-License-Identifier: Apache-2.0
"""Real algorithms that keep rows by importance: priorities by hand, candidates, frames, checkpoints, several agents."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import ray
import torch
from gymnasium.wrappers import FrameStackObservation
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.tqc import TQCConfig
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole

from lightning_replay.retention.surprise import on_policyness
from tests.stored import stored_rows

from .rllib_algorithms import EchoLearner, built, small, trained, watch_td_errors
from .shard_contents import lose

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray", "algorithms_end")]

GAMMA = 0.9


class Film(gym.Env):
    """Frame t of a film is filled with t; a film has 60 frames, and the second EnvRunner's begins with frame 100."""

    observation_space = gym.spaces.Box(0, 255, (12, 10), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self._first = 100 * (getattr(config, "worker_index", 0) == 2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._step = 0
        return self._frame(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return self._frame(), 1.0, self._step == 59, False, {}

    def _frame(self) -> np.ndarray:
        return np.full((12, 10), self._first + self._step, np.uint8)


class StackedFilm(FrameStackObservation):
    def __init__(self, config: Any = None) -> None:
        super().__init__(Film(config), 4)


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def retaining(env: Any = "CartPole-v1", algorithm: Any = DQNConfig, **options: Any) -> AlgorithmConfig:
    """An algorithm that learns nothing, so that its networks can be asked afterwards."""
    options = {"capacity": 200, "seed": 0, "priority_exponent": 0.0, **options}
    config = small(algorithm, env, "surprise_retention", **options).training(gamma=GAMMA, n_step=3)
    return config.training(lr=0.0) if algorithm is DQNConfig else config


def stored(algorithm: Algorithm) -> Any:
    replay = algorithm.local_replay_buffer.replay
    return stored_rows(replay)


def kept_for(algorithm: Algorithm) -> torch.Tensor:
    replay = algorithm.local_replay_buffer.replay
    return replay.writer.retention_priority(torch.arange(len(replay)))


def watch_updates(replay: Any, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Slots that got feedback, filled in training."""
    updated: set[int] = set()
    update = replay.update_priority

    def seen(index: torch.Tensor, *rest: Any, **signals: Any) -> None:
        updated.update(index.tolist())
        update(index, *rest, **signals)

    monkeypatch.setattr(replay, "update_priority", seen)
    return updated


def assert_priorities_are_surprise_times_softmax(replay: Any, module: Any, updated: set[int]) -> None:
    """Of rows of an :class:`EchoLearner`, whose TD error is the first number of the observation."""
    index = torch.arange(len(replay))
    rows, priority = replay.storage.get(index), replay.writer.retention_priority(index)
    with torch.no_grad():
        values = module.compute_q_values({"obs": rows["observation"]})["qf_preds"]
    surprise, weight = rows["observation"][:, 0] ** 2, on_policyness(values, rows["action"])
    was_updated = torch.tensor([slot in updated for slot in index.tolist()])
    assert (~was_updated).any()
    torch.testing.assert_close(priority, surprise * torch.where(was_updated, weight, 1.0))


def test_signals_of_two_learners_reach_their_rows_in_either_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = built(retaining().learners(num_learners=2, learner_class=EchoLearner))
    buffer = algorithm.local_replay_buffer
    updated = watch_updates(buffer.replay, monkeypatch)
    for layout in ("flagged", "blocks"):
        known = set(updated)
        buffer.options.layout = layout
        trained(algorithm)
        assert len(updated - known) > 30 and buffer.replay.stats()["evicted"] == 0
        assert_priorities_are_surprise_times_softmax(buffer.replay, algorithm.get_module(), updated)
    for learner in algorithm.learner_group._worker_manager.actors().values():
        lose(learner)
        with pytest.raises(ray.exceptions.RayError):  # that candidates were to be measured by
            algorithm.train()
    with pytest.raises(RuntimeError, match=r"no Learner is left .*Algorithm.from_checkpoint"):
        algorithm.train()


def by_hand(algorithm: Algorithm, rows: Any, atoms: int, double_q: bool) -> tuple[np.ndarray, np.ndarray]:
    """Surprise of rows and values of their actions by the networks of the Learner, added up in NumPy."""
    module = algorithm.learner_group._learner.module["default_policy"]
    with torch.no_grad():
        now = module.compute_q_values({"obs": rows["observation"]})
        following = module.compute_q_values({"obs": rows["next", "observation"]})
        target = module.forward_target({"obs": rows["next", "observation"]})
    every = np.arange(len(rows))
    best = (following if double_q else target)["qf_preds"].argmax(1).numpy()
    reward, done = (rows["next", key].flatten().numpy() for key in ("reward", "terminated"))
    discount = GAMMA ** rows["steps_to_next_obs"].flatten().numpy() * ~done
    action, values = rows["action"].numpy(), now["qf_preds"].numpy()
    if atoms == 1:
        td_error = reward + discount * target["qf_preds"].numpy()[every, best] - values[every, action]
        return td_error**2, values
    support = np.linspace(-10.0, 10.0, atoms)
    gap = support[1] - support[0]
    prediction, target_probs = now["qf_probs"].numpy()[every, action], target["qf_probs"].numpy()[every, best]
    divergence = np.zeros(len(rows))
    for row in every:
        moved = np.clip(reward[row] + discount[row] * support, -10.0, 10.0)
        share = np.clip(1.0 - np.abs(moved[:, None] - support[None]) / gap, 0.0, 1.0)  # of each neighbour
        projected = target_probs[row] @ share
        held = projected > 0
        divergence[row] = (projected[held] * np.log(projected[held] / prediction[row][held])).sum()
    return divergence, values


@pytest.mark.parametrize(("atoms", "dueling", "double_q"), [(1, False, True), (7, True, False)])
def test_surprise_is_that_of_the_present_networks(atoms: int, dueling: bool, double_q: bool, monkeypatch: Any) -> None:
    config = retaining().training(num_atoms=atoms, dueling=dueling, double_q=double_q, v_min=-10.0, v_max=10.0)
    config.training(num_steps_sampled_before_learning_starts=100)
    algorithm = built(config)
    learner = algorithm.learner_group._learner
    with torch.no_grad():  # so that the target network is another one, with other best actions
        for _, target in learner.module["default_policy"].get_target_network_pairs():
            for parameter in target.parameters():
                parameter.mul_(-1.5)
    updated = watch_updates(algorithm.local_replay_buffer.replay, monkeypatch)
    algorithm.train()
    surprise, values = by_hand(algorithm, stored(algorithm), atoms, double_q)
    np.testing.assert_allclose(kept_for(algorithm).numpy(), surprise, rtol=1e-3, atol=1e-5)  # before it learns
    assert not updated
    trained(algorithm)
    rows, priority = stored(algorithm), kept_for(algorithm).numpy()
    surprise, values = by_hand(algorithm, rows, atoms, double_q)
    weight = on_policyness(torch.from_numpy(values), rows["action"]).numpy()
    weight[[slot not in updated for slot in range(len(rows))]] = 1.0
    assert len(updated) > 30
    np.testing.assert_allclose(priority, surprise * weight, rtol=1e-3, atol=1e-5)


def test_a_restored_algorithm_draws_alike_and_measures_candidates(tmp_path: Path) -> None:
    algorithm = built(retaining(capacity=60, priority_exponent=0.5))
    trained(algorithm)
    waiting = algorithm.local_replay_buffer.replay.transform[0].get_extra_state()["length"]
    path = algorithm.save_to_path(tmp_path / "saved")
    again = Algorithm.from_checkpoint(path)
    buffers = [one.local_replay_buffer for one in (algorithm, again)]
    for _ in range(5):
        batches = [buffer.sample(num_items=16, n_step=3, gamma=GAMMA)[0] for buffer in buffers]
        for method in ("get_observations", "get_actions", "get_rewards"):
            np.testing.assert_array_equal(*(getattr(batch, method)(slice(0, 16)) for batch in batches))
    torch.testing.assert_close(kept_for(again), kept_for(algorithm), rtol=0, atol=0)
    before = buffers[1].replay.stats()
    again.train()
    after = buffers[1].replay.stats()
    offered = {key: after[key] - before[key] for key in ("admitted", "refused")}
    # what waited was offered too, and candidates are not all let in, as without a measure of their surprise they were
    assert sum(offered.values()) >= 38 + waiting and offered["refused"] > 0


def test_continuous_actions_are_kept_by_surprise_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Of TQC's Learner, which is a SAC's too."""
    running = built(retaining("Pendulum-v1", TQCConfig, capacity=60, priority_exponent=0.5))
    with caplog.at_level(logging.WARNING, logger="lightning_replay.writers.retention"):
        trained(running)
    stats = running.local_replay_buffer.replay.stats()
    assert stats["priorities_updated"] >= 16 * 10 and stats["evicted"] + 60 == stats["admitted"]
    assert caplog.text.count("rows are kept by surprise alone") == 1


def test_without_configure_rows_are_kept_by_importance_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = retaining().learners(learner_class=EchoLearner).build_algo()
    replay = algorithm.local_replay_buffer.replay
    updated = watch_updates(replay, monkeypatch)
    with caplog.at_level(logging.WARNING):
        trained(algorithm)
    assert len(updated) > 30 and "rows are kept by surprise alone" not in caplog.text
    assert_priorities_are_surprise_times_softmax(replay, algorithm.get_module(), updated)


def test_one_of_several_agents_keeps_rows_by_importance(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"recipe": "prioritized", "priority_exponent": None}
    config = retaining(MultiAgentCartPole, modules={"p1": other}).learners(learner_class=EchoLearner)
    config.environment(env_config={"num_agents": 2}).multi_agent(
        policies={"p0", "p1"}, policy_mapping_fn=lambda agent, *rest, **more: f"p{agent}"
    )
    algorithm = built(config)
    algorithm.train()
    modules = algorithm.local_replay_buffer.modules
    retention, by_age = modules["p0"].replay, modules["p1"].replay
    updated, home = watch_updates(retention, monkeypatch), watch_td_errors(by_age)
    result = trained(algorithm)
    assert_priorities_are_surprise_times_softmax(retention, algorithm.get_module("p0"), updated)
    assert len(updated) > 30 and len(home) >= 16 * 10 and all(home)
    assert result["replay_buffer"]["retention"]["p0"]["admitted"] == retention.stats()["admitted"] == len(retention)
    assert "p1" not in result["replay_buffer"]["retention"]
    assert type(by_age.writer).__name__ == "FirstInFirstOutWriter"


@pytest.mark.parametrize(("recipe", "runners", "learners"), [("surprise_retention", 2, 1), ("uniform", 0, 0)])
def test_frames_of_env_runners_are_stored_once_and_drawn_as_they_were(recipe: str, runners: int, learners: int) -> None:
    config = small(DQNConfig, StackedFilm, recipe, capacity=400, frame_stack=4, seed=0)
    config.env_runners(num_env_runners=runners).learners(num_learners=learners).training(n_step=3, gamma=1.0)
    algorithm = built(config.rl_module(model_config={"conv_filters": [[4, 3, 2]], "head_fcnet_hiddens": [8]}))
    result = trained(algorithm)
    buffer = algorithm.local_replay_buffer
    (block,) = buffer.sample(num_items=200, n_step=3, gamma=1.0)
    rows = slice(0, 200)
    first, following = block.get_observations(rows), block.get_observations(slice(1, 201))
    steps = block.get_extra_model_outputs("n_step", rows)
    assert first.dtype == np.uint8 and first.shape == (200, 4, 12, 10)
    newest = first[:, -1, 0, 0].astype(int)
    begins = newest // 100 * 100
    for images, last in ((first, newest), (following, newest + steps)):
        expected = np.maximum(last[:, None] - np.arange(3, -1, -1), begins[:, None])
        np.testing.assert_array_equal(images, np.broadcast_to(expected[..., None, None], images.shape))
    np.testing.assert_array_equal(block.get_rewards(rows), steps)
    films = {0, 100} if runners else {0}
    assert set(begins) == films
    shared = result["replay_buffer"]["frames"]
    assert shared["frames_held"] <= 60 * len(films) and shared["frames_per_transition"] <= 1.1  # each film once
    if recipe == "surprise_retention":
        assert len(kept_for(algorithm).unique()) > 20  # each candidate has a surprise of its own


def priorities(shard: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    replay = shard.held.replay
    index = torch.arange(len(replay))
    rows = replay.storage.get(index)
    return rows["observation"], rows["action"], replay.writer.retention_priority(index)


def test_learners_report_surprise_and_action_values_to_the_shards() -> None:
    """Rows of an :class:`EchoLearner`, whose TD error is the first number of the observation; it learns nothing."""
    config = small(DQNConfig, "CartPole-v1", "surprise_retention", num_shards=2, capacity=400, priority_exponent=0.0)
    config.env_runners(num_env_runners=0).learners(num_learners=0, learner_class=EchoLearner).training(lr=0.0)
    config.debugging(seed=0)
    algorithm = built(config)
    result = trained(algorithm)
    module = algorithm.get_module()
    found = ray.get([shard.__ray_call__.remote(priorities) for shard in algorithm.local_replay_buffer.shards.handles])
    for observation, action, priority in found:
        with torch.no_grad():
            values = module.compute_q_values({"obs": observation})["qf_preds"]
        weight = on_policyness(values, action)
        updated = torch.isclose(priority, observation[:, 0] ** 2 * weight)
        assert updated.sum() > 15 and weight[updated].max() < 0.999
    retention = result["replay_buffer"]["retention"]
    assert retention["admitted"] == result["replay_buffer"]["num_env_steps_stored"] >= 70 and retention["evicted"] == 0
