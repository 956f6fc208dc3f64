# SPDX-License-Identifier: Apache-2.0
"""Ape-X: DQN with asynchronous collection."""

from lightning_replay.sharded.rate_limiter import RateLimiter
from rllib_ext.apex.algorithm import ApexDQN, ApexDQNConfig

__all__ = ["ApexDQN", "ApexDQNConfig", "RateLimiter"]
