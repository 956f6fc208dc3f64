# SPDX-License-Identifier: Apache-2.0
"""DQN with two agents in RLlib: each learns from a replay of its own, one prioritized and one uniform.

    python examples/rllib_two_agents.py           # 3,000 steps of two CartPoles
    python examples/rllib_two_agents.py --fast    # 200 steps in one process, to see it run
    python examples/rllib_two_agents.py --shared  # one module, which learns from the steps of both agents

An episode ends when both poles have fallen, so the agents do not take the same number of steps.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole

import rllib_ext

# Options of single modules; None removes an option that uniform replay does not have.
MODULES = {"left": {}, "right": {"recipe": "uniform", "priority_exponent": None}}


def module_of(agent_id: Any, *args: Any, **rest: Any) -> str:
    return "left" if agent_id == 0 else "right"


def shared_module(agent_id: Any, *args: Any, **rest: Any) -> str:
    return "both"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", action="store_true", help="one module, and so one replay, for both agents")
    parser.add_argument("--fast", action="store_true", help="a short run")
    options = parser.parse_args()
    total_steps, warmup_steps, runners = (200, 50, 0) if options.fast else (3_000, 500, 1)
    modules = {} if options.shared else MODULES

    # Each remote EnvRunner requests one CPU; without enough of them Ray waits for ever.
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    config = rllib_ext.configure(
        DQNConfig()
        .environment(MultiAgentCartPole, env_config={"num_agents": 2})
        .multi_agent(
            policies={"both"} if options.shared else set(modules),
            policy_mapping_fn=shared_module if options.shared else module_of,
        )
        .env_runners(num_env_runners=runners)
        .training(
            replay_buffer_config=rllib_ext.replay_config(
                "prioritized", capacity=20_000, priority_exponent=0.6, modules=modules
            ),
            train_batch_size_per_learner=64,
            num_steps_sampled_before_learning_starts=warmup_steps,
            lr=1e-3,
            target_network_update_freq=100,
            epsilon=[(0, 1.0), (total_steps // 3, 0.05)],
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "head_fcnet_hiddens": []})
        .reporting(min_sample_timesteps_per_iteration=total_steps // 10, min_time_s_per_iteration=0)
        .debugging(seed=0, log_level="ERROR")
    )
    algorithm = config.build_algo()
    print("env_steps  returns of both  rows stored by module")
    for _ in range(10):
        result = algorithm.train()
        env_steps = result["env_runners"]["num_env_steps_sampled_lifetime"]
        returns = result["env_runners"].get("agent_episode_returns_mean", {})
        stored = result.get("replay_buffer", {}).get("num_module_steps_stored", {})
        both = "  ".join(f"{returns.get(agent, float('nan')):5.0f}" for agent in ("0", "1"))
        print(f"{env_steps:9.0f}  {both:>15}  {dict(sorted(stored.items()))}", flush=True)
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
