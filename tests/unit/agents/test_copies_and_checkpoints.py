# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of earlier versions go on as they would have then; copies of agents learn on their own."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import gymnasium
import lightning as L
import pytest
import torch
from tensordict import TensorDict

import lightning_replay.agents
from lightning_replay.agents import DQN, SAC, TD3
from lightning_replay.agents.dqn import ScalarValueLoss
from lightning_replay.agents.networks import QNetwork

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "agents"

# fitted without a data module here
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Batches:
    """A train loader of given batches."""

    def __init__(self, batches: list[TensorDict]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        return iter([batch.clone() for batch in self.batches])


def fit(agent: L.LightningModule, batches: list[TensorDict], epochs: int, directory: Path, **given: Any) -> L.Trainer:
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=epochs, enable_model_summary=False, default_root_dir=directory, **options)
    trainer.fit(agent, Batches(batches), **given)
    return trainer


@pytest.mark.parametrize("name", ["DQN", "TD3", "SAC", "MPDQN", "PPO"])
def test_a_checkpoint_of_the_version_with_torchrl_losses_continues_as_it_did(name: str, tmp_path: Path) -> None:
    """The file holds options, four batches, the checkpoint after them and the state after these batches once more."""
    saved = torch.load(FIXTURES / f"{name}.pt", weights_only=True)
    rows = [2, 3] if name == "PPO" else [4]
    batches = [TensorDict(columns, rows) for columns in saved["batches"]]
    torch.save(saved["checkpoint"], tmp_path / "agent.ckpt")
    agent = getattr(lightning_replay.agents, name)(**saved["options"])
    before = saved["checkpoint"]["state_dict"]
    assert [*agent.state_dict()] == [*before]
    torch.manual_seed(2)
    trainer = fit(agent, batches, 2, tmp_path, ckpt_path=tmp_path / "agent.ckpt")
    assert trainer.global_step == 8
    for key, expected in saved["state_dict"].items():
        torch.testing.assert_close(agent.state_dict()[key], expected, rtol=0, atol=1e-5)
    moved = [key for key, value in before.items() if not torch.allclose(value, saved["state_dict"][key], atol=1e-4)]
    assert len(moved) >= 4
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    ours, theirs = (torch.load(tmp_path / file, weights_only=True) for file in ("again.ckpt", "agent.ckpt"))
    assert [*ours] == [*theirs]
    for optimizer, expected in zip(ours["optimizer_states"], theirs["optimizer_states"], strict=True):
        assert optimizer["param_groups"] == expected["param_groups"]
        shapes = [
            [{key: part.shape for key, part in parts.items()} for parts in state["state"].values()]
            for state in (optimizer, expected)
        ]
        assert shapes[0] == shapes[1]


SIZES = {"observation_size": 3, "action_low": [-2.0], "action_high": [1.0], "hidden_sizes": (8,)}
AGENTS = [
    pytest.param(lambda: DQN(3, 2, hidden_sizes=(8,)), id="dqn"),
    pytest.param(lambda: DQN(3, 2, hidden_sizes=(8,), conflict_aversion=0.5), id="dqn-averse"),
    pytest.param(lambda: TD3(**SIZES), id="td3"),
    pytest.param(lambda: SAC(**SIZES), id="sac"),
]


def make_batch(agent: L.LightningModule, size: int = 8) -> TensorDict:
    action = torch.randint(2, (size,)) if isinstance(agent, DQN) else torch.rand(size, 1)
    flags = torch.zeros(size, 1, dtype=torch.bool)
    following = {"observation": torch.randn(size, 3), "reward": torch.randn(size, 1), "terminated": flags}
    columns = {"observation": torch.randn(size, 3), "action": action, "next": following | {"done": flags}}
    return TensorDict(columns | {"table": torch.arange(size) % 2}, [size])


@pytest.mark.parametrize("make", AGENTS)
def test_a_copy_learns_the_same_and_alone(make, tmp_path: Path) -> None:
    agent = make()
    batches = [make_batch(agent) for _ in range(4)]
    observation = torch.randn(9, 3)
    fit(agent, batches, 1, tmp_path)
    before = {key: value.clone() for key, value in agent.state_dict().items()}
    actions = agent.act(observation, explore=False)
    copied = copy.deepcopy(agent)
    assert torch.equal(copied.act(observation, explore=False), actions)
    torch.manual_seed(1)
    fit(copied, batches, 1, tmp_path)
    for key, value in agent.state_dict().items():
        assert torch.equal(value, before[key])
    torch.manual_seed(1)
    fit(agent, batches, 1, tmp_path)
    for key, value in agent.state_dict().items():
        torch.testing.assert_close(copied.state_dict()[key], value)
    assert torch.equal(copied.act(observation, explore=False), agent.act(observation, explore=False))
    assert any(not torch.equal(value, before[key]) for key, value in agent.state_dict().items())


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
    assert agent.target_layers[0][0].dtype == torch.float64
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(1.0)
    before = agent.target_layers[0][0].clone()
    step()
    rate = agent.hparams["target_update_rate"]
    found = agent.state_dict()
    name = next(key for key in found if "target_" in key and "value" in key and key.endswith("0.weight"))
    torch.testing.assert_close(found[name], before + rate)


def test_another_loss_is_learned_from_and_acted_by() -> None:
    agent, other = (DQN(observation_size=4, num_actions=2) for _ in range(2))
    agent.act(torch.zeros(1, 4), explore=False)
    assert agent.target_update is not None and agent.target_layers
    agent.loss = other.loss
    observation = torch.randn(5, 4)
    assert agent.layers[0][0] is other.layers[0][0] and agent.target_layers[0][0] is other.target_layers[0][0]
    assert torch.equal(agent.act(observation, explore=False), other.act(observation, explore=False))
    with torch.no_grad():
        agent.layers[0][0].add_(1.0)
    before = other.target_layers[0][0].clone()
    agent.target_update.step()
    assert not torch.equal(other.target_layers[0][0], before)


class Smooth(DQN):
    """A network with another activation."""

    def build(self) -> None:
        network = QNetwork(4, 2, (8,))
        network.perceptron = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.loss = ScalarValueLoss(network, discount=0.99)


def test_a_network_that_is_no_perceptron_with_relu_is_refused() -> None:
    agent = Smooth(observation_size=4, num_actions=2)
    with pytest.raises(TypeError, match="value_network of the agent's loss has Tanh; this agent computes it as"):
        agent.act(torch.zeros(1, 4), explore=False)


@pytest.mark.parametrize("kind", [TD3, SAC])
def test_agents_with_bounds_in_arrays_are_sent_and_loaded(kind, tmp_path: Path) -> None:
    space = gymnasium.make("Pendulum-v1").action_space
    agent = kind(observation_size=3, action_low=space.low, action_high=space.high, hidden_sizes=(8,))
    assert agent.hparams["action_low"] == agent.hparams_initial["action_low"] == [-2.0]
    received = pickle.loads(pickle.dumps(agent))
    observation = torch.randn(5, 3)
    assert torch.equal(received.act(observation, explore=False), agent.act(observation, explore=False))
