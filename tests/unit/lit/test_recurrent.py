# SPDX-License-Identifier: Apache-2.0
"""The states of a recurrent agent: carried between steps, begun anew with each episode, stored with the rows."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import gymnasium
import lightning as L
import pytest
import torch

from lightning_replay import recipes
from lightning_replay.agents import DQN, RecurrentDQN
from lightning_replay.agents.interfaces import rollout_agent
from lightning_replay.collecting import VectorSteps
from lightning_replay.envs.recall import RecallCue
from lightning_replay.lit import Evaluate, ReplayDataModule
from lightning_replay.lit.collection import Collection
from lightning_replay.lit.rollouts import episode_returns, make_environments
from lightning_replay.replay import Replay
from tests.unit.lit.toys import Counting, Tiny, make_data, make_replay, make_trainer


class CountsSteps(L.LightningModule):
    """Its state is the number of observations that it has seen in the episode, in one tensor that it reuses."""

    is_recurrent = True

    def __init__(self) -> None:
        super().__init__()
        self.explored: list[bool] = []
        self._reused = torch.zeros(0)

    def initial_state(self, num_envs):
        self._reused = torch.zeros(num_envs, 1)
        return torch.zeros(num_envs, 1)

    def act_with_state(self, observation, state, explore):
        self.explored.append(explore)
        assert torch.equal(observation[:, 1:], state), "the state is that of this step of this environment"
        self._reused.copy_(state + 1)
        return torch.zeros(len(observation), 1), self._reused


class Staggered(Counting):
    """Episodes of 2 to 4 steps, of each environment in another order."""

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        self.length = int(self.np_random.integers(2, 5))
        return observation, info


class Recalls(L.LightningModule):
    """Names the cue that it saw in the first step."""

    is_recurrent = True

    def initial_state(self, num_envs):
        return torch.zeros(num_envs, 2)

    def act_with_state(self, observation, state, explore):
        state = state + observation[:, :2]
        return state.argmax(-1), state


def collection_of(env, num_envs: int, warmup_steps: int, env_steps: int, asynchronous: bool = False):
    replay = make_replay(capacity=500)
    make = partial(make_environments, env, {}, num_envs, asynchronous)
    return replay, Collection(replay, make, warmup_steps=warmup_steps, env_steps=env_steps, seed=0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_environment_has_its_own_state_also_in_the_warm_up(asynchronous: bool) -> None:
    replay, collection = collection_of(Staggered, 3, 30, 60, asynchronous)
    agent = CountsSteps()
    collection.collect_until(45, agent)
    assert agent.explored == [False] * 10 + [True] * 5
    collection.close()  # as at the end of a run: the environments begin new episodes
    collection.collect_until(60, agent)
    rows = replay[:]
    assert torch.equal(rows["recurrent_state"], rows["observation"][:, 1:]) and len(rows) == 60
    assert rows["recurrent_state"].dtype == torch.float32
    assert (rows["recurrent_state"].reshape(-1, 3)[15] == 0.0).all()
    collection.close()


def test_a_step_that_raises_leaves_the_state_of_the_step_before() -> None:
    replay, collection = collection_of(Staggered, 1, 1, 40)
    agent = CountsSteps()
    collection.collect_until(10, agent)
    env, steps = collection._vector.env.envs[0].unwrapped, []

    def failing(action, step=env.step):
        steps.append(action)
        if len(steps) == 2:
            raise RuntimeError("a step that failed")
        return step(action)

    env.step = failing
    with pytest.raises(RuntimeError, match="a step that failed"):
        collection.collect_until(20, agent)
    collection.collect_until(20, agent)
    rows = replay[:]
    assert torch.equal(rows["recurrent_state"], rows["observation"][:, 1:]) and len(rows) == 20


def test_stored_states_are_those_of_unrolling_the_episode_while_weights_stay() -> None:
    replay, collection = collection_of(partial(RecallCue, delay=4), 2, 8, 40)
    agent = RecurrentDQN.for_env(RecallCue, state_size=6, exploration_start=0.5)
    collection.collect_until(40, agent)
    rows = replay[:]
    for number in rows["trajectory"].unique():
        episode = rows[rows["trajectory"] == number]
        state = agent.initial_state(1)
        for row in episode:
            torch.testing.assert_close(row["recurrent_state"], state[0])
            with torch.no_grad():
                _, state = agent.network(row["observation"].view(1, 1, -1), state)


def test_your_own_loop_stores_the_same_states() -> None:
    agent, replay = RecurrentDQN.for_env(RecallCue), recipes.uniform(capacity=100, batch_size=4, seed=0)
    envs = VectorSteps(gymnasium.make_vec("lightning_replay.envs:RecallCue-v0", num_envs=3))
    observation, _ = envs.reset(seed=0)
    state = agent.initial_state(3)
    for _ in range(5):
        with torch.no_grad():
            action, following = agent.act_with_state(torch.as_tensor(observation), state, explore=True)
        observation, *_ = envs.step(action.numpy())
        envs.store(replay, recurrent_state=state.numpy())
        state = following
    assert replay[:]["recurrent_state"].shape == (15, 2, 64)
    assert torch.equal(replay[:]["recurrent_state"][-3:], replay[12:15]["recurrent_state"])


def test_evaluation_carries_the_state_and_forgets_it_at_the_end() -> None:
    assert list(episode_returns(Recalls(), RecallCue(delay=3), 12, seed=0)) == [1.0] * 12


def test_without_memory_the_cue_is_guessed() -> None:
    agent = DQN.for_env(RecallCue)
    assert 2 <= sum(episode_returns(agent, RecallCue(delay=3), 12, seed=0)) <= 10


@pytest.mark.parametrize(
    ("method", "returned", "message"),
    [
        ("initial_state", None, "initial_state returned as states NoneType None for 1 environments; accepted is"),
        (
            "initial_state",
            torch.zeros(2, 1),
            "states float32 of shape [2, 1] for 1 environments; accepted is one tensor of",
        ),
        (
            "initial_state",
            torch.zeros(2, 1),
            "one tensor of floats [1, ...], with environments first (h and c of an LSTM",
        ),
        ("initial_state", torch.zeros(1, 1).long(), "initial_state returned as states int64 of shape [1, 1]"),
        ("act_with_state", torch.zeros(1), "act_with_state returned as states float32 of shape [1] for 1"),
        ("act_with_state", (torch.zeros(1), torch.zeros(1)), "returned as states float32 of shape [1] for 1 env"),
        ("act_with_state", (torch.zeros(1), (torch.zeros(1, 1),) * 2), "returned as states tuple (tensor([[0.]]), ten"),
        ("act_with_state", (torch.zeros(1), torch.zeros(1, 1, 1)), "accepted is one tensor of floats [1, 1], with"),
    ],
)
def test_what_is_no_state_is_refused(monkeypatch, method: str, returned, message: str) -> None:
    monkeypatch.setattr(CountsSteps, method, lambda *arguments, **options: returned)
    with pytest.raises(ValueError, match=re.escape(message)):
        list(episode_returns(CountsSteps(), Counting(), 1, seed=0))


@pytest.mark.parametrize("warmup_steps", [0, 20])
def test_two_tensors_as_a_state_are_refused_in_fit(monkeypatch, tmp_path: Path, warmup_steps: int) -> None:
    """Also where rows are there already, and compared with the environment before the first step."""
    data = ReplayDataModule(RecallCue, sequences(), env_steps=30, warmup_steps=20)
    make_trainer(tmp_path).fit(small_agent(), datamodule=data)
    monkeypatch.setattr(RecurrentDQN, "initial_state", lambda self, num_envs: (torch.zeros(num_envs, 4),) * 2)
    replay = sequences() if warmup_steps else data.replay
    with pytest.raises(ValueError, match=r"initial_state returned as states tuple .* torch.stack\(\[h, c\], 1\)"):
        again = ReplayDataModule(RecallCue, replay, env_steps=30, warmup_steps=warmup_steps)
        make_trainer(tmp_path).fit(small_agent(), datamodule=again)


@pytest.mark.parametrize("missing", ["initial_state", "act_with_state"])
def test_a_recurrent_agent_without_its_methods_is_refused(monkeypatch, missing: str) -> None:
    monkeypatch.setattr(CountsSteps, missing, None)
    with pytest.raises(TypeError, match=r"CountsSteps is recurrent and lacks initial_state\(num_envs\) or act_with"):
        list(episode_returns(CountsSteps(), Counting(), 1, seed=0))


def small_agent(burn_in: int = 1) -> RecurrentDQN:
    return RecurrentDQN(hidden_sizes=(8,), state_size=4, burn_in=burn_in, exploration_steps=80)


def sequences(**options) -> Replay:
    return recipes.sequences(300, 4, length=4, overlap=2, burn_in=1, **options)


def data_of(replay: Replay, env_steps: int, **options) -> ReplayDataModule:
    make = partial(RecallCue, delay=4)
    return ReplayDataModule(make, replay, env_steps=env_steps, warmup_steps=40, num_envs=2, seed=0, **options)


def draws_of_a_copy(replay: Replay, directory: Path, **options) -> list[list[list[int]]]:
    replay.save(directory)
    again = sequences(**options)
    again.load(directory)
    return [again.sample()["index"].tolist() for _ in range(5)]


class Draws(L.Callback):
    """The next draws at the start of training, made by a copy."""

    def __init__(self, directory: Path, **options) -> None:
        self.directory, self.options = directory, options

    def on_train_start(self, trainer, pl_module) -> None:
        self.found = draws_of_a_copy(trainer.datamodule.replay, self.directory, **self.options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"priority_exponent": 0.9}], ids=["uniform", "prioritized"])
def test_a_resumed_fit_goes_on_with_the_same_draws_from_initial_states(tmp_path, options) -> None:
    data, trainer = data_of(sequences(**options), 100), make_trainer(tmp_path)
    trainer.fit(small_agent(), datamodule=data)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    expected, weights = draws_of_a_copy(data.replay, tmp_path / "copy", **options), []
    for name in ("first", "second"):
        agent, resumed, draws = small_agent(), data_of(sequences(**options), 120), Draws(tmp_path / name, **options)
        make_trainer(tmp_path, [draws]).fit(agent, datamodule=resumed, ckpt_path=tmp_path / "end.ckpt")
        assert draws.found == expected and resumed.updates_done == 80
        weights.append(torch.cat([parameter.flatten() for parameter in agent.parameters()]))
        rows = resumed.replay[:]
        has_cue = rows["observation"][:, :2].any(-1)
        is_initial = (rows["recurrent_state"] == 0.0).flatten(1).all(-1)
        assert len(rows) == 120 and torch.equal(has_cue, is_initial) and has_cue[[0, 1, 100, 101]].all()
    assert torch.equal(*weights)


def test_it_is_validated_and_evaluated_with_its_state(tmp_path) -> None:
    data, evaluation = data_of(sequences(), 60, evaluation_episodes=3), Evaluate(10, episodes=3)
    agent, trainer = small_agent(), make_trainer(tmp_path, [evaluation])
    trainer.fit(agent, datamodule=data)
    expected = sum(episode_returns(agent, RecallCue(delay=4), 3, seed=10_000)) / 3
    assert evaluation.history[-1] == (60, pytest.approx(expected))
    assert trainer.validate(agent, datamodule=data, verbose=False)[0]["eval/return"] == pytest.approx(expected)


def test_an_agent_of_single_rows_is_refused_where_sequences_are_drawn(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"^DQN learns from single rows, .* draws sequences with SequenceSampler; use"):
        make_trainer(tmp_path).fit(DQN(), datamodule=data_of(sequences(), 60))


def test_another_burn_in_than_the_agents_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"^the replay has burn_in 1, the agent 2; give both the same\.$"):
        make_trainer(tmp_path).fit(small_agent(burn_in=2), datamodule=data_of(sequences(), 60))


def test_a_recurrent_agent_is_refused_where_single_rows_are_drawn(tmp_path) -> None:
    replay = recipes.prioritized(capacity=100, batch_size=4)
    data = ReplayDataModule("lightning_replay.envs:RecallCue-v0", replay, env_steps=60, warmup_steps=20)
    with pytest.raises(ValueError, match=r"^RecurrentDQN is recurrent .* single rows with PrioritizedSampler; use "):
        make_trainer(tmp_path).fit(RecurrentDQN(), datamodule=data)
    assert len(replay) == 0


def test_rollouts_of_levels_carry_no_states() -> None:
    agent = CountsSteps()
    agent.act = agent.act_with_value = agent.value = print
    with pytest.raises(TypeError, match=r"^CountsSteps is recurrent, and rollouts of levels carry no states; use PPO"):
        rollout_agent(agent)


def test_an_own_module_that_declares_nothing_may_learn_from_rows(tmp_path) -> None:
    make_trainer(tmp_path).fit(Tiny(gives_td_error=False), datamodule=make_data(env_steps=25))
