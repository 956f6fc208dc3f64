# SPDX-License-Identifier: Apache-2.0
"""Outputs of an agent's training step reach the replay, and the agent computes the surprise of candidates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_replay import recipes
from lightning_replay.replay import Replay
from tests.stored import stored_rows
from tests.unit.lit.toys import Tiny, make_data, make_replay, make_trainer


class Surprised(Tiny):
    """Its surprise is the observations' sum; it knows what it was asked of candidates."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.grad: set[bool] = set()

    def update(self, batch):
        outputs = super().update(batch)
        total = batch["observation"].sum(-1)
        values = torch.stack([total, -total], -1)
        return outputs | {"surprise": total + 1, "action_values": values, "action": batch["action"].reshape(-1).long()}

    def training_step(self, batch, batch_idx):
        if not hasattr(batch, "update_priority"):
            return self.update(batch)
        for drawn in batch:
            outputs = self.update(drawn)
            batch.update_priority(drawn, **outputs)
        return outputs

    def initial_surprise(self, transitions):
        self.asked.append(len(transitions))
        self.grad.add(torch.is_grad_enabled())
        return transitions["next", "reward"].reshape(-1)


def fit(replay: Replay, agent, directory: Path, env_steps: int = 23, **options) -> None:
    make_trainer(directory).fit(agent, datamodule=make_data(replay, env_steps=env_steps, **options))


@pytest.mark.parametrize("updates_per_training_step", [1, 3])
def test_all_signals_reach_the_replay_with_their_batch(updates_per_training_step, tmp_path, monkeypatch) -> None:
    replay = make_replay()  # draws uniformly: whether it learns of anything is its own affair
    given = []
    monkeypatch.setattr(
        replay, "update_priority", lambda batch, td_error, **rest: given.append((batch["index"], td_error, rest))
    )
    agent = Surprised()
    fit(replay, agent, tmp_path, 26, updates_per_training_step=updates_per_training_step)
    assert len(given) == 6 and [index.tolist() for index, *_ in given] == agent.seen
    for index, td_error, rest in given:
        assert set(rest) == {"surprise", "action_values", "action"}
        total = replay.storage.get(index)["observation"].sum(-1)
        assert torch.equal(rest["surprise"], total + 1)
        assert torch.equal(rest["action_values"], torch.stack([total, -total], -1))
        assert td_error.shape == rest["action"].shape == (4,)


def retention(**options):
    return recipes.surprise_retention(capacity=50, batch_size=4, priority_exponent=0.0, seed=0, **options)


def test_the_replay_asks_the_agent_about_candidates_while_it_is_fitted(tmp_path) -> None:
    replay, agent = retention(n_steps=2, discount=0.9), Surprised()
    agent.hparams["discount"] = 0.9
    fit(replay, agent, tmp_path)
    # four episodes of 5 steps form 20 transitions; then a step of two waits, the next forms one, and so the next
    assert agent.asked == [20, 1, 1] and agent.grad == {False}
    assert replay.writer.initial_surprise is None  # no agent stays behind


def test_a_replay_that_knows_how_to_measure_candidates_is_left_alone(tmp_path) -> None:
    def measure(transitions):
        return torch.ones(len(transitions))

    replay, agent = retention(initial_surprise=measure), Surprised()
    fit(replay, agent, tmp_path)
    assert replay.writer.initial_surprise is measure and agent.asked == []


def test_agents_without_a_measure_leave_candidates_to_the_replay(tmp_path) -> None:
    replay = retention()
    fit(replay, Tiny(), tmp_path)
    assert replay.writer.initial_surprise is None and len(replay) == 23


def test_evaluation_has_options_of_its_own() -> None:
    env_kwargs = {"length": 3, "truncates": True}
    data = make_data(env_kwargs=env_kwargs, evaluation_env_kwargs={"length": 8})
    evaluated = data.make_environment()
    assert (evaluated.length, evaluated.truncates) == (8, True)
    data.setup("fit")
    assert data.env_kwargs == env_kwargs


def test_steps_that_wait_for_their_returns_are_stored_before_collection_goes_on(tmp_path) -> None:
    replay, agent = retention(n_steps=3, discount=0.5), Tiny()
    data = make_data(replay, env_steps=30, warmup_steps=28)
    data.collection.collect_until(23, agent)
    assert len(replay) == 21  # of the fifth episode's three steps two wait
    data.collection.close()
    data.collection.collect_until(26, agent)
    rows = stored_rows(replay)
    assert rows["steps_to_next_obs"][20:].flatten().tolist() == [3, 2, 1, 3]
    assert rows["discount"][20:].flatten().tolist() == [0.125, 0.25, 0.5, 0.125]
    assert rows["next", "reward"][20:].flatten().tolist() == [1 + 1 + 0.75, 2 + 1.5, 3.0, 1 + 1 + 0.75]
    assert rows["trajectory"][20:].tolist() == [4, 4, 4, 5]
    assert not rows["next", "truncated"].any()
