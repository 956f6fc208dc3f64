# SPDX-License-Identifier: Apache-2.0
"""This library's agents: through Lightning's ``Trainer.fit``, and in a plain loop over ``Replay``."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import gymnasium as gym
import lightning as L
import numpy as np
import torch
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

from lightning_replay import recipes
from lightning_replay.agents import DQN, PPO, SAC, TD3
from lightning_replay.agents.agent import OffPolicyAgent
from lightning_replay.levels import UniformLevels
from lightning_replay.lit import LevelDataModule, ReplayDataModule

OPTIONS: dict[type[OffPolicyAgent], tuple[str, ...]] = {
    DQN: ("learning_rate",),
    TD3: ("actor_learning_rate", "critic_learning_rate"),
    SAC: ("actor_learning_rate", "critic_learning_rate", "entropy_learning_rate"),
}


def make_agent(kind: type[OffPolicyAgent], work: Work) -> OffPolicyAgent:
    """The agent with the settings of the work."""
    options: dict[str, Any] = dict.fromkeys(OPTIONS[kind], work.learning_rate)
    if kind is DQN:
        options |= {"exploration_start": EPSILON, "exploration_end": EPSILON}
    return kind.for_env(
        work.env,
        hidden_sizes=work.hidden_sizes,
        discount=DISCOUNT,
        target_update_rate=TARGET_UPDATE_RATE,
        **options,
    )


def count_updates(agent: OffPolicyAgent, turns: Turns) -> None:
    """Counts each update of the agent, one per environment step, as it begins; the first one ends the set-up."""
    update, has_started = agent.update, False

    def counted(batch: Any) -> Any:
        nonlocal has_started
        if has_started:
            turns.tick()
        else:
            turns.start()
            has_started = True
        return update(batch)

    agent.update = counted  # type: ignore[method-assign]


def fit(agent: L.LightningModule, data: L.LightningDataModule, *callbacks: L.Callback) -> None:
    """Trains without a progress bar, logs or checkpoints."""
    trainer = L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(agent, datamodule=data)


def with_lightning(kind: type[OffPolicyAgent], recipe: Any = recipes.uniform):
    """A run of an agent through Lightning, as a user would write it."""

    def run(work: Work, turns: Turns) -> None:
        agent = make_agent(kind, work)
        count_updates(agent, turns)
        replay = recipe(capacity=CAPACITY, batch_size=work.batch_size, seed=0)
        fit(agent, ReplayDataModule(work.env, replay, env_steps=10_000_000, warmup_steps=WARMUP_STEPS, seed=0))

    return run


class Rollouts(L.Callback):
    """Counts the environment steps of rollouts as their updates end."""

    def __init__(self, turns: Turns, steps: int) -> None:
        self._turns, self._steps = turns, steps

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ends the set-up."""
        self._turns.start()

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Counts one rollout."""
        self._turns.tick(self._steps)


def ppo(work: Work, turns: Turns) -> None:
    """PPO on uniformly chosen seeds."""
    agent = PPO.for_env(
        work.env,
        hidden_sizes=work.hidden_sizes,
        learning_rate=work.learning_rate,
        discount=DISCOUNT,
        gae_lambda=GAE_LAMBDA,
        clip_range=CLIP_RANGE,
        value_clip=CLIP_RANGE,
        entropy_coefficient=ENTROPY_COEFFICIENT,
        gradient_norm=GRADIENT_NORM,
        epochs=EPOCHS,
        minibatches=ROLLOUT_LENGTH * work.num_envs // work.batch_size,
    )
    data = LevelDataModule(
        work.env,
        UniformLevels(1_000, seed=0),
        env_steps=100_000_000,
        num_envs=work.num_envs,
        rollout_length=ROLLOUT_LENGTH,
        seed=0,
    )
    fit(agent, data, Rollouts(turns, ROLLOUT_LENGTH * work.num_envs))


def bare(kind: type[OffPolicyAgent]):
    """A run of an agent in a plain loop."""

    class Plain(kind):  # type: ignore[valid-type,misc]
        """The same updates outside a trainer, with torch's optimisers."""

        exact = True
        takes_plain_gradients = True

        def critic_and_other_optimizers(self) -> Any:
            return self.plain_optimizers[0], self.plain_optimizers[1:]

    def run(work: Work, turns: Turns) -> None:
        agent = make_agent(Plain, work)
        optimizers = agent.configure_optimizers()
        agent.plain_optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        replay = recipes.uniform(capacity=CAPACITY, batch_size=work.batch_size, seed=0)
        environment = gym.make(work.env)
        is_discrete = isinstance(environment.action_space, gym.spaces.Discrete)
        observation, _ = environment.reset(seed=0)
        for step in range(10_000_000):
            if step == WARMUP_STEPS:
                turns.start()
            action = environment.action_space.sample()
            if step >= WARMUP_STEPS:
                with torch.no_grad():
                    action = agent.act(torch.as_tensor(observation, dtype=torch.float32)[None], explore=True)[0].numpy()
            following, reward, terminated, truncated, _ = environment.step(int(action) if is_discrete else action)
            columns = {
                "observation": np.asarray(observation, np.float32)[None],
                "action": np.asarray(action)[None],
                ("next", "observation"): np.asarray(following, np.float32)[None],
                ("next", "reward"): np.full((1, 1), reward, np.float32),
                ("next", "terminated"): np.full((1, 1), terminated),
                ("next", "truncated"): np.full((1, 1), truncated),
                ("next", "done"): np.full((1, 1), terminated or truncated),
            }
            replay.extend_columns(columns)
            observation = environment.reset()[0] if terminated or truncated else following
            if step >= WARMUP_STEPS:
                batch = replay.sample()
                replay.update_priority(batch, agent.update(batch)["td_error"])
                turns.tick()

    OPTIONS[Plain] = OPTIONS[kind]
    return run


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    for name in ("lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    agents = {"dqn": DQN, "td3": TD3, "sac": SAC}
    kind = sys.argv[2]
    if kind == "bare":
        main({name: bare(agent) for name, agent in agents.items()})
    else:
        recipe = recipes.prioritized if kind == "prioritized" else recipes.uniform
        main({name: with_lightning(agent, recipe) for name, agent in agents.items()} | {"ppo": ppo})
