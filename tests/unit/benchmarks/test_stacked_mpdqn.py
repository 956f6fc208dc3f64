# SPDX-License-Identifier: Apache-2.0
"""MP-DQN of several seeds in one process learns what the library's MP-DQN learns, and chooses the same actions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_replay.agents import MPDQN
from tests.benchmarks.learning.learners.stacked_mpdqn import StackedMPDQN

OBSERVATION, BATCH, UPDATES = 6, 32, 6
LOW, HIGH = np.array([0, -180, -180, 0, -180], np.float32), np.array([100, 180, 180, 100, 180], np.float32)
OPTIONS = {
    "parameter_sizes": [2, 1, 2],
    "hidden_sizes": (16, 8),
    "value_learning_rate": 1e-2,
    "parameter_learning_rate": 3e-3,
    "discount": 0.9,
    "target_update_rate": 0.2,
    "target_high": 5.0,
    "gradient_clip": 0.5,
}


def batches(runs: int, has_discount: bool) -> list[TensorDict]:
    size = [runs, BATCH]
    made = []
    for _ in range(UPDATES):
        following = {
            "observation": torch.randn(*size, OBSERVATION),
            "reward": 5.0 * (torch.rand(*size, 1) < 0.3),
            "terminated": torch.rand(*size, 1) < 0.2,
        }
        parameters = torch.from_numpy(LOW) + torch.rand(*size, 5) * torch.from_numpy(HIGH - LOW)
        action = {"discrete": torch.randint(3, size), "parameters": parameters}
        columns = {"observation": torch.randn(*size, OBSERVATION), "action": action, "next": following}
        if has_discount:
            columns["steps_to_next_obs"] = torch.randint(1, 4, (*size, 1))
            columns["discount"] = 0.9 ** columns["steps_to_next_obs"]
        made.append(TensorDict(columns, size))
    return made


def agent_with(stacked: StackedMPDQN, run: int) -> MPDQN:
    """Returns the library's agent with the weights of one run."""
    agent = MPDQN(OBSERVATION, parameter_low=LOW.tolist(), parameter_high=HIGH.tolist(), target_low=0.0, **OPTIONS)
    with torch.no_grad():
        for own, network in ((agent.value_network, stacked.values), (agent.parameter_network, stacked.parameterizer)):
            for parameter, source in zip(own.parameters(), network, strict=True):
                parameter.copy_(source[run].T.squeeze(-1))
    agent.target_value_network.load_state_dict(agent.value_network.state_dict())
    agent.target_parameter_network.load_state_dict(agent.parameter_network.state_dict())
    return agent


def networks_of(agent: MPDQN) -> list[torch.Tensor]:
    networks = agent.value_network, agent.parameter_network, agent.target_value_network, agent.target_parameter_network
    return [parameter for network in networks for parameter in network.parameters()]


def large(stacked: StackedMPDQN) -> StackedMPDQN:
    """Makes outputs large, so that parameters reach their bounds and targets theirs."""
    with torch.no_grad():
        for network in (stacked.values, stacked.parameterizer):
            network[4].mul_(100.0)
        stacked.target_values.load_state_dict(stacked.values.state_dict())
        stacked.target_parameterizer.load_state_dict(stacked.parameterizer.state_dict())
    return stacked


@pytest.mark.parametrize("has_discount", [False, True])
def test_a_run_learns_what_the_agent_learns(has_discount: bool) -> None:
    torch.manual_seed(0)
    stacked = large(StackedMPDQN(OBSERVATION, parameter_low=LOW, parameter_high=HIGH, seeds=(4, 9), **OPTIONS))
    run, given = 1, batches(2, has_discount)
    agent = agent_with(stacked, run)
    optimizers = agent.configure_optimizers()
    for batch in given:
        td_error = stacked.learn(batch)
        value_loss, parameter_loss, expected = agent.losses(batch[run])
        for optimizer in optimizers:
            optimizer.zero_grad()
        (value_loss + parameter_loss).backward()
        agent.clip_gradients_of_networks()
        for optimizer in optimizers:
            optimizer.step()
        agent.update_targets()
        torch.testing.assert_close(td_error[run], expected, atol=1e-4, rtol=1e-4)
    ours = [*stacked.values, *stacked.parameterizer, *stacked.target_values, *stacked.target_parameterizer]
    for parameter, learned in zip(networks_of(agent), ours, strict=True):
        torch.testing.assert_close(parameter, learned[run].T.squeeze(-1), atol=1e-4, rtol=1e-3)


def test_a_run_acts_as_the_agent_acts() -> None:
    torch.manual_seed(0)
    stacked = large(StackedMPDQN(OBSERVATION, parameter_low=LOW, parameter_high=HIGH, seeds=(4, 9), **OPTIONS))
    observation = torch.randn(2, 50, OBSERVATION)
    discrete, parameters = stacked.act(observation)
    for run in range(2):
        expected, joint = agent_with(stacked, run).act(observation[run], explore=False)
        assert torch.equal(discrete[run], expected) and len(expected.unique()) > 1
        torch.testing.assert_close(parameters[run], joint, atol=1e-3, rtol=1e-4)
        assert (joint == torch.from_numpy(HIGH)).any() and (joint < torch.from_numpy(HIGH)).any()


def test_learning_rates_are_scaled_together() -> None:
    still = StackedMPDQN(OBSERVATION, parameter_low=LOW, parameter_high=HIGH, seeds=(4,), **OPTIONS)
    still.scale_learning_rates(0.0)
    before = [parameter.clone() for parameter in still.parameters()]
    still.learn(batches(1, False)[0])
    assert all(torch.equal(old, new) for old, new in zip(before, still.parameters(), strict=True))
    half = StackedMPDQN(OBSERVATION, parameter_low=LOW, parameter_high=HIGH, seeds=(4,), **OPTIONS)
    half.scale_learning_rates(0.5)
    half.learn(batches(1, False)[0])
    # Adam's first step is the learning rate long
    steps = [(new - old).abs().max().item() for old, new in zip(before, half.parameters(), strict=True)]
    assert max(steps[:6]) == pytest.approx(0.5 * OPTIONS["value_learning_rate"], rel=1e-3)
    assert max(steps[6:12]) == pytest.approx(0.5 * OPTIONS["parameter_learning_rate"], rel=1e-3)
