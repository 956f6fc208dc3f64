# SPDX-License-Identifier: Apache-2.0
"""When targets move, and what regularization and entropy of SAC are; test_torchrl_losses has the updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from lightning_replay.agents import DQN, SAC, TD3, OffPolicyAgent
from tests.unit.agents.toys import fit

# fitted without a data module here
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES = {"observation_size": 3, "action_low": [-2.0, 0.0], "action_high": [2.0, 3.0], "hidden_sizes": (8, 5)}


def make_batch(size: int = 16) -> TensorDict:
    """Every fourth row is terminal, every fifth truncated."""
    terminated, truncated = (torch.arange(size).remainder(n).eq(0).unsqueeze(-1) for n in (4, 5))
    low, high = torch.tensor(SIZES["action_low"]), torch.tensor(SIZES["action_high"])
    following = {"observation": torch.randn(size, 3), "reward": torch.randn(size, 1), "done": terminated | truncated}
    following |= {"terminated": terminated, "truncated": truncated}
    action = low + (high - low) * torch.rand(size, 2)
    columns = {"observation": torch.randn(size, 3), "action": action, "next": TensorDict(following, [size])}
    return TensorDict(columns, [size])


def targets_of(agent: OffPolicyAgent) -> list[torch.Tensor]:
    targets = {TD3: ("target_actor", "target_critics"), SAC: ("target_critics",), DQN: ("target_network",)}[type(agent)]
    return [value.data for name in targets for value in getattr(agent, name).parameters()]


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        #                                            update  1    2    3    4
        (TD3(**SIZES, policy_delay=2, target_update_rate=0.5), [8.0, 4.0, 4.0, 2.0]),
        (TD3(**SIZES, policy_delay=3, target_update_rate=0.5), [8.0, 8.0, 4.0, 4.0]),
        (TD3(**SIZES, policy_delay=1, target_update_rate=0.5), [4.0, 2.0, 1.0, 0.5]),
        (SAC(**SIZES, target_update_rate=0.5), [4.0, 2.0, 1.0, 0.5]),
        (DQN(observation_size=3, num_actions=4, target_update_rate=0.5), [4.0, 2.0, 1.0, 0.5]),
    ],
    ids=["td3", "td3-delay-3", "td3-delay-1", "sac", "dqn"],
)
def test_targets_move_with_policy_updates_of_td3_and_with_every_update_of_the_others(agent, expected, tmp_path) -> None:
    for name in ("actor_learning_rate", "critic_learning_rate", "learning_rate", "entropy_learning_rate"):
        if name in agent.hparams:
            agent.hparams[name] = 0.0
    for parameter in agent.parameters():
        parameter.data.zero_()
    for target in targets_of(agent):
        target.fill_(8.0)

    def read(agent: OffPolicyAgent) -> set[float]:
        return {value for target in targets_of(agent) for value in target.unique().tolist()}

    batches = [make_batch() for _ in range(4)]
    if isinstance(agent, DQN):
        batches = [batch.set("action", torch.randint(4, (16,))) for batch in batches]
    _, record = fit(agent, batches, tmp_path, look=read)
    assert record.seen == [{value} for value in expected]


def test_actor_regularization_adds_coefficient_times_weight_to_the_gradients_of_weights(tmp_path: Path) -> None:
    agent = SAC(observation_size=1, action_low=[-1.0], action_high=[1.0], hidden_sizes=(1,), actor_regularization=0.5)
    weight, bias, last_weight, last_bias = agent.actor.parameters()
    values = {weight: [[3.0]], bias: [-1.0], last_weight: [[1.0], [-2.0]], last_bias: [0.0, 0.0]}
    for parameter, value in values.items():
        parameter.data.copy_(torch.tensor(value))
    # observed is 0 and the hidden unit is off, so that the weights have no other gradient: the penalty's 0.5 / 2 * 14
    batch = make_batch().select("next").set("observation", torch.zeros(16, 1)).set("action", torch.zeros(16, 1))
    batch["next", "observation"] = torch.zeros(16, 1)
    fit(agent, [batch], tmp_path)
    torch.testing.assert_close(weight.grad, torch.tensor([[1.5]]))
    torch.testing.assert_close(last_weight.grad, torch.tensor([[0.5], [-1.0]]))
    assert bias.grad == 0.0
    # Adam's first step is the learning rate towards zero
    torch.testing.assert_close(weight.detach(), torch.tensor([[3.0 - 3e-4]]))
    torch.testing.assert_close(last_weight.detach(), torch.tensor([[1.0 - 3e-4], [-2.0 + 3e-4]]))


def test_entropy_of_sac_is_that_of_actions_scaled_to_one() -> None:
    densities = []
    for bound in (1.0, 0.4):
        torch.manual_seed(0)
        agent = SAC(observation_size=3, action_low=[-bound] * 2, action_high=[bound] * 2)
        torch.manual_seed(1)
        densities.append(agent.draw(torch.randn(50, 3))[1])
        assert agent.target_entropy == -2.0
    torch.testing.assert_close(*densities)
