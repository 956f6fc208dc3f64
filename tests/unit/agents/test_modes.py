# SPDX-License-Identifier: Apache-2.0
"""Modules whose outputs depend on the mode are found, wherever they are."""

from __future__ import annotations

from functools import partial

import lightning as L
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import MLP, NoisyLinear

from lightning_replay.agents import DQN, MPDQN, SAC, TD3, Rainbow
from lightning_replay.agents.modes import depends_on_mode


class Reading(nn.Module):
    def forward(self, x):
        return x if self.training else 2 * x


class ReadingByName(nn.Module):
    def forward(self, x):
        return x if getattr(self, "training") else 2 * x  # noqa: B009


class Switching(nn.Module):
    def train(self, mode: bool = True):
        self.factor = 1 if mode else 2
        return super().train(mode)


class Inheriting(Reading):
    pass


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return [x if self.training else 2 * x for _ in range(2)]


def hooked(hook) -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(hook)
    return layer


class Hooks:
    def doubled(self, module, given, found):
        return 2 * found

    def by_mode(self, module, given, found):
        return found if module.training else 2 * found


class Agent(L.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def act(self, observation, explore):
        return self.network(observation).argmax(-1)

    def training_step(self, batch, batch_idx):
        return self.network(batch).mean()


class ActingByMode(Agent):
    def act(self, observation, explore):
        return self.network(observation).argmax(-1) if self.training else None


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten()))


FREE = [
    plain(),
    hooked(lambda module, given, found: 2 * found),
    hooked(Hooks().doubled),
    Agent(plain()),
    MLP(3, 2, num_cells=[4]),
    TensorDictModule(plain(), ["a"], ["b"]),
]
OTHERS = [
    *(nn.Dropout(), nn.BatchNorm1d(3), nn.RReLU(), nn.MultiheadAttention(4, 2), nn.LSTM(3, 4, 2, dropout=0.1)),
    *(Reading(), ReadingByName(), Switching(), Inheriting(), Decorated(), NoisyLinear(3, 2)),
    *(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), nn.utils.spectral_norm(nn.Linear(3, 3))),
    hooked(lambda module, given, found: found if module.training else 2 * found),
    hooked(partial(lambda module, given, found: found if module.training else 2 * found)),
    hooked(Hooks().by_mode),
    torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3))),
    type("Built", (nn.Linear,), {})(3, 3),
]


@pytest.mark.parametrize("module", FREE, ids=lambda module: type(module).__name__)
def test_modules_without_such_layers_do_not_depend_on_it(module) -> None:
    assert not depends_on_mode(module)


@pytest.mark.parametrize("module", OTHERS, ids=lambda module: type(module).__name__)
def test_a_layer_that_reads_the_mode_is_found_at_any_depth(module) -> None:
    for found in (module, nn.Sequential(plain(), nn.ModuleDict({"part": module})), Agent(nn.Sequential(module))):
        assert depends_on_mode(found)


def test_an_agent_that_acts_by_the_mode_is_found() -> None:
    assert depends_on_mode(ActingByMode(plain()))


@pytest.mark.parametrize(
    "agent",
    [
        DQN(4, 2),
        TD3(3, [-1.0], [1.0]),
        SAC(3, [-1.0], [1.0]),
        Rainbow((4, 36, 36), 255.0, 2),
        MPDQN(4, [1], [-1.0], [1.0]),
    ],
    ids=lambda agent: type(agent).__name__,
)
def test_the_agents_replayed_transitions_are_for_act_the_same_in_both_modes(agent) -> None:
    assert not depends_on_mode(agent)
