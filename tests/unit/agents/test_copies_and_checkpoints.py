# SPDX-License-Identifier: Apache-2.0
"""Copies of agents learn on their own; resumed runs go on as they would have."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import gymnasium
import lightning as L
import pytest
import torch
from tensordict import TensorDict

from lightning_replay.agents import CQL, DQN, IQL, MPDQN, SAC, TD3
from tests.unit.agents.toys import fit, make_actions, make_rows

# fitted without a data module here
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


SIZES = {"observation_size": 3, "action_low": [-2.0], "action_high": [1.0], "hidden_sizes": (8,)}
AGENTS = [
    pytest.param(lambda: DQN(3, 2, hidden_sizes=(8,)), id="dqn"),
    pytest.param(lambda: DQN(3, 2, hidden_sizes=(8,), conflict_aversion=0.5), id="dqn-averse"),
    pytest.param(lambda: TD3(**SIZES), id="td3"),
    pytest.param(lambda: SAC(**SIZES), id="sac"),
    pytest.param(lambda: SAC(**SIZES, conflict_aversion=0.5), id="sac-averse"),
    pytest.param(lambda: IQL(**SIZES), id="iql"),
    pytest.param(lambda: CQL(**SIZES), id="cql"),
]


def make_batch(agent: L.LightningModule, size: int = 8) -> TensorDict:
    return make_rows(make_actions(agent, size), table=torch.arange(size) % 2)


@pytest.mark.parametrize("make", AGENTS)
def test_a_copy_learns_the_same_and_alone(make, tmp_path: Path) -> None:
    agent = make()
    batches = [make_batch(agent) for _ in range(4)]
    observation = torch.randn(9, 3)
    fit(agent, batches, tmp_path, seed=7)
    before = {key: value.clone() for key, value in agent.state_dict().items()}
    actions = agent.act(observation, explore=False)
    copied = copy.deepcopy(agent)
    assert torch.equal(copied.act(observation, explore=False), actions)
    fit(copied, batches, tmp_path, seed=7)
    for key, value in agent.state_dict().items():
        assert torch.equal(value, before[key])
    fit(agent, batches, tmp_path, seed=7)
    for key, value in agent.state_dict().items():
        torch.testing.assert_close(copied.state_dict()[key], value)
    assert torch.equal(copied.act(observation, explore=False), agent.act(observation, explore=False))
    assert any(not torch.equal(value, before[key]) for key, value in agent.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("make", [*AGENTS, pytest.param(lambda: MPDQN(3, [1, 1], [-1.0, 0.0], [1.0, 2.0]), id="mpdqn")])
def test_a_resumed_run_goes_on_as_one_without_a_break(make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = make()
    torch.manual_seed(0)
    first, resumed = make(), make()
    batches = [make_batch(whole) for _ in range(3)]
    fit(whole, batches, tmp_path, epochs=2, seed=7)
    fit(first, batches, tmp_path, seed=7)[0].save_checkpoint(tmp_path / "agent.ckpt")
    trainer, _ = fit(resumed, batches, tmp_path, ckpt_path=tmp_path / "agent.ckpt", epochs=2, seed=7)
    assert trainer.global_step == 6
    for (name, value), expected in zip(resumed.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name
    assert any(not torch.equal(value, first.state_dict()[name]) for name, value in resumed.state_dict().items())


@pytest.mark.parametrize("make", AGENTS)
def test_what_is_kept_of_the_parameters_follows_moves_and_loaded_states(make) -> None:
    agent, other = make(), make()
    observation = torch.randn(9, 3)
    agent.act(observation, explore=False)
    step = agent.target_update.step
    step()
    agent.load_state_dict(other.state_dict())
    assert torch.equal(agent.act(observation, explore=False), other.act(observation, explore=False))
    agent.double()
    network, target = (
        (agent.network, agent.target_network) if isinstance(agent, DQN) else (agent.critics, agent.target_critics)
    )
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1.0)
    before = [value.clone() for value in target.parameters()]
    step()
    for value, old in zip(target.parameters(), before, strict=True):
        torch.testing.assert_close(value, old + agent.hparams["target_update_rate"])
        assert value.dtype == torch.float64


@pytest.mark.parametrize("kind", [TD3, SAC])
def test_agents_with_bounds_in_arrays_are_sent_and_loaded(kind, tmp_path: Path) -> None:
    space = gymnasium.make("Pendulum-v1").action_space
    agent = kind(observation_size=3, action_low=space.low, action_high=space.high, hidden_sizes=(8,))
    assert agent.hparams["action_low"] == agent.hparams_initial["action_low"] == [-2.0]
    received = pickle.loads(pickle.dumps(agent))
    observation = torch.randn(5, 3)
    assert torch.equal(received.act(observation, explore=False), agent.act(observation, explore=False))


def test_a_checkpoint_without_the_counters_sets_them_back() -> None:
    agent = TD3(**SIZES)
    agent.on_load_checkpoint({"td3_updates": 3})
    assert agent._updates == 3
    agent.on_load_checkpoint({})
    assert agent._updates == 0
