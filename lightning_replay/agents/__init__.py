# SPDX-License-Identifier: Apache-2.0
"""LightningModules that learn from replayed batches, or from rollouts of chosen levels."""

from lightning_replay.agents.agent import OffPolicyAgent
from lightning_replay.agents.continuous import SAC, TD3
from lightning_replay.agents.dqn import DQN, Rainbow
from lightning_replay.agents.mpdqn import MPDQN
from lightning_replay.agents.offline import CQL, IQL
from lightning_replay.agents.ppo import PPO
from lightning_replay.agents.recurrent import RecurrentDQN

__all__ = ["CQL", "DQN", "IQL", "MPDQN", "PPO", "SAC", "TD3", "OffPolicyAgent", "Rainbow", "RecurrentDQN"]
