# SPDX-License-Identifier: Apache-2.0
"""Agents with data modules of a user's own: read by the names that the library's data modules declare."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from lightning_replay import recipes
from lightning_replay.agents import DQN, PPO
from lightning_replay.agents.interfaces import (
    acting_agent,
    rollout_agent,
    training_data,
)
from lightning_replay.levels import LevelBuffer
from lightning_replay.levels.scores import L1ValueLoss
from lightning_replay.lit import ReplayDataModule
from lightning_replay.transforms import PotentialShaping
from tests.unit.agents.toys import make_rows
from tests.unit.lit.toys import make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Own(L.LightningDataModule):
    """Draws batches of one replay, without environments."""

    def __init__(self, replay, has_spaces: bool = True) -> None:
        super().__init__()
        self.replay = replay
        self.updated: list[torch.Tensor] = []
        if has_spaces:
            self.observation_space, self.action_space = Box(-1.0, 1.0, (3,)), Discrete(2)

    def train_dataloader(self):
        return iter([self.replay.sample() for _ in range(2)])

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch

    def update_priority(self, batch, td_error, **signals):
        self.updated.append(td_error)


def filled(**options):
    replay = recipes.prioritized(capacity=100, batch_size=4, seed=0, **options)
    replay.extend(make_rows(torch.zeros(20, dtype=torch.int64), trajectory=torch.arange(20)))
    return replay


@pytest.mark.slow
def test_its_spaces_size_the_agent_and_it_gets_the_td_errors(tmp_path) -> None:
    data = Own(filled())
    make_trainer(tmp_path, max_epochs=1).fit(DQN(hidden_sizes=(4,)), datamodule=data)
    assert [td_error.shape for td_error in data.updated] == [(4,), (4,)]


def test_without_spaces_the_sizes_have_to_be_given(tmp_path) -> None:
    with pytest.raises(ValueError, match="DQN was built without observation_size, num_actions; give them"):
        make_trainer(tmp_path, max_epochs=1).fit(DQN(hidden_sizes=(4,)), datamodule=Own(filled(), has_spaces=False))


def test_its_replay_must_discount_like_the_agent(tmp_path) -> None:
    data = Own(filled(n_steps=3, discount=0.9))
    with pytest.raises(ValueError, match="the replay discounts its 3-step returns by 0.9, the agent by 0.99"):
        make_trainer(tmp_path, max_epochs=1).fit(DQN(hidden_sizes=(4,)), datamodule=data)
    data = Own(filled(transform=PotentialShaping(torch.sum, 0.9)))
    with pytest.raises(ValueError, match="the replay discounts its potentials by 0.9, the agent by 0.99; give both"):
        make_trainer(tmp_path, max_epochs=1).fit(DQN(hidden_sizes=(4,)), datamodule=data)


def test_data_modules_of_this_library_are_read_as_they_are(tmp_path) -> None:
    trainer = make_trainer(tmp_path, max_epochs=1)
    assert training_data(trainer) is None
    trainer.datamodule = data = ReplayDataModule("CartPole-v1", filled(), env_steps=20, warmup_steps=10)
    assert training_data(trainer) is data
    assert data.takes_td_errors and data.steps_environments and data.rollout_rows == 0


def test_the_offers_of_agents_are_looked_for_in_one_place() -> None:
    bare, ppo = L.LightningModule(), PPO(observation_shape=(3,), num_actions=2)
    with pytest.raises(TypeError, match=r"LightningModule has no method act\(observation, explore\)"):
        acting_agent(bare)
    with pytest.raises(TypeError, match=r"LightningModule lacks act_with_value\(observation\) or value"):
        rollout_agent(bare)
    assert acting_agent(ppo) is rollout_agent(ppo) is ppo


def test_its_scores_of_levels_must_discount_like_the_agent(tmp_path) -> None:
    data = Own(filled())
    data.levels = LevelBuffer(4, score=L1ValueLoss(discount=0.5))
    agent = PPO(observation_shape=(3,), num_actions=2)
    with pytest.raises(ValueError, match=r"levels.score of the data module has discount 0.5, the agent 0.999"):
        make_trainer(tmp_path, max_epochs=1).fit(agent, datamodule=data)
    data.levels = 4  # a name of the user's own
    assert training_data(agent.trainer).discounting_parts == {"return_normalization": None, "levels.score": None}
