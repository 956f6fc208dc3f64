# SPDX-License-Identifier: Apache-2.0
"""tianshou's DQN, TD3, SAC and PPO.

Ten steps are collected at a time, followed by ten updates, as in its examples. Its DQN copies the target network every
hundred updates.
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch
from tianshou.algorithm import DQN, PPO, SAC, TD3, Algorithm
from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, ReplayBuffer, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.exploration import GaussianNoise
from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorDeterministic, ContinuousActorProbabilistic, ContinuousCritic
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
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

STEPS_AT_ONCE = 10


def network(work: Work, outputs: int = 0, *, takes_action: bool = False) -> Net:
    """A perceptron over observations, or over observations and actions."""
    env = gym.make(work.env)
    shape = env.action_space.shape if takes_action else outputs
    return Net(
        state_shape=env.observation_space.shape, action_shape=shape, hidden_sizes=work.hidden_sizes, concat=takes_action
    )


def optimizer(work: Work) -> AdamOptimizerFactory:
    """Adam; it offers no fused one."""
    return AdamOptimizerFactory(lr=work.learning_rate)


def replay(work: Work, turns: Turns, algorithm: Algorithm) -> None:
    """Trains an algorithm with replay."""
    collector = Collector(
        algorithm, DummyVectorEnv([lambda: gym.make(work.env)]), ReplayBuffer(CAPACITY), exploration_noise=True
    )
    collector.reset()
    collector.collect(n_step=WARMUP_STEPS, random=True)

    def count(epoch: int, env_steps: int) -> None:  # before each collection
        if env_steps == 0:
            turns.start()
        else:
            turns.tick(STEPS_AT_ONCE)

    algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collector,
            training_fn=count,
            max_epochs=1_000,
            epoch_num_steps=100_000,
            collection_step_num_env_steps=STEPS_AT_ONCE,
            update_step_num_gradient_steps_per_sample=1.0,
            batch_size=work.batch_size,
            verbose=False,
            show_progress=False,
        )
    )


def dqn(work: Work, turns: Turns) -> None:
    """Double DQN."""
    space = gym.make(work.env).action_space
    policy = DiscreteQLearningPolicy(model=network(work, 2), action_space=space, eps_training=EPSILON)
    replay(work, turns, DQN(policy=policy, optim=optimizer(work), gamma=DISCOUNT, target_update_freq=100))


def critics(work: Work) -> list[ContinuousCritic]:
    """Two critics."""
    return [ContinuousCritic(preprocess_net=network(work, takes_action=True)) for _ in range(2)]


def td3(work: Work, turns: Turns) -> None:
    """TD3."""
    space = gym.make(work.env).action_space
    actor = ContinuousActorDeterministic(preprocess_net=network(work), action_shape=space.shape)
    policy = ContinuousDeterministicPolicy(actor=actor, action_space=space, exploration_noise=GaussianNoise(sigma=0.1))
    first, second = critics(work)
    algorithm = TD3(
        policy=policy,
        policy_optim=optimizer(work),
        critic=first,
        critic_optim=optimizer(work),
        critic2=second,
        critic2_optim=optimizer(work),
        tau=TARGET_UPDATE_RATE,
        gamma=DISCOUNT,
    )
    replay(work, turns, algorithm)


def sac(work: Work, turns: Turns) -> None:
    """SAC that adapts its entropy coefficient."""
    space = gym.make(work.env).action_space
    actor = ContinuousActorProbabilistic(
        preprocess_net=network(work), action_shape=space.shape, unbounded=True, conditioned_sigma=True
    )
    first, second = critics(work)
    algorithm = SAC(
        policy=SACPolicy(actor=actor, action_space=space),
        policy_optim=optimizer(work),
        critic=first,
        critic_optim=optimizer(work),
        critic2=second,
        critic2_optim=optimizer(work),
        tau=TARGET_UPDATE_RATE,
        gamma=DISCOUNT,
        alpha=AutoAlpha(-6.0, 0.0, optimizer(work)),
    )
    replay(work, turns, algorithm)


def ppo(work: Work, turns: Turns) -> None:
    """PPO; policy and value share a trunk."""
    trunk = network(work)
    policy = ProbabilisticActorPolicy(
        actor=DiscreteActor(preprocess_net=trunk, action_shape=2, softmax_output=False),
        dist_fn=lambda logits: torch.distributions.Categorical(logits=logits),
        action_space=gym.make(work.env).action_space,
        action_scaling=False,
    )
    algorithm = PPO(
        policy=policy,
        critic=DiscreteCritic(preprocess_net=trunk),
        optim=optimizer(work),
        eps_clip=CLIP_RANGE,
        value_clip=True,
        ent_coef=ENTROPY_COEFFICIENT,
        max_grad_norm=GRADIENT_NORM,
        gae_lambda=GAE_LAMBDA,
        gamma=DISCOUNT,
    )
    steps = ROLLOUT_LENGTH * work.num_envs
    environments = DummyVectorEnv([lambda: gym.make(work.env) for _ in range(work.num_envs)])
    collector = Collector(algorithm, environments, VectorReplayBuffer(steps, work.num_envs))
    collector.reset()
    algorithm.run_training(
        OnPolicyTrainerParams(
            training_collector=collector,
            training_fn=lambda epoch, env_steps: turns.tick(steps) if env_steps else turns.start(),
            max_epochs=1_000,
            epoch_num_steps=steps * 100,
            collection_step_num_env_steps=steps,
            update_step_num_repetitions=EPOCHS,
            batch_size=work.batch_size,
            verbose=False,
            show_progress=False,
        )
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    main({"dqn": dqn, "td3": td3, "sac": sac, "ppo": ppo})
