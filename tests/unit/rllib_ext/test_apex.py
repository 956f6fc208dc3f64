# SPDX-License-Identifier: Apache-2.0
"""Ape-X without an algorithm: the rate limiter and the epsilons by hand, and refused options."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_replay.sharded.rate_limiter import RateLimiter
from rllib_ext.apex import ApexDQN, ApexDQNConfig


def test_the_ratio_is_held_in_both_directions() -> None:
    # Rows held before the first draw: 10, not counted. Each of 4 further rows calls for 2 draws: 8.
    #
    #  inserted   10        14            18
    #  balance     0  -4 -8  0 (may draw)  8 (no further rows)  4 (4 + 8 > 8: none yet)  0 (now)
    limiter = RateLimiter(2.0, min_size_to_sample=10, error_buffer=8, batch_size=4, insert_size=4)
    assert not limiter.may_sample(size=0) and limiter.may_insert(size=0, pending=0)
    limiter.insert(10, size=0)
    assert limiter.balance == 0
    limiter.sample()
    limiter.sample()
    assert limiter.balance == -8 and not limiter.may_sample(size=10) and limiter.may_insert(size=10, pending=0)
    limiter.insert(4, size=10)
    assert limiter.balance == 0 and limiter.may_sample(size=14) and limiter.may_insert(size=14, pending=0)
    limiter.insert(4, size=14)
    assert limiter.balance == 8 and not limiter.may_insert(size=18, pending=0)
    limiter.sample()
    assert limiter.balance == 4 and not limiter.may_insert(size=18, pending=0)
    limiter.sample()
    assert limiter.balance == 0 and limiter.may_insert(size=18, pending=0)
    assert limiter.stats() == {
        "num_rows_inserted_lifetime": 18,
        "num_rows_sampled_lifetime": 16,
        "samples_per_insert": 2.0,
        "balance": 0.0,
    }


def apex(**options: Any) -> ApexDQNConfig:
    return ApexDQNConfig().environment("CartPole-v1").training(**options)


def test_defaults_of_the_paper_and_of_the_loop() -> None:
    config = apex()
    config.validate()
    assert config.algo_class is ApexDQN and isinstance(ApexDQN.get_default_config(), ApexDQNConfig)
    assert (config.epsilon, config.epsilon_exponent, config.n_step, config.total_train_batch_size) == (0.4, 7.0, 3, 512)
    assert config.samples_per_insert is None and config.new_rate_limiter().samples_per_insert is None


def test_the_error_buffer_holds_a_batch_and_all_requests_in_flight() -> None:
    config = apex(samples_per_insert=2.0, train_batch_size_per_learner=30)
    config.env_runners(num_env_runners=3, num_envs_per_env_runner=2, rollout_fragment_length=10)
    config.validate()
    assert config.new_rate_limiter().error_buffer == 30 + 2 * (3 * 2 * 20)  # above 0.1 * 2 * 1000
    config.training(num_steps_sampled_before_learning_starts=10_000)
    assert config.new_rate_limiter().error_buffer == 0.1 * 2 * 10_000
    assert config.copy().training(error_buffer=40).new_rate_limiter().error_buffer == 40
    config.env_runners(batch_mode="complete_episodes")
    assert config.rows_per_request == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": [(0, 1.0), (100, 0.1)]}, "every environment of ApexDQN keeps its own epsilon"),
        ({"epsilon": 1.5}, "epsilon is 1.5"),
        ({"samples_per_insert": 0}, "samples_per_insert is 0"),
        ({"samples_per_insert": 1.0, "error_buffer": 5}, "error_buffer is 5; a draw takes 512 rows"),
        ({"training_intensity": 4.0}, r"samples_per_insert=4\.0"),
        ({"replay_buffer_config": {"capacity": 900}}, "is 1000, and the buffer's capacity is 900"),
    ],
)
def test_a_config_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        apex(**options).validate()
