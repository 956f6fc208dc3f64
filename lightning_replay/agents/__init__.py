# SPDX-License-Identifier: Apache-2.0
"""LightningModules that learn from replayed batches, or from rollouts of chosen levels."""

from lightning_replay.agents.dqn import DQN
from lightning_replay.agents.mpdqn import MPDQN
from lightning_replay.agents.off_policy import OffPolicyAgent
from lightning_replay.agents.ppo import PPO
from lightning_replay.agents.rainbow import Rainbow
from lightning_replay.agents.sac import SAC
from lightning_replay.agents.td3 import TD3

__all__ = ["DQN", "MPDQN", "PPO", "SAC", "TD3", "OffPolicyAgent", "Rainbow"]
