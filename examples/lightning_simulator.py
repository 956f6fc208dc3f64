# SPDX-License-Identifier: Apache-2.0
"""TD3 under a Lightning trainer on a simulator that steps a thousand pendulums in one tensor.

python examples/lightning_simulator.py [--device cuda] [--fast]

The data module acts on the simulator's tensors and stores them: no row passes through NumPy. Your own simulator needs
num_envs, reset, and step, see docs/simulators.md. Under a minute on one core.
"""

from __future__ import annotations

import argparse

import lightning as L

from lightning_replay import recipes
from lightning_replay.agents import TD3
from lightning_replay.envs.pendulums import Pendulums
from lightning_replay.lit import Evaluate, ReplayDataModule, ReplayProgressBar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cuda keeps simulator, replay, and agent on the GPU")
    parser.add_argument("--fast", action="store_true", help="64 pendulums and a few steps only")
    options = parser.parse_args()
    num_envs, steps, warmup_steps = (64, 210, 5) if options.fast else (1_024, 500, 10)

    L.seed_everything(0)
    is_on_device = options.device != "cpu"
    replay = recipes.uniform(
        capacity=num_envs * 512,
        batch_size=num_envs,
        n_steps=3,
        discount=0.97,
        device=options.device,
        draws_on="device" if is_on_device else "cpu",
    )
    data = ReplayDataModule(
        Pendulums,  # A second one is built for the evaluations.
        replay,
        env_steps=num_envs * steps,
        warmup_steps=num_envs * warmup_steps,
        updates_per_env_step=(1 if options.fast else 8) / num_envs,
        env_kwargs={"num_envs": num_envs, "device": options.device, "staggered": True},
        evaluation_env_kwargs={"num_envs": 64, "staggered": False},
        seed=0,
    )
    agent = TD3(
        hidden_sizes=(64, 64),
        actor_learning_rate=1e-3,
        critic_learning_rate=1e-3,
        discount=0.97,
        target_update_rate=0.05,
        exploration_noise=0.2,
    )
    trainer = L.Trainer(
        max_epochs=-1,
        accelerator="gpu" if is_on_device else "cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[ReplayProgressBar(), Evaluate(every_n_env_steps=num_envs * 100, episodes=64)],
    )
    trainer.fit(agent, datamodule=data)
    ended = len(data.collection.episodes)
    print(f"{data.env_steps_done:,} steps of {num_envs:,} pendulums, {data.updates_done:,} updates, {ended:,} episodes")
    print(f"mean return of 64 pendulums: {trainer.callback_metrics['eval/return']:.0f}")


if __name__ == "__main__":
    main()
