# SPDX-License-Identifier: Apache-2.0
"""Scripts of TorchRL's parts in the style of its published implementations: collector, replay buffer, losses.

A hundred steps are collected at a time, followed by a hundred updates. The replay buffer is its uniform one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import Compose, DoubleToFloat, GymEnv, InitTracker, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import (
    MLP,
    AdditiveGaussianModule,
    EGreedyModule,
    ProbabilisticActor,
    QValueActor,
    TanhModule,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss, DQNLoss, SACLoss, SoftUpdate, TD3Loss
from torchrl.objectives.value import GAE
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

STEPS_AT_ONCE = 100


def make_environment(work: Work, **options: Any) -> TransformedEnv:
    """The environment with the usual transforms."""
    transforms = Compose(InitTracker(), StepCounter(), DoubleToFloat(), RewardSum())
    make = partial(GymEnv, work.env, **options)
    return TransformedEnv(make() if work.num_envs == 1 else SerialEnv(work.num_envs, make), transforms)


def perceptron(work: Work, inputs: int, outputs: int) -> MLP:
    """Linear layers with ReLU between."""
    return MLP(in_features=inputs, num_cells=list(work.hidden_sizes), out_features=outputs, activation_class=nn.ReLU)


def adam(work: Work, *parameters: Any) -> torch.optim.Optimizer:
    """Adam of all parameters."""
    return torch.optim.Adam(list(itertools.chain(*parameters)), lr=work.learning_rate)


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Takes one gradient step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def replayed(
    work: Work, turns: Turns, environment: TransformedEnv, policy: nn.Module, update: Callable[[TensorDictBase], None]
) -> None:
    """Collects with ``policy`` and updates once per step after the warm-up."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=work.batch_size)
    collector = Collector(
        environment,
        policy,
        init_random_frames=WARMUP_STEPS,
        frames_per_batch=STEPS_AT_ONCE,
        total_frames=-1,
        device="cpu",
    )
    for number, rows in enumerate(collector):
        buffer.extend(rows.reshape(-1))
        if (number + 1) * STEPS_AT_ONCE <= WARMUP_STEPS:
            continue
        if number * STEPS_AT_ONCE == WARMUP_STEPS:
            turns.start()
        for _ in range(STEPS_AT_ONCE):
            update(buffer.sample())
            turns.tick()


def dqn(work: Work, turns: Turns) -> None:
    """Double DQN."""
    environment = make_environment(work, categorical_action_encoding=True)
    network = QValueActor(perceptron(work, 4, 2), in_keys=["observation"], spec=environment.action_spec)
    explore = EGreedyModule(environment.action_spec, eps_init=EPSILON, eps_end=EPSILON, annealing_num_steps=1)
    loss = DQNLoss(network, loss_function="smooth_l1", delay_value=True, double_dqn=True)
    loss.make_value_estimator(gamma=DISCOUNT)
    targets = SoftUpdate(loss, tau=TARGET_UPDATE_RATE)
    optimizer = adam(work, network.parameters())

    def update(batch: TensorDictBase) -> None:
        descend(optimizer, loss(batch)["loss"])
        targets.step()

    replayed(work, turns, environment, TensorDictSequential(network, explore), update)


def td3(work: Work, turns: Turns) -> None:
    """TD3."""
    environment = make_environment(work)
    spec = environment.action_spec
    actor = TensorDictSequential(
        TensorDictModule(perceptron(work, 17, 6), ["observation"], ["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], spec=spec),
    )
    critic = ValueOperator(perceptron(work, 23, 1), in_keys=["observation", "action"])
    noise = AdditiveGaussianModule(spec=spec, mean=0.0, std=0.1, safe=False)
    loss = TD3Loss(
        actor, critic, num_qvalue_nets=2, loss_function="l2", delay_actor=True, delay_qvalue=True, action_spec=spec
    )
    loss.make_value_estimator(gamma=DISCOUNT)
    targets = SoftUpdate(loss, tau=TARGET_UPDATE_RATE)
    critic_optimizer = adam(work, loss.qvalue_network_params.values(True, True))
    actor_optimizer = adam(work, loss.actor_network_params.values(True, True))
    steps = itertools.count()

    def update(batch: TensorDictBase) -> None:
        descend(critic_optimizer, loss.value_loss(batch)[0])
        if next(steps) % 2 == 0:
            descend(actor_optimizer, loss.actor_loss(batch)[0])
            targets.step()

    replayed(work, turns, environment, TensorDictSequential(actor, noise), update)


def sac(work: Work, turns: Turns) -> None:
    """SAC that adapts its entropy coefficient."""
    environment = make_environment(work)
    spec = environment.action_spec
    actor = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(perceptron(work, 17, 12), NormalParamExtractor()), ["observation"], ["loc", "scale"]
        ),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
        return_log_prob=False,
    )
    critic = ValueOperator(perceptron(work, 23, 1), in_keys=["observation", "action"])
    loss = SACLoss(actor, critic, num_qvalue_nets=2, loss_function="l2", delay_qvalue=True, alpha_init=1.0)
    loss.make_value_estimator(gamma=DISCOUNT)
    targets = SoftUpdate(loss, tau=TARGET_UPDATE_RATE)
    critic_optimizer = adam(work, loss.qvalue_network_params.values(True, True))
    actor_optimizer = adam(work, loss.actor_network_params.values(True, True))
    alpha_optimizer = adam(work, [loss.log_alpha])

    def update(batch: TensorDictBase) -> None:
        losses = loss(batch)
        both = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
        for optimizer in (critic_optimizer, actor_optimizer, alpha_optimizer):
            optimizer.zero_grad()
        both.backward()
        for optimizer in (critic_optimizer, actor_optimizer, alpha_optimizer):
            optimizer.step()
        targets.step()

    replayed(work, turns, environment, actor, update)


def ppo(work: Work, turns: Turns) -> None:
    """PPO; policy and value share a trunk."""
    environment = make_environment(work, categorical_action_encoding=True)
    first, second = work.hidden_sizes
    trunk = nn.Sequential(nn.Linear(4, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU())
    hidden = TensorDictModule(trunk, ["observation"], ["hidden"])
    actor = ProbabilisticActor(
        TensorDictSequential(hidden, TensorDictModule(nn.Linear(second, 2), ["hidden"], ["logits"])),
        in_keys=["logits"],
        spec=environment.action_spec_unbatched,
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = TensorDictSequential(hidden, TensorDictModule(nn.Linear(second, 1), ["hidden"], ["state_value"]))
    advantages = GAE(gamma=DISCOUNT, lmbda=GAE_LAMBDA, value_network=critic, average_gae=True)
    loss = ClipPPOLoss(
        actor, critic, clip_epsilon=CLIP_RANGE, clip_value=CLIP_RANGE, entropy_coeff=ENTROPY_COEFFICIENT,
        critic_coeff=0.5, loss_critic_type="l2",
    )  # fmt: skip
    optimizer = adam(work, loss.parameters())
    steps = ROLLOUT_LENGTH * work.num_envs
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(steps), sampler=SamplerWithoutReplacement(), batch_size=work.batch_size
    )
    collector = Collector(environment, actor, frames_per_batch=steps, total_frames=-1, device="cpu")
    turns.start()
    for rollout in collector:
        with torch.no_grad():
            rollout = advantages(rollout)
        buffer.extend(rollout.reshape(-1))
        for _ in range(EPOCHS):
            for batch in buffer:
                losses = loss(batch)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), GRADIENT_NORM)
                optimizer.step()
        turns.tick(steps)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    main({"dqn": dqn, "td3": td3, "sac": sac, "ppo": ppo})
