# SPDX-License-Identifier: Apache-2.0
"""SAC of several seeds in one process learns what the library's SAC learns, and no run changes another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from lightning_replay.agents import SAC
from tests.benchmarks.learning.learners.stacked_sac import StackedSAC
from tests.unit.benchmarks.stacked_batches import continuous_batches, weights_of

OBSERVATION, ACTION, BATCH, UPDATES = 3, 2, 16, 5
RATE = 1e-2


def batches(runs: int, is_weighted: bool = False) -> TensorDict:
    return continuous_batches(runs, UPDATES, BATCH, (OBSERVATION, ACTION), is_weighted)


def both(stacked: torch.nn.ParameterList, run: int, runs: int) -> list[torch.Tensor]:
    return [torch.stack(pair) for pair in zip(weights_of(stacked, run), weights_of(stacked, runs + run), strict=True)]


class Alone:
    """The library's SAC with the noise that is given, its optimisers stepped directly."""

    def __init__(self, stacked: StackedSAC, run: int, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
        rates = {f"{name}_learning_rate": RATE for name in ("actor", "critic", "entropy")}
        self.agent = SAC(OBSERVATION, [-1.0] * ACTION, [1.0] * ACTION, (8, 8), **rates, target_update_rate=0.1)
        with torch.no_grad():
            for parameter, source in zip(self.agent.actor.parameters(), weights_of(stacked.policy, run), strict=True):
                parameter.copy_(source)
            critics = self.agent.critics
            for parameter, source in zip(critics.parameters(), both(stacked.critics, run, runs), strict=True):
                parameter.copy_(source)
            self.agent.target_critics.load_state_dict(critics.state_dict())
        optimizers = self.agent.configure_optimizers()
        monkeypatch.setattr(self.agent, "critic_and_other_optimizers", lambda: (optimizers[0], optimizers[1:]))
        monkeypatch.setattr(self.agent, "descend", _descend, raising=True)
        self.noise: list[torch.Tensor] = []
        monkeypatch.setattr(torch, "randn_like", lambda mean: self.noise.pop(0))

    def learn(self, batch: TensorDict, noise: torch.Tensor) -> torch.Tensor:
        self.noise = list(noise)
        return self.agent.update(batch)["td_error"]


def _descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_run_learns_what_the_agent_learns(is_weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = StackedSAC(OBSERVATION, ACTION, (4, 9), (8, 8), RATE, target_update_rate=0.1)
    run = 1
    noise = torch.randn(UPDATES, 2, BATCH, ACTION, generator=torch.Generator().manual_seed(9))
    alone = Alone(stacked, run, 2, monkeypatch)
    given = batches(2, is_weighted)
    td_errors = stacked.learn(given)
    for batch, drawn, errors in zip(given[run].unbind(0), noise, td_errors[run], strict=True):
        torch.testing.assert_close(alone.learn(batch, drawn), errors, atol=1e-4, rtol=1e-4)
    agent, close = alone.agent, {"atol": 1e-5, "rtol": 1e-4}
    for parameter, learned in zip(agent.actor.parameters(), weights_of(stacked.policy, run), strict=True):
        torch.testing.assert_close(parameter, learned.to(parameter.dtype), **close)
    for networks, critics in ((stacked.critics, agent.critics), (stacked.target_critics, agent.target_critics)):
        for parameter, learned in zip(critics.parameters(), both(networks, run, 2), strict=True):
            torch.testing.assert_close(parameter, learned.to(parameter.dtype), **close)
    torch.testing.assert_close(agent.log_alpha.detach(), stacked.log_alpha[run].detach().reshape(()), **close)


def test_actions_are_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = StackedSAC(OBSERVATION, ACTION, (4, 9), (8, 8), RATE)
    alone = Alone(stacked, 0, 2, monkeypatch)
    observation = torch.randn(2, 6, OBSERVATION)
    torch.testing.assert_close(alone.agent.act(observation[0], explore=False), stacked.act(observation, False)[0])
    alone.noise = [torch.randn(6, ACTION, generator=torch.Generator().manual_seed(4))]
    torch.testing.assert_close(alone.agent.act(observation[0], explore=True), stacked.act(observation, True)[0])


def test_a_run_is_the_same_beside_others() -> None:
    together, single = (StackedSAC(OBSERVATION, ACTION, seeds, (8, 8), RATE) for seeds in ((3, 5), (5,)))
    given = batches(2)
    torch.testing.assert_close(together.learn(given)[1], single.learn(given[1:])[0], atol=1e-5, rtol=1e-4)
    for ours, theirs in zip(weights_of(together.policy, 1), weights_of(single.policy, 0), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert together.log_alpha[0] != together.log_alpha[1]


def test_it_goes_on_from_a_save_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole, resumed = (StackedSAC(OBSERVATION, ACTION, (3, 5), (8, 8), RATE) for _ in range(2))
    whole.learn(batches(2))
    whole.save(tmp_path / "agent.pt")
    resumed.load(tmp_path / "agent.pt")
    given = batches(2)
    assert torch.equal(whole.learn(given), resumed.learn(given))
    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), resumed.parameters(), strict=True))
