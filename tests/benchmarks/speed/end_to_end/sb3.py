# SPDX-License-Identifier: Apache-2.0
"""Stable-Baselines3's DQN (which is not double), TD3, SAC and PPO."""

from __future__ import annotations

import numpy as np
import stable_baselines3
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
from turns import (
    CAPACITY,
    CLIP_RANGE,
    DISCOUNT,
    ENTROPY_COEFFICIENT,
    EPOCHS,
    EPSILON,
    GAE_LAMBDA,
    GRADIENT_NORM,
    ROLLOUT_LENGTH,
    TARGET_UPDATE_RATE,
    WARMUP_STEPS,
    Turns,
    Work,
    main,
)


class Steps(BaseCallback):
    """Counts environment steps; ``on_step`` comes before the update of that step, one per step either way."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def _on_step(self) -> bool:
        if self.num_timesteps == WARMUP_STEPS + 1:
            self._turns.start()
        elif self.num_timesteps > WARMUP_STEPS + 1:
            self._turns.tick()
        return True


class Rollouts(BaseCallback):
    """Counts rollouts, whose update is done when the next one begins."""

    def __init__(self, turns: Turns, steps: int) -> None:
        super().__init__()
        self._turns, self._steps = turns, steps
        self._has_started = False

    def _on_rollout_start(self) -> None:
        if self._has_started:
            self._turns.tick(self._steps)
        else:
            self._turns.start()
            self._has_started = True

    def _on_step(self) -> bool:
        return True


def replayed(name: str, **options: object):
    """A run of an algorithm with replay."""

    def run(work: Work, turns: Turns) -> None:
        algorithm = getattr(stable_baselines3, name)(
            "MlpPolicy",
            work.env,
            learning_rate=work.learning_rate,
            buffer_size=CAPACITY,
            learning_starts=WARMUP_STEPS,
            batch_size=work.batch_size,
            tau=TARGET_UPDATE_RATE,
            gamma=DISCOUNT,
            train_freq=1,
            gradient_steps=1,
            policy_kwargs={"net_arch": list(work.hidden_sizes), "activation_fn": torch.nn.ReLU},
            device="cpu",
            seed=0,
            **options,
        )
        algorithm.learn(10_000_000, callback=Steps(turns))

    return run


def ppo(work: Work, turns: Turns) -> None:
    """PPO; policy and value have a network each, as it offers no shared trunk."""
    algorithm = stable_baselines3.PPO(
        "MlpPolicy",
        make_vec_env(work.env, n_envs=work.num_envs, seed=0),
        learning_rate=work.learning_rate,
        n_steps=ROLLOUT_LENGTH,
        batch_size=work.batch_size,
        n_epochs=EPOCHS,
        gamma=DISCOUNT,
        gae_lambda=GAE_LAMBDA,
        clip_range=CLIP_RANGE,
        clip_range_vf=CLIP_RANGE,
        ent_coef=ENTROPY_COEFFICIENT,
        max_grad_norm=GRADIENT_NORM,
        policy_kwargs={"net_arch": list(work.hidden_sizes), "activation_fn": torch.nn.ReLU},
        device="cpu",
        seed=0,
    )
    algorithm.learn(100_000_000, callback=Rollouts(turns, ROLLOUT_LENGTH * work.num_envs))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(
        {
            "dqn": replayed(
                "DQN", target_update_interval=1, exploration_initial_eps=EPSILON, exploration_final_eps=EPSILON
            ),
            "td3": replayed("TD3", action_noise=NormalActionNoise(np.zeros(6), 0.1 * np.ones(6))),
            "sac": replayed("SAC"),
            "ppo": ppo,
        }
    )
