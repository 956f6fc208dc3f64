# SPDX-License-Identifier: Apache-2.0
"""DQN with TorchRL's parts: two remote collectors fill a sharded replay, this process draws from it.

python examples/torchrl_sharded.py          # 10,000 steps of CartPole, four shards
python examples/torchrl_sharded.py --fast   # a few hundred, two shards, to see it run
"""

from __future__ import annotations

import argparse

import ray
import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors.distributed import RayCollector
from torchrl.envs import GymEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from lightning_replay.sharded import ShardedReplay

FRAMES_PER_BATCH = 50


def make_environment() -> GymEnv:
    return GymEnv("CartPole-v1", device="cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a short run")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads slow networks this small down
    num_shards, steps, warmup_steps = (2, 400, 100) if options.fast else (4, 10_000, 500)
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)

    spec = make_environment().action_spec
    actor = QValueActor(MLP(in_features=4, out_features=2, num_cells=[64, 64]), in_keys=["observation"], spec=spec)
    explore = EGreedyModule(spec, eps_init=0.2, eps_end=0.2)
    loss_module = DQNLoss(actor, action_space=spec, delay_value=True, double_dqn=True)
    targets = SoftUpdate(loss_module, tau=0.01)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)

    replay = ShardedReplay("prioritized", num_shards, capacity=50_000, batch_size=64, num_cpus_per_shard=0.5, seed=0)
    policy = TensorDictSequential(actor, explore)
    collector = RayCollector(
        [make_environment] * 2,
        policy,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=steps,
        replay_buffer=replay,
        remote_configs={"num_cpus": 1},
    )
    collector.update_policy_weights_(policy)
    print("env_steps  stored  loss")
    for batches, _ in enumerate(collector, start=1):  # None: the rows have gone to the shards
        if (env_steps := batches * FRAMES_PER_BATCH) < warmup_steps:
            continue
        for _ in range(FRAMES_PER_BATCH // 2):
            batch = replay.sample()
            loss = loss_module(batch)["loss"]  # which has the weights, and writes "td_error"
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            targets.step()
            replay.update_tensordict_priority(batch)
        collector.update_policy_weights_(policy)
        if env_steps % 1_000 == 0 or options.fast:
            print(f"{env_steps:9d}  {len(replay):6d}  {loss.item():6.4f}", flush=True)
    stats = replay.stats()
    print(f"{stats['num_rows']} rows in {stats['num_shards']} shards: {stats['rows']}")
    collector.shutdown(shutdown_ray=False)
    replay.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
