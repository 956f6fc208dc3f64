# SPDX-License-Identifier: Apache-2.0
"""Steps that tianshou has collected become rows of a replay, and its network learns from a batch of them."""

from __future__ import annotations

import gymnasium
import torch
from tensordict import TensorDict
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.utils.net.common import Net

from lightning_replay import recipes

STEPS = 400


def main() -> None:
    envs = DummyVectorEnv([lambda: gymnasium.make("CartPole-v1") for _ in range(4)])
    net = Net(state_shape=(4,), action_shape=(2,), hidden_sizes=(32,))
    policy = DiscreteQLearningPolicy(model=net, action_space=envs.action_space[0])
    collected = VectorReplayBuffer(STEPS, buffer_num=4)
    collector = Collector(policy, envs, collected)
    collector.reset()
    collector.collect(n_step=STEPS, random=True)

    steps, _ = collected.sample(0)  # all of them, in the order of their environments
    ends = {name: torch.as_tensor(getattr(steps, name)) for name in ("terminated", "truncated", "done")}
    after = {"observation": torch.as_tensor(steps.obs_next), "reward": torch.as_tensor(steps.rew).float(), **ends}
    rows = {"observation": torch.as_tensor(steps.obs), "action": torch.as_tensor(steps.act), "next": after}
    replay = recipes.prioritized(capacity=1_000, batch_size=32, seed=0)
    replay.extend(TensorDict(rows, [STEPS]))

    batch = replay.sample()
    values = net(batch["observation"])[0].gather(-1, batch["action"].reshape(-1, 1)).flatten()
    td_error = batch["next", "reward"].flatten() - values
    (batch["priority_weight"] * td_error.square()).mean().backward()
    replay.update_priority(batch, td_error.detach())
    assert len(replay) == STEPS


if __name__ == "__main__":
    main()
