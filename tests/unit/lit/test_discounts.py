# SPDX-License-Identifier: Apache-2.0
"""A user's own module that discounts by another number than the replay is warned of."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_replay import recipes
from lightning_replay.datasets import fill
from lightning_replay.lit import ReplayDataModule
from lightning_replay.transforms import PotentialShaping
from lightning_replay.transforms.shaping import OneAt
from tests.unit.lit.test_offline import demonstrations
from tests.unit.lit.toys import Tiny, make_trainer


class Attribute(Tiny):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.discount = value


class Gamma(Tiny):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.gamma = value


class Hyperparameter(Tiny):
    def __init__(self, discount: float) -> None:
        super().__init__()
        self.save_hyperparameters()


class Estimator(nn.Module):
    """As TorchRL's value estimators have it."""

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.register_buffer("gamma", torch.tensor(gamma))


class Part(Tiny):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.loss = Estimator(value)


MODULES = {"discount": Attribute, "gamma": Gamma, "discount of hyperparameters": Hyperparameter, "loss.gamma": Part}


def fit(tmp_path: Path, agent: L.LightningModule, **options: Any) -> None:
    replay = fill(recipes.uniform(40, 4, **options), demonstrations())
    make_trainer(tmp_path).fit(agent, datamodule=ReplayDataModule(replay=replay, updates=2))


@pytest.mark.parametrize("name", MODULES)
def test_another_discount_of_a_module_is_reported(tmp_path: Path, name: str) -> None:
    shown = rf"3-step returns by 0.9, and {name.split(' ')[0]} of {MODULES[name].__name__} is 0.99\. Give"
    with pytest.warns(UserWarning, match=shown):
        fit(tmp_path, MODULES[name](0.99), n_steps=3, discount=0.9)


@pytest.mark.parametrize("name", MODULES)
def test_the_same_discount_and_returns_of_one_step_are_not(tmp_path: Path, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", ".*(num_workers|log|hyperparameter).*")
        fit(tmp_path, MODULES[name](0.9), n_steps=3, discount=0.9)
        fit(tmp_path, MODULES[name](0.99))


def test_potentials_are_compared_too(tmp_path: Path) -> None:
    replay = fill(recipes.uniform(40, 4), demonstrations())
    replay.append_transform(PotentialShaping(OneAt([0.0, 0.0], [1.0, 1.0]), discount=0.5))
    with pytest.warns(UserWarning, match=r"potentials by 0.5, and gamma of Gamma is 0.9"):
        make_trainer(tmp_path).fit(Gamma(0.9), datamodule=ReplayDataModule(replay=replay, updates=2))
