# SPDX-License-Identifier: Apache-2.0
"""TD3 and SAC of several seeds in one process learn what the library's learn, and no run changes another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_replay import recipes
from lightning_replay.agents import SAC, TD3
from tests.benchmarks.learning.learners.stacked_runs import StackedRuns
from tests.benchmarks.learning.learners.stacked_sac import StackedSAC
from tests.benchmarks.learning.learners.stacked_td3 import StackedTD3
from tests.unit.benchmarks.stacked_batches import PlainBatches, continuous_batches, weights_of

OBSERVATION, ACTION, BATCH, UPDATES = 3, 2, 16, 5
OPTIONS = {"hidden_sizes": (8, 8), "target_update_rate": 0.1, "target_noise": 0.0}


def batches(runs: int, is_weighted: bool = False) -> TensorDict:
    return continuous_batches(runs, UPDATES, BATCH, (OBSERVATION, ACTION), is_weighted)


def both(stacked: torch.nn.ParameterList, run: int, runs: int) -> list[torch.Tensor]:
    """The weights of both critics of a run."""
    return [torch.stack(pair) for pair in zip(weights_of(stacked, run), weights_of(stacked, runs + run), strict=True)]


def assert_learned(agent: Any, stacked: Any, run: int) -> None:
    for parameter, learned in zip(agent.actor.parameters(), weights_of(stacked.policy, run), strict=True):
        torch.testing.assert_close(parameter, learned.to(parameter.dtype), atol=1e-5, rtol=1e-4)
    for networks, critics in ((stacked.critics, agent.critics), (stacked.target_critics, agent.target_critics)):
        for parameter, learned in zip(critics.parameters(), both(networks, run, 2), strict=True):
            torch.testing.assert_close(parameter, learned.to(parameter.dtype), atol=1e-5, rtol=1e-4)


def fit(agent: L.LightningModule, steps: list[TensorDict]) -> list[torch.Tensor]:
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    td_errors: list[torch.Tensor] = []

    class Collect(L.Callback):
        def on_train_batch_end(self, trainer, agent, outputs, *_) -> None:
            td_errors.append(outputs["td_error"].clone())

    trainer = L.Trainer(callbacks=[Collect()], max_epochs=1, accelerator="cpu", enable_model_summary=False, **options)
    trainer.fit(agent, train_dataloaders=PlainBatches(steps))
    return td_errors


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")  # played for a data module alone
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_run_learns_what_the_agent_learns(is_weighted: bool, layer_norm: bool) -> None:
    options = {**OPTIONS, "layer_norm": layer_norm}
    stacked = StackedTD3(OBSERVATION, ACTION, seeds=(4, 9), learning_rate=1e-2, **options)
    agent = TD3(
        OBSERVATION, [-1.0] * ACTION, [1.0] * ACTION, actor_learning_rate=1e-2, critic_learning_rate=1e-2, **options
    )
    run = 1
    with torch.no_grad():
        for parameter, source in zip(agent.actor.parameters(), weights_of(stacked.policy, run), strict=True):
            parameter.copy_(source)
        for parameter, source in zip(agent.critics.parameters(), both(stacked.critics, run, 2), strict=True):
            parameter.copy_(source)
        agent.target_actor.load_state_dict(agent.actor.state_dict())
        agent.target_critics.load_state_dict(agent.critics.state_dict())
    given = batches(2, is_weighted)
    flat = given.clone()
    flat["next", "done"] = flat["next", "terminated"]
    td_errors = stacked.learn(given)
    torch.testing.assert_close(torch.stack(fit(agent, list(flat[run].unbind(0)))), td_errors[run], atol=1e-4, rtol=1e-4)
    assert_learned(agent, stacked, run)


@pytest.mark.parametrize("kind", [StackedTD3, StackedSAC])
def test_an_agent_goes_on_from_a_save_as_if_it_had_not_stopped(kind: Any, tmp_path: Path) -> None:
    whole, resumed = (kind(OBSERVATION, ACTION, (3, 5), (8, 8)) for _ in range(2))
    whole.learn(batches(2))  # five updates, and every second of TD3 is one of the policy
    whole.save(tmp_path / "agent.pt")
    resumed.load(tmp_path / "agent.pt")
    given = batches(2)
    assert torch.equal(whole.learn(given), resumed.learn(given))
    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), resumed.parameters(), strict=True))


def build(
    seeds: tuple[int, ...], env: str = "Pendulum-v1", sizes: tuple[int, int] = (3, 1), is_prioritized: bool = False
) -> StackedRuns:
    if is_prioritized:
        replays = [recipes.prioritized(200, 4, seed=seed) for seed in seeds]
    else:
        replays = [recipes.neighborhood_mixup(200, 8, num_neighbors=3, seed=seed) for seed in seeds]
    agent = StackedTD3(*sizes, seeds, hidden_sizes=(8,))
    return StackedRuns(agent, env, replays, seeds, 50, 4, 2 if is_prioritized else 4, {"max_episode_steps": 20})


def train(seeds: tuple[int, ...]) -> tuple[StackedRuns, np.ndarray]:
    runs = build(seeds)
    returns = []
    for env_steps in (50, 55, 60):
        runs.play(env_steps)
        returns.append(runs.evaluate(2, seed=7))
    return runs, np.array(returns)


def test_a_run_is_the_same_beside_others() -> None:
    both, returns = train((3, 5))
    alone, returns_alone = train((5,))
    assert len(both.replays[1]) == 60
    for together, single in zip(weights_of(both.agent.policy, 1), weights_of(alone.agent.policy, 0), strict=True):
        torch.testing.assert_close(together, single, atol=1e-5, rtol=1e-4)
    rows, rows_alone = (runs.replays[-1].storage[:]["action"] for runs in (both, alone))
    torch.testing.assert_close(rows, rows_alone, atol=1e-5, rtol=1e-4)
    np.testing.assert_allclose(returns[:, 1], returns_alone[:, 0], atol=1e-2)
    assert both.replays[0].storage[:]["next", "truncated"].sum() == 3  # episodes of 20 steps
    assert not torch.equal(both.replays[0].storage[:]["action"], both.replays[1].storage[:]["action"])


@pytest.mark.slow
@pytest.mark.parametrize(("saved_at", "is_prioritized"), [(30, False), (65, True)])
def test_runs_go_on_from_a_save_as_if_they_had_not_stopped(saved_at: int, is_prioritized: bool, tmp_path) -> None:
    seeds, options = (3, 5), {"env": "Reacher-v5", "sizes": (10, 2), "is_prioritized": is_prioritized}
    whole = build(seeds, **options)
    whole.play(saved_at)
    whole.save(tmp_path)
    whole.play(90)
    resumed = build(seeds, **options)
    resumed.load(tmp_path)
    resumed.play(90)
    for ours, theirs in zip(resumed.replays, whole.replays, strict=True):
        assert torch.equal(ours.storage[:]["observation"], theirs.storage[:]["observation"])
        assert torch.equal(ours.storage[:]["action"], theirs.storage[:]["action"])
    for ours, theirs in zip(resumed.agent.parameters(), whole.agent.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert resumed.evaluate(2, seed=7).tolist() == whole.evaluate(2, seed=7).tolist()


def test_td_errors_return_to_the_rows_of_their_own_run_after_every_draw() -> None:
    runs = build((3, 5), is_prioritized=True)
    given: list[torch.Tensor] = []
    learn = runs.agent.learn

    def learn_and_keep(batch: TensorDict) -> torch.Tensor:
        given.append(learn(batch))
        return given[-1]

    runs.agent.learn = learn_and_keep
    updates: list[list[torch.Tensor]] = [[], []]
    for replay, kept in zip(runs.replays, updates, strict=True):
        update = replay.update_priority

        def update_and_keep(batch: TensorDict, td_error: torch.Tensor, update=update, kept=kept) -> None:
            kept.append(td_error)
            update(batch, td_error)

        replay.update_priority = update_and_keep
    runs.play(53)
    assert len(given) == 3 * 2  # two draws of two updates at every step
    for run, kept in enumerate(updates):
        assert torch.equal(torch.stack(kept), torch.stack([errors[run].flatten() for errors in given]))


def test_runs_without_a_readable_environment_begin_a_new_episode(tmp_path) -> None:
    runs = build((3,))
    runs.play(55)
    runs.save(tmp_path)
    resumed = build((3,))
    resumed.load(tmp_path)
    resumed.play(60)
    rows = resumed.replays[0].storage[:]
    assert len(rows) == 60 and rows["trajectory"].unique().tolist() == [0, 1, 2, 3]
    assert (rows["trajectory"][54:56] == torch.tensor([2, 3])).all()


class Alone:
    """The library's SAC with the noise that is given, its optimisers stepped directly."""

    def __init__(self, stacked: StackedSAC, run: int, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
        rates = {f"{name}_learning_rate": 1e-2 for name in ("actor", "critic", "entropy")}
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
def test_a_run_of_sac_learns_what_the_agent_learns(is_weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = StackedSAC(OBSERVATION, ACTION, (4, 9), (8, 8), 1e-2, target_update_rate=0.1)
    run = 1
    noise = torch.randn(UPDATES, 2, BATCH, ACTION, generator=torch.Generator().manual_seed(9))
    alone = Alone(stacked, run, 2, monkeypatch)
    given = batches(2, is_weighted)
    td_errors = stacked.learn(given)
    for batch, drawn, errors in zip(given[run].unbind(0), noise, td_errors[run], strict=True):
        torch.testing.assert_close(alone.learn(batch, drawn), errors, atol=1e-4, rtol=1e-4)
    assert_learned(alone.agent, stacked, run)
    log_alpha = stacked.log_alpha[run].detach().reshape(())
    torch.testing.assert_close(alone.agent.log_alpha.detach(), log_alpha, atol=1e-5, rtol=1e-4)


def test_actions_are_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = StackedSAC(OBSERVATION, ACTION, (4, 9), (8, 8), 1e-2)
    alone = Alone(stacked, 0, 2, monkeypatch)
    observation = torch.randn(2, 6, OBSERVATION)
    torch.testing.assert_close(alone.agent.act(observation[0], explore=False), stacked.act(observation, False)[0])
    alone.noise = [torch.randn(6, ACTION, generator=torch.Generator().manual_seed(4))]
    torch.testing.assert_close(alone.agent.act(observation[0], explore=True), stacked.act(observation, True)[0])


def test_a_run_of_sac_is_the_same_beside_others() -> None:
    together, single = (StackedSAC(OBSERVATION, ACTION, seeds, (8, 8), 1e-2) for seeds in ((3, 5), (5,)))
    given = batches(2)
    torch.testing.assert_close(together.learn(given)[1], single.learn(given[1:])[0], atol=1e-5, rtol=1e-4)
    for ours, theirs in zip(weights_of(together.policy, 1), weights_of(single.policy, 0), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert together.log_alpha[0] != together.log_alpha[1]
