# SPDX-License-Identifier: Apache-2.0
"""Pendulums in one tensor: Gymnasium's dynamics, ends at time limits, and noise for the actor."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from lightning_replay.envs.pendulums import Pendulums


def test_the_dynamics_are_those_of_gymnasium() -> None:
    envs = Pendulums(16)
    observations, _ = envs.reset(seed=0)
    single = gymnasium.make("Pendulum-v1").unwrapped
    generator = np.random.default_rng(0)
    torques = generator.uniform(-3.0, 3.0, (60, 16, 1)).astype(np.float32)  # also beyond the limits
    angles, speeds = envs._angle.tolist(), envs._speed.tolist()
    steps = [envs.step(torch.from_numpy(torque)) for torque in torques]
    for i in range(16):
        single.reset()
        single.state = np.array([angles[i], speeds[i]])
        assert np.allclose(single._get_obs(), observations[i], atol=1e-6)
        for step, torque in zip(steps, torques, strict=True):
            following, reward, *_ = single.step(torque[i])
            # Errors of float32 grow from step to step, because a pendulum that stands upright is unstable.
            assert np.allclose(following, step[0][i], atol=2e-3), i
            assert reward == pytest.approx(step[1][i].item(), abs=1e-2)


def test_one_step_is_exact_to_float32() -> None:
    envs, single = Pendulums(500), gymnasium.make("Pendulum-v1").unwrapped
    envs.reset(seed=1)
    envs._speed = envs._speed * 8.0
    states = np.stack([envs._angle.numpy(), envs._speed.numpy()], 1).astype(np.float64)
    torque = torch.linspace(-2.5, 2.5, 500)[:, None]
    following, reward, *_ = envs.step(torque)
    single.reset()
    for i in range(500):
        single.state = states[i]
        expected, one, *_ = single.step(torque[i].numpy())
        assert np.allclose(expected, following[i], atol=2e-6) and one == pytest.approx(reward[i].item(), abs=1e-5)


def test_an_episode_is_truncated_after_its_steps_and_its_last_observation_is_given() -> None:
    envs = Pendulums(3, max_steps=4)
    before, _ = envs.reset(seed=0)
    for step in range(1, 9):
        following, _, terminated, truncated, info = envs.step(torch.zeros(3, 1))
        last = info["final_observation"]
        assert not terminated.any() and truncated.tolist() == [step % 4 == 0] * 3
        assert torch.equal(following, last) is (step % 4 != 0)
        assert torch.allclose(following.square()[:, :2].sum(1), torch.ones(3))
        assert not torch.equal(before, last)
        before = following


def test_staggered_starts_end_at_different_steps() -> None:
    envs = Pendulums(1_000, max_steps=10, staggered=True)
    envs.reset(seed=0)
    ends = torch.stack([envs.step(torch.zeros(1_000, 1))[3] for _ in range(20)])
    assert (ends.sum(0) == 2).all() and (ends.sum(1) > 60).all()


def test_the_actor_sees_noise_and_the_critic_does_not() -> None:
    envs, plain = Pendulums(2_000, noise=0.1), Pendulums(2_000)
    seen, _ = envs.reset(seed=0)
    assert torch.equal(seen["critic_observation"], plain.reset(seed=0)[0])
    assert (seen["observation"] - seen["critic_observation"]).std().item() == pytest.approx(0.1, rel=0.05)
    assert envs.single_observation_space.contains({name: seen[name][0].numpy() for name in seen})
    following, _, _, _, info = envs.step(torch.zeros(2_000, 1))
    assert all(torch.equal(following[name], info["final_observation"][name]) for name in following)


def test_a_seed_determines_all_that_follows() -> None:
    def played(seed: int) -> torch.Tensor:
        envs = Pendulums(5, max_steps=3, staggered=True, noise=0.2)
        envs.reset(seed=seed)
        return torch.stack([envs.step(torch.ones(5, 1))[0]["observation"] for _ in range(8)])

    assert torch.equal(played(0), played(0)) and not torch.equal(played(0), played(1))


def test_refused() -> None:
    with pytest.raises(ValueError, match="num_envs"):
        Pendulums(0)
    with pytest.raises(ValueError, match="noise"):
        Pendulums(2, noise=-1.0)
