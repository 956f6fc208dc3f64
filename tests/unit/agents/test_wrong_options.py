# SPDX-License-Identifier: Apache-2.0
"""Every option of every agent refuses what it is not, by its name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from lightning_replay import agents
from lightning_replay.agents.agent import _CHECKS
from lightning_replay.schedules import Linear
from tests.wrong_options import WrongOption, assert_refused, wrong_options

AGENTS = [agents.DQN, agents.MPDQN, agents.PPO, agents.Rainbow, agents.SAC, agents.TD3]
ANY_SIGN = {"target_entropy", "target_high", "target_low", "value_high", "value_low"}


@pytest.mark.parametrize("agent", AGENTS)
def test_every_option_has_its_check(agent) -> None:
    assert set(inspect.signature(agent.__init__).parameters) - {"self"} <= set(_CHECKS)


def test_every_check_is_that_of_an_option() -> None:
    assert set(_CHECKS) <= {name for agent in AGENTS for name in inspect.signature(agent.__init__).parameters}


@pytest.mark.parametrize(
    "wrong", [one for agent in AGENTS for one in wrong_options(agent, {}, any_sign=ANY_SIGN)], ids=repr
)
def test_is_refused_by_name(wrong: WrongOption) -> None:
    assert_refused(wrong)


@pytest.mark.parametrize(
    ("agent", "options", "error", "message"),
    [
        (agents.DQN, {"hidden_sizes": (64, 2.5)}, TypeError, r"hidden_sizes\[1\] is 2.5; it must be a whole number"),
        (agents.DQN, {"conflict_aversion": Linear(0.5, 1.0, 9)}, ValueError, "conflict_aversion at reading 9 of"),
        (agents.SAC, {"action_low": ["-1"]}, TypeError, r"action_low\[0\] is '-1'; it must be a finite number"),
        (agents.PPO, {"categories": (11, 0)}, ValueError, r"categories\[1\] is 0; it must be a whole number"),
        (agents.Rainbow, {"channels": (32, True)}, TypeError, r"channels\[1\] is True; it must be a whole number"),
    ],
)
def test_sequences_and_ranges(agent, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        agent(**options)
