# SPDX-License-Identifier: Apache-2.0
"""Ape-X: DQN with asynchronous collection."""

from rllib_ext.apex.algorithm import ApexDQN, ApexDQNConfig
from rllib_ext.apex.rate_limiter import RateLimiter

__all__ = ["ApexDQN", "ApexDQNConfig", "RateLimiter"]
