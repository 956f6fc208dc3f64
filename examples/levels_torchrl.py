# SPDX-License-Identifier: Apache-2.0
"""Level replay in TorchRL's PPO: its collector, GAE and clipped loss, and one line that scores the levels.

python examples/levels_torchrl.py [--fast]

Prints the held-out return with uniform levels and with level replay.
"""

from __future__ import annotations

from functools import partial

import torch
from locks import DISCOUNT, ENVS, GAE_LAMBDA, LOCKS, ROLLOUT, ActorCritic, Lock, compare, held_out_return
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import Unbounded
from torchrl.envs import GymWrapper, SerialEnv
from torchrl.envs.libs.gym import default_info_dict_reader
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from lightning_replay.levels import LevelSelector, update_rollout
from lightning_replay.levels.environments import LevelWrapper


class LevelReader(default_info_dict_reader):
    def __init__(self) -> None:
        super().__init__(["level_id"], spec={"level_id": Unbounded((), dtype=torch.int64)})

    def __call__(self, info_dict: dict, tensordict: TensorDict) -> TensorDict:
        return tensordict.set("level_id", torch.tensor(info_dict["level_id"]))  # TorchRL's own reads arrays


def train(levels: LevelSelector, total_steps: int) -> float:
    def make(actor: int) -> GymWrapper:
        plays = LevelWrapper(Lock(), partial(levels.next_level, actor), level_option="level", level_set=LOCKS)
        return GymWrapper(plays, categorical_action_encoding=True).set_info_dict_reader(LevelReader())

    envs = SerialEnv(ENVS, [partial(make, actor) for actor in range(ENVS)])
    model = ActorCritic()
    logits = TensorDictModule(model.actor, in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)
    critic = ValueOperator(model.critic, in_keys=["observation"])
    advantage = GAE(gamma=DISCOUNT, lmbda=GAE_LAMBDA, value_network=critic)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01, critic_coeff=0.5, normalize_advantage=True)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    batch = ENVS * ROLLOUT
    rounds = max(1, total_steps // batch)
    collector = Collector(
        envs, actor, frames_per_batch=batch, total_frames=rounds * batch, auto_register_policy_transforms=False
    )
    for rollout in collector:  # [ENVS, ROLLOUT]
        with torch.no_grad():
            advantage(rollout)  # with state_value and its next, also after the last step of an episode
        update_rollout(levels, rollout, rollout["level_id"])
        steps = rollout.flatten()
        for index in torch.cat([torch.randperm(batch) for _ in range(4)]).split(256):
            losses = loss(steps[index])
            optimizer.zero_grad()
            sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
            torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()
    collector.shutdown()
    return held_out_return(lambda observation: model.actor(observation).softmax(-1))


if __name__ == "__main__":
    compare(train, __doc__)
