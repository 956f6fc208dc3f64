# SPDX-License-Identifier: Apache-2.0
"""IQL's expectile and weights, CQL's conservative term, each row by row; test_torchrl_losses has whole updates."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from lightning_replay.agents import CQL, IQL

SIZES = {"observation_size": 3, "action_low": [-2.0, 0.0], "action_high": [2.0, 1.0], "hidden_sizes": (8,)}
ADVANTAGE = torch.tensor([2.0, -2.0, 0.5])


def rows(count: int) -> TensorDict:
    action = torch.rand(count, 2) * torch.tensor([4.0, 1.0]) - torch.tensor([2.0, 0.0])
    following = {"observation": torch.randn(count, 3), "reward": torch.randn(count, 1)}
    following["terminated"] = torch.zeros(count, 1, dtype=torch.bool)
    return TensorDict({"observation": torch.randn(count, 3), "action": action, "next": following}, [count])


def test_an_expectile_weighs_rows_above_the_value_more() -> None:
    agent, batch = IQL(**SIZES, expectile=0.9), rows(3)
    expected = (0.9 * 4.0 + 0.1 * 4.0 + 0.9 * 0.25) / 3
    torch.testing.assert_close(agent.value_loss(batch, ADVANTAGE), torch.tensor(expected))
    batch["priority_weight"] = torch.tensor([1.0, 0.0, 0.5])
    torch.testing.assert_close(agent.value_loss(batch, ADVANTAGE), torch.tensor((3.6 + 0.1125) / 3))


def test_the_policy_imitates_by_advantage_up_to_a_limit() -> None:
    torch.manual_seed(0)
    agent, batch = IQL(**SIZES, inverse_temperature=3.0), rows(3)
    agent.log_deviation.data.copy_(torch.tensor([-1.0, -9.0]))  # the second is at its lowest, -5
    center, half = torch.tensor([0.0, 0.5]), torch.tensor([2.0, 0.5])
    mean, deviation = torch.tanh(agent.actor(batch["observation"])), torch.tensor([math.exp(-1.0), math.exp(-5.0)])
    error = ((batch["action"] - center) / half - mean) / deviation
    density = (-error.square() / 2 - deviation.log() - math.log(2 * math.pi) / 2).sum(-1)
    weight = torch.tensor([100.0, math.exp(-6.0), math.exp(1.5)])  # exp(6) is 403
    torch.testing.assert_close(agent.actor_loss(batch, ADVANTAGE), -(weight * density).mean())


def test_a_dimension_that_cannot_vary_leaves_the_policy_finite() -> None:
    agent, batch = IQL(**(SIZES | {"action_low": [-2.0, 1.0]})), rows(3)
    batch["action"][:, 1] = 1.0
    loss = agent.actor_loss(batch, ADVANTAGE)
    loss.backward()
    assert loss.isfinite() and all(one.grad.isfinite().all() for one in agent.actor.parameters())


def test_actions_are_within_the_bounds() -> None:
    agent = IQL(**SIZES)
    torch.manual_seed(1)
    drawn = agent.act(torch.randn(500, 3), explore=True)
    assert drawn[:, 0].abs().max() == 2.0
    assert (drawn[:, 1].min(), drawn[:, 1].max()) == (0.0, 1.0)
    assert torch.equal(agent.act(torch.zeros(2, 3), explore=False), agent.act(torch.zeros(2, 3), explore=False))


@torch.no_grad()
def test_the_conservative_term_sums_over_all_sampled_actions() -> None:
    torch.manual_seed(2)
    agent, batch, count = CQL(**SIZES, sampled_actions=4), rows(5), 4
    torch.manual_seed(3)
    found = agent.overestimate(batch)
    torch.manual_seed(3)
    low, high = agent.action_low, agent.action_high
    random = low + (high - low) * torch.rand(count, 5, 2)
    drawn = [(random, torch.full((count, 5), 2 * math.log(0.5)))]
    drawn += [agent.draw(states.expand(count, 5, 3)) for states in (batch["observation"], batch["next", "observation"])]
    for row in range(5):
        state = batch["observation"][row]
        for critic in range(2):
            terms = [
                math.exp(
                    float(agent.critics.values(state[None], action[i, row][None])[critic]) - float(density[i, row])
                )
                for action, density in drawn
                for i in range(count)
            ]
            stored = float(agent.critics.values(state[None], batch["action"][row][None])[critic])
            assert float(found[critic, row]) == pytest.approx(math.log(sum(terms)) - stored, abs=1e-5)


def test_conservative_critics_fall_where_no_action_is_stored() -> None:
    torch.manual_seed(4)
    batch = rows(64)
    batch["action"] = torch.tensor([1.0, 0.9]).expand(64, 2).clone()
    gaps = []
    for weight in (0.0, 5.0):
        torch.manual_seed(5)
        agent = CQL(**SIZES, conservative_weight=weight, critic_learning_rate=3e-3)
        optimizer = torch.optim.Adam(agent.critics.parameters(), 3e-3)
        agent.take_gradients = torch.Tensor.backward
        for _ in range(60):
            outputs = agent.update_critics(optimizer, batch)
        stored = (batch["action"], torch.tensor([-1.0, 0.1]).expand(64, 2))
        values = [agent.critics.values(batch["observation"], action).detach().mean() for action in stored]
        gaps.append(float(values[0] - values[1]))
        assert outputs["td_error"].shape == (64,)
    assert gaps[1] > gaps[0] + 1.0


def test_environments_give_sizes() -> None:
    for kind in (IQL, CQL):
        agent = kind.for_env("Pendulum-v1", hidden_sizes=(8,))
        assert agent.hparams["action_high"] == [2.0]
