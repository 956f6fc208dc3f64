# SPDX-License-Identifier: Apache-2.0
"""MP-DQN in RLlib: half-field soccer with parameterised actions, one task for each EnvRunner, EXP3 in the buffer.

    python examples/rllib_mpdqn.py           # 20,000 steps
    python examples/rllib_mpdqn.py --fast    # 400 steps in one process, to see it run

RLlib has no algorithm for discrete actions with parameters, Tuple(Discrete, Box, ..., Box). Its DQN has the rest: it
collects in parallel, replays, and updates target networks. So a module and a Learner around the library's agent
``MPDQN``, which both packages can import, make MP-DQN of it.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
import torch
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.dqn.torch.dqn_torch_learner import DQNTorchLearner
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import TargetNetworkAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.utils.metrics import TD_ERROR_KEY
from tensordict import TensorDict

import rllib_ext
from lightning_replay.agents import MPDQN
from lightning_replay.schedulers import Exp3, MeanReturn

TASKS = ["target", "far", "near", "goal_mouth"]


class MPDQNModule(TorchRLModule, TargetNetworkAPI):
    """Acts with :class:`MPDQN`, whose options are the ``model_config``."""

    def setup(self) -> None:
        sizes = MPDQN.sizes_from(self.observation_space, self.action_space)
        self.agent = MPDQN(**sizes, **self.model_config["agent"])

    def _forward(self, batch: dict[str, Any], explore: bool = False, **ignored: Any) -> dict[str, Any]:
        discrete, parameters = self.agent.act(batch[Columns.OBS], explore=explore)
        return {Columns.ACTIONS: (discrete, *parameters.split(self.agent.hparams["parameter_sizes"], dim=1))}

    def _forward_exploration(self, batch: dict[str, Any], t: int, **ignored: Any) -> dict[str, Any]:
        # ε falls over the steps of all EnvRunners, which RLlib counts and restores; the agent counts its own alone.
        self.agent.on_load_checkpoint({"mpdqn_explored_steps": t})
        return self._forward(batch, explore=True)

    def _forward_train(self, batch: dict[str, Any], **ignored: Any) -> dict[str, Any]:
        discrete, *boxes = batch[Columns.ACTIONS]
        following = {"observation": batch[Columns.NEXT_OBS], "reward": batch[Columns.REWARDS]}
        rows = {
            "observation": batch[Columns.OBS],
            "action": {"discrete": discrete.long(), "parameters": torch.cat(boxes, -1)},
            "next": following | {"terminated": batch[Columns.TERMINATEDS]},
            "steps_to_next_obs": batch["n_step"],
            "priority_weight": batch["weights"],
        }
        return dict(
            zip(("value_loss", "parameter_loss", TD_ERROR_KEY), self.agent.losses(TensorDict(rows)), strict=True)
        )

    def make_target_networks(self) -> None:
        pass  # the agent has them

    def get_target_network_pairs(self) -> list[tuple[Any, Any]]:
        agent = self.agent
        return [
            (agent.value_network, agent.target_value_network),
            (agent.parameter_network, agent.target_parameter_network),
        ]

    def forward_target(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"targets": self.agent.targets(TensorDict(batch))}


class MPDQNLearner(DQNTorchLearner):
    """Steps both networks of :class:`MPDQNModule`; RLlib's Learner updates their targets."""

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        return [TargetNetworkAPI]

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        agent = self.module[module_id].unwrapped().agent
        for name, optimizer in zip(("values", "parameters"), agent.configure_optimizers(), strict=True):
            (group,) = optimizer.param_groups
            options = {"params": group["params"], "lr_or_lr_schedule": group["lr"]}
            self.register_optimizer(module_id=module_id, optimizer_name=name, optimizer=optimizer, **options)

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> torch.Tensor:
        self.metrics.log_value((module_id, TD_ERROR_KEY), fwd_out[TD_ERROR_KEY], reduce="item_series")
        return fwd_out["value_loss"] + fwd_out["parameter_loss"]  # which share no weights


def config_of(total: int, warmup: int, runners: int) -> DQNConfig:
    """Returns the config of a run of ``total`` environment steps, the first ``warmup`` of them without updates."""
    agent = {"hidden_sizes": (128, 64), "parameter_learning_rate": 1e-4, "discount": 0.97, "exploration_noise": 0.1}
    agent |= {"target_low": 0.0, "target_high": 5.0, "exploration_steps": total // 4}
    config = (
        DQNConfig()
        .environment(
            "lightning_replay.envs:HalfField-1v0",
            env_config={"frame_skip": 4, "time_outs_terminate": True},
            normalize_actions=False,  # the agent's parameters are in the environment's units
        )
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=4 // max(runners, 1), rollout_fragment_length=6)
        .training(
            replay_buffer_config=rllib_ext.replay_config(
                "parallel_curriculum",
                tasks=TASKS,
                capacity_per_task=20_000,
                scheduler=Exp3(exploration=0.2),
                progress=MeanReturn(low=0.0, high=5.0, every=40, across_tasks=True),
            ),
            gamma=0.97,
            grad_clip=1.0,  # the norm of each network's gradient, which RLlib's DQN clips at 40
            n_step=3,
            tau=0.005,
            target_network_update_freq=0,  # after each update, of which a round of steps has several
            train_batch_size_per_learner=64,
            training_intensity=8,  # rows learned for each row collected, about
            num_steps_sampled_before_learning_starts=warmup,
        )
        .learners(learner_class=MPDQNLearner)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=MPDQNModule, model_config={"agent": agent}))
        .fault_tolerance(restart_failed_env_runners=True)
        # EnvRunners get the count of all steps, and with it ε, at the end of an iteration
        .reporting(min_sample_timesteps_per_iteration=total // 100, min_time_s_per_iteration=0)
        .debugging(seed=0, log_level="ERROR")
    )
    return rllib_ext.configure(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a short run")
    fast = parser.parse_args().fast
    total, warmup, runners = (400, 200, 0) if fast else (20_000, 2_000, 4)
    # Each remote EnvRunner requests one CPU; without enough of them Ray waits for ever.
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    algorithm = config_of(total, warmup, runners).build_algo()
    print("env_steps  updates  mean return of each task / 5:", *TASKS)
    steps = 0
    for tenth in range(1, 11):
        while steps < tenth * total / 10:
            result = algorithm.train()
            steps = result["env_runners"]["num_env_steps_sampled_lifetime"]
        learned = result.get("learners", {}).get("default_policy", {}).get("num_module_steps_trained_lifetime", 0)
        tasks = result.get("replay_buffer", {}).get("tasks", {})
        progress = "".join(f"{tasks.get(task, {}).get('progress', float('nan')):7.2f}" for task in TASKS)
        print(f"{steps:9.0f}  {learned / 64:7.0f}  {progress}", flush=True)
    replay = algorithm.local_replay_buffer.replay
    print("rows of each task:", {task: len(replay.table(task)) for task in TASKS})
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
