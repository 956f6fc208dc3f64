# SPDX-License-Identifier: Apache-2.0
"""Ray Tune searches a learning rate and a replay option for DQN on CartPole, with early stopping by ASHA.

    python examples/rllib_tune.py           # 8 trials of at most 10,000 environment steps
    python examples/rllib_tune.py --fast    # 2 trials of at most 400, to see it run

ASHA compares trials after equal numbers of environment steps and stops those that are behind (Li et al. 2020,
https://arxiv.org/abs/1810.05934). Each trial is a process of its own whose checkpoint holds its replay buffer; the best
one is restored and trained further.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray
from ray import tune
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.dqn import DQNConfig
from ray.tune.schedulers import ASHAScheduler

import rllib_ext

ENV_STEPS = "num_env_steps_sampled_lifetime"
RETURN = "env_runners/episode_return_mean"


def make_config(steps_per_result: int, warmup_steps: int) -> DQNConfig:
    buffer = rllib_ext.replay_config("prioritized", capacity=20_000, priority_exponent=tune.uniform(0.0, 0.9))
    config = (
        DQNConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0)  # the trial's own process plays
        .training(
            lr=tune.loguniform(1e-4, 1e-2),
            replay_buffer_config=buffer,
            train_batch_size_per_learner=32,
            num_steps_sampled_before_learning_starts=warmup_steps,
            target_network_update_freq=200,
            epsilon=[[0, 1.0], [2_000, 0.05]],
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "head_fcnet_hiddens": []})
        .reporting(min_sample_timesteps_per_iteration=steps_per_result, min_time_s_per_iteration=0)
        .debugging(seed=0, log_level="ERROR")
    )
    return rllib_ext.configure(config)  # checks samples of the search space; each trial checks its own values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="few and short trials")
    parser.add_argument("--directory", type=Path, default=Path("runs/rllib_tune"))
    options = parser.parse_args()
    trials, steps, warmup_steps = (2, 400, 100) if options.fast else (8, 10_000, 500)

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)  # trials that run at once
    config = make_config(steps // 4, warmup_steps)
    results = tune.Tuner(
        config.algo_class,
        param_space=config,
        tune_config=tune.TuneConfig(
            metric=RETURN,
            mode="max",
            num_samples=trials,
            scheduler=ASHAScheduler(time_attr=ENV_STEPS, grace_period=steps // 4, max_t=steps, reduction_factor=2),
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name="dqn_cartpole",
            storage_path=str(options.directory.resolve()),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            verbose=0,
        ),
    ).fit()

    print(f"\n{'lr':<9}{'priority_exponent':>18}{'env_steps':>11}{'updates':>9}{'return':>8}")
    for result in results:
        assert result.metrics is not None
        exponent = result.config["replay_buffer_config"]["priority_exponent"]
        clocks = f"{result.metrics[ENV_STEPS]:>11.0f}{result.metrics['num_updates_lifetime']:>9}"
        episode_return = result.metrics["env_runners"]["episode_return_mean"]
        print(f"{result.config['lr']:<9.6f}{exponent:>18.3f}{clocks}{episode_return:>8.1f}")

    best = results.get_best_result()
    assert best.checkpoint is not None
    algorithm = Algorithm.from_checkpoint(best.checkpoint.path)
    buffer = algorithm.local_replay_buffer
    exponent = buffer.replay.sampler.priority_exponent
    print(f"\nbest: {best.checkpoint.path}\nrestored: {len(buffer)} rows, priority_exponent {exponent:.3f}")
    print(f"trained on: {algorithm.train()[ENV_STEPS]:.0f} environment steps")
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
