# SPDX-License-Identifier: Apache-2.0
"""Ray Tune compares replay methods for one algorithm: SAC on Pendulum, a trial for each recipe.

    python examples/rllib_tune.py           # 4,000 steps each
    python examples/rllib_tune.py --fast    # 220 steps each, to see it run

Each trial is a process of its own. The checkpoint it leaves holds its replay buffer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray
from ray import tune
from ray.rllib.algorithms.sac import SACConfig

import rllib_ext

BUFFERS = [
    rllib_ext.replay_config("uniform", capacity=50_000),
    rllib_ext.replay_config("prioritized", capacity=50_000, priority_exponent=0.6),
    rllib_ext.replay_config("neighborhood_mixup", capacity=50_000, num_neighbors=10),
]


def make_config(steps: int, warmup_steps: int, batch_size: int) -> SACConfig:
    config = (
        SACConfig()
        .environment("Pendulum-v1")
        .env_runners(num_env_runners=0)  # the trial's own process plays
        .training(
            replay_buffer_config=BUFFERS[0],
            train_batch_size_per_learner=batch_size,
            num_steps_sampled_before_learning_starts=warmup_steps,
            actor_lr=3e-4,
            critic_lr=1e-3,
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "head_fcnet_hiddens": []})
        .reporting(min_sample_timesteps_per_iteration=steps // 10, min_time_s_per_iteration=0)
        .debugging(seed=0, log_level="ERROR")
    )
    rllib_ext.configure(config)
    # After configure(), and as an attribute: training(replay_buffer_config=...) would merge the grid into the buffer.
    config.replay_buffer_config = tune.grid_search(BUFFERS)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="short trials")
    parser.add_argument("--directory", type=Path, default=Path("runs/rllib_tune"))
    options = parser.parse_args()
    steps, warmup_steps, batch_size = (220, 190, 32) if options.fast else (4_000, 300, 128)

    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    config = make_config(steps, warmup_steps, batch_size)
    results = tune.Tuner(
        config.algo_class,
        param_space=config,
        tune_config=tune.TuneConfig(trial_dirname_creator=lambda trial: trial.trial_id),
        run_config=tune.RunConfig(
            name="sac_pendulum",
            storage_path=str(options.directory.resolve()),
            stop={"num_env_steps_sampled_lifetime": steps},
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            verbose=0,
        ),
    ).fit()
    ray.shutdown()

    print(f"\n{'recipe':<20}{'return':>8}{'stored rows':>13}  checkpoint")
    for result in results:
        assert result.metrics is not None and result.checkpoint is not None
        recipe = result.config["replay_buffer_config"]["recipe"]
        episode_return = result.metrics["env_runners"].get("episode_return_mean", float("nan"))
        rows = result.metrics["replay_buffer"]["num_env_steps_stored"]
        print(f"{recipe:<20}{episode_return:>8.0f}{rows:>13}  {result.checkpoint.path}")


if __name__ == "__main__":
    main()
