# SPDX-License-Identifier: Apache-2.0
"""Simulators under a trainer: rows by hand, clocks, evaluations, resume, dictionaries, and refusals."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import gymnasium
import lightning as L
import numpy as np
import pytest
import torch

from lightning_replay import recipes
from lightning_replay.agents import TD3
from lightning_replay.lit import Evaluate, ReplayDataModule
from tests.unit.lit.toys import Counting, Tiny, make_trainer


class Counters:
    """Observation ``[episode, step]`` of each environment, reward = step; environment i ends after 2 + i steps."""

    def __init__(self, num_envs: int = 3, is_nested: bool = False, height: float | None = None) -> None:
        self.num_envs = num_envs
        self.is_nested = is_nested
        self.height = height
        self.single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
        self.actions: list[torch.Tensor] = []
        self.resets: list[int | None] = []
        self.is_closed = False

    def observed(self) -> object:
        flat = torch.stack([self.episode, self.count], dim=1).float()
        return {"policy": flat, "critic": torch.cat([flat, flat.sum(1, keepdim=True)], 1)} if self.is_nested else flat

    def reset(self, *, seed=None, options=None):
        self.resets.append(seed)
        self.episode = torch.zeros(self.num_envs, dtype=torch.int64)
        self.count = torch.zeros(self.num_envs, dtype=torch.int64)
        return self.observed(), {}

    def step(self, action):
        assert type(action) is torch.Tensor and action.shape == (self.num_envs, 1)
        self.actions.append(action.clone())
        self.count += 1
        ends = self.count >= torch.arange(self.num_envs) + 2
        last, reward = self.observed(), self.count.float()
        self.episode += ends
        self.count *= ~ends
        info = {"final_observation": last, "height": self.height or reward * 2}
        return self.observed(), reward, torch.zeros_like(ends), ends, info

    def close(self):
        self.is_closed = True


def make_data(env=Counters, **options) -> ReplayDataModule:
    given = {"env_steps": 60, "warmup_steps": 30, "updates_per_env_step": 1 / 3, "seed": 0}
    replay = options.pop("replay") if "replay" in options else recipes.uniform(capacity=1_000, batch_size=8)
    return ReplayDataModule(env, replay, **(given | options))


def test_rows_are_those_of_the_steps(tmp_path: Path) -> None:
    data, agent = make_data(info_keys=("height",)), Tiny()
    trainer = make_trainer(tmp_path)
    trainer.fit(agent, datamodule=data)
    assert data.clocks == (60, 10) and trainer.global_step == 10 and len(data.replay) == 60
    rows = data.replay[:]
    # Environment 0 ends after every second step; the rows of three environments follow each other.
    assert rows["observation"][::3][:5].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0]]
    assert rows["next", "observation"][::3][:5].tolist() == [[0, 1], [0, 2], [1, 1], [1, 2], [2, 1]]
    assert rows["next", "truncated"][::3].flatten().tolist() == [False, True] * 10
    assert rows["next", "observation"][2::3][:5].tolist() == [[0, 1], [0, 2], [0, 3], [0, 4], [1, 1]]
    assert torch.equal(rows["next", "height"], 2 * rows["next", "reward"])
    assert (rows["action"][:30].abs() <= 1).all() and rows["action"][:30].std() > 0.3
    # By agents returned 1 + 2, 1 + 2 + 3, and 1 + 2 + 3 + 4.
    assert sorted({(one.episode_return, one.length) for one in data.collection.episodes}) == [(3, 2), (6, 3), (10, 4)]
    assert [one.env_steps for one in data.collection.episodes][:3] == [6, 9, 12]
    assert len(data.collection.episodes) == 10 + 6 + 5


def test_random_actions_come_from_the_seed_and_the_agent_acts_on_tensors(tmp_path: Path) -> None:
    class Watching(Tiny):
        def act(self, observation, explore):
            assert type(observation) is torch.Tensor and observation.dtype == torch.float32
            return super().act(observation, explore)

    def actions(seed: int) -> torch.Tensor:
        torch.manual_seed(1)
        data = make_data(seed=seed)
        make_trainer(tmp_path).fit(Watching(), datamodule=data)
        return data.replay[:]["action"]

    assert torch.equal(actions(0), actions(0))
    assert not torch.equal(actions(0)[:30], actions(1)[:30])


def test_evaluations_play_an_instance_of_their_own(tmp_path: Path) -> None:
    built = []

    class Watched(Counters):
        def __init__(self, num_envs=3):
            super().__init__(num_envs)
            built.append(self)

    evaluate = Evaluate(every_n_env_steps=30, episodes=4)
    data = make_data(Watched, evaluation_env_kwargs={"num_envs": 2})
    trainer = make_trainer(tmp_path, callbacks=[evaluate])
    trainer.fit(Tiny(), datamodule=data)
    # Two episodes of each of two environments: 3, 6, 3, 6.
    assert evaluate.history == [(0, 4.5), (33, 4.5), (60, 4.5)]
    assert [one.num_envs for one in built] == [3, 2] and all(one.is_closed for one in built)
    assert len(built[0].resets) == 2 and built[1].resets == [10_000] * 3  # The first one was for the shapes.
    (result,) = trainer.validate(Tiny(), datamodule=data, verbose=False)
    assert result == {"eval/return": pytest.approx((3 + 6 + 3 + 6 + 3) / 5)}


class Successful(Counters):
    """Environments 0 and 2 succeed, and infos before the end say the opposite; or its last infos are the final ones."""

    is_final = False

    def step(self, action):
        *step, info = super().step(action)
        flags = (torch.arange(self.num_envs) % 2 == 0)[:, None] == step[3][:, None]
        if self.is_final:
            return (*step, info | {"is_success": ~flags, "final_info": {"is_success": flags}})
        return (*step, info | {"is_success": flags})


@pytest.mark.parametrize("is_final", [False, True])
def test_success_rates_of_simulators(tmp_path: Path, is_final: bool) -> None:
    class Ours(Successful):
        pass

    Ours.is_final = is_final
    evaluate = Evaluate(every_n_env_steps=100, episodes=5)
    trainer = make_trainer(tmp_path, callbacks=[evaluate])
    trainer.fit(Tiny(), datamodule=make_data(Ours))
    # Of environments 0, 1, 2 there are 2, 2, 1 episodes, of which those of 0 and 2 succeed.
    assert evaluate.success_history == [(0, pytest.approx(0.6)), (60, pytest.approx(0.6))]
    assert trainer.callback_metrics["eval/success_rate"] == pytest.approx(0.6)
    # Returns are 3, 6, 10 of environments 0, 1, 2.
    own = Evaluate(every_n_env_steps=100, episodes=6, success=lambda returns, infos: returns == 6)
    make_trainer(tmp_path, callbacks=[own]).fit(Tiny(), datamodule=make_data(Counters))
    assert own.success_history == [(0, pytest.approx(2 / 6)), (60, pytest.approx(2 / 6))]


def test_flags_of_simulators_are_one_for_each_environment(tmp_path: Path) -> None:
    wrong = Evaluate(every_n_env_steps=100, success=lambda returns, infos: True)
    with pytest.raises(ValueError, match=r"success returned bool True for returns of shape \[3\]; it must return one"):
        make_trainer(tmp_path, callbacks=[wrong]).fit(Tiny(), datamodule=make_data(Counters))


def test_an_instance_is_evaluated_in_place_and_stays_open(tmp_path: Path) -> None:
    simulator = Counters()
    data = make_data(simulator)
    make_trainer(tmp_path, callbacks=[Evaluate(every_n_env_steps=30, episodes=3)]).fit(Tiny(), datamodule=data)
    assert not simulator.is_closed and len(simulator.resets) == 6  # shapes, two of the training, three evaluations
    rows = data.replay[:]
    begun = (rows["observation"] == 0).all(1).reshape(-1, 3)[:, 2].nonzero().flatten().tolist()
    assert begun == [0, 11]  # The evaluation after 33 steps cut the episode of four steps.
    assert rows["next", "done"].reshape(-1, 3)[10].tolist() == [True, True, True]


def test_a_run_that_is_resumed_goes_on_with_its_clocks_and_draws(tmp_path: Path) -> None:
    class Save(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if trainer.datamodule.updates_done == 7:
                trainer.save_checkpoint(path)

    def data_of(seed: int) -> ReplayDataModule:
        replay = recipes.uniform(capacity=1_000, batch_size=8, n_steps=2, discount=0.9)
        return make_data(replay=replay, updates_per_env_step=1, seed=seed)

    path = tmp_path / "seven.ckpt"
    torch.manual_seed(1)
    first, data = Tiny(), data_of(0)
    make_trainer(tmp_path, callbacks=[Save()]).fit(first, datamodule=data)
    resumed = []
    for _ in range(2):
        torch.manual_seed(2)  # The checkpoint restores torch's generator.
        agent, data = Tiny(), data_of(5)
        make_trainer(tmp_path).fit(agent, datamodule=data, ckpt_path=path)
        assert data.clocks == (60, 30) and len(data.replay) == 60 and len(agent.seen) == 23
        resumed.append((agent.seen, data.replay[:]["action"]))
    # Updates 8 and 9 follow the same step as update 7, so their draws are those of the run without a break.
    assert first.seen[7:9] == resumed[0][0][:2]
    assert resumed[0][0] == resumed[1][0] and torch.equal(resumed[0][1], resumed[1][1])
    rows = data.replay[:]
    begun = (rows["observation"] == 0).all(1).reshape(-1, 3).all(1).nonzero().flatten().tolist()
    assert begun == [0, 13]  # After 39 steps of the first run the environments began again.
    assert rows["next", "done"].reshape(-1, 3)[12].all()


def test_an_episode_with_a_state_begins_with_the_initial_one(tmp_path: Path) -> None:
    class Remembering(Tiny):
        is_recurrent = True

        def initial_state(self, num_envs):
            return torch.zeros(num_envs, 1)

        def act_with_state(self, observation, state, explore):
            return self.act(observation, explore), state + 1

    replay = recipes.sequences(capacity=1_000, length=2, batch_size=4)
    data = make_data(replay=replay)

    class Unlearning(Remembering):
        def training_step(self, batch, batch_idx):
            return {"loss": torch.zeros(()), "td_error": torch.zeros(4)}

    make_trainer(tmp_path, max_steps=-1).fit(Unlearning(), datamodule=data)
    assert torch.equal(data.replay[:]["recurrent_state"], data.replay[:]["observation"][:, 1:])


def test_the_actor_gets_its_entry_and_both_are_stored(tmp_path: Path) -> None:
    columns = {"observation": "policy", "critic_observation": "critic"}
    simulator = Counters(is_nested=True)
    data = make_data(simulator, observation_columns=columns)
    make_trainer(tmp_path, callbacks=[Evaluate(episodes=1)]).fit(Tiny(), datamodule=data)
    rows = data.replay[:]
    assert rows["observation"].shape == (60, 2) and rows["next", "critic_observation"].shape == (60, 3)
    assert torch.equal(rows["critic_observation"][:, 2], rows["observation"].sum(1))
    assert data.observation_space.shape == (2,)


def test_dictionaries_reach_an_agent_that_encodes_them(tmp_path: Path) -> None:
    agent = TD3(hidden_sizes=(8,))
    data = make_data(Counters, env_kwargs={"is_nested": True})
    make_trainer(tmp_path, callbacks=[Evaluate(episodes=1)]).fit(agent, datamodule=data)
    assert agent.hparams["observation_size"] == {"policy": 2, "critic": 3}
    assert data.replay[:]["next", "observation", "critic"].shape == (60, 3)


def test_an_agent_has_the_bounds_where_the_simulator_has_none(tmp_path: Path) -> None:
    simulator = Counters()
    simulator.single_action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
    data = make_data(simulator)
    make_trainer(tmp_path).fit(TD3(2, [-3.0], [3.0], hidden_sizes=(8,)), datamodule=data)
    assert 2.0 < max(float(action.abs().max()) for action in simulator.actions) <= 3.0
    with pytest.raises(ValueError, match=r"has the single_action_space Box\(-inf.*give the agent bounds"):
        make_trainer(tmp_path).fit(TD3(hidden_sizes=(8,)), datamodule=make_data(simulator))


def test_updates_of_a_whole_step_are_joined(tmp_path: Path) -> None:
    starts = []

    class Watching(Tiny):
        takes_update_batches = True

        def training_step(self, batch, batch_idx):
            starts.append(self.trainer.datamodule.updates_done)
            return super().training_step(batch, batch_idx)

    data = make_data(partial(Counters, num_envs=30), env_steps=3_000, updates_per_env_step=1 / 30)
    make_trainer(tmp_path).fit(Watching(), datamodule=data)
    assert data.updates_done == 99 and starts == [*range(0, 99, 16)]


def test_a_step_is_stored_whole_and_rows_of_the_last_one_are_counted(tmp_path: Path) -> None:
    data = make_data(env_steps=61)
    make_trainer(tmp_path).fit(Tiny(), datamodule=data)
    assert data.env_steps_done == len(data.replay) == 63 and data.is_finished


def broken(**parts: object) -> type[Counters]:
    """A simulator whose steps after the third return other parts."""

    class Broken(Counters):
        def step(self, action):
            names = "observation", "reward", "terminated", "truncated", "info"
            results = dict(zip(names, super().step(action), strict=True))
            return tuple((results | (parts if len(self.actions) > 3 else {})).values())

    return Broken


@pytest.mark.parametrize(
    ("env", "options", "kind", "message"),
    [
        (object(), {}, TypeError, "env is <object.*a simulator with num_envs, reset, and step"),
        (lambda: object(), {}, TypeError, "returned a builtins.object.*simulator with num_envs, reset, and step"),
        (broken(observation=torch.zeros(2, 2)), {}, ValueError, "one row for each of its 3 environments"),
        (broken(reward=torch.zeros(2)), {}, ValueError, "one of each for each of its environments"),
        (broken(info={}), {}, ValueError, "an episode of .* ended"),
        (Counters, {"final_observation": "last"}, ValueError, "an episode of .* ended"),
        (Counters, {"observation_columns": {"observation": "policy"}}, ValueError, r"entries \['policy'\].*have \[\]"),
        (Counters, {"num_envs": 4}, ValueError, "beside num_envs. A simulator has its own num_envs"),
        (Counters, {"asynchronous": True}, ValueError, "beside asynchronous"),
        (Counters(), {"env_kwargs": {"num_envs": 2}}, ValueError, "beside env_kwargs, evaluation_env_kwargs"),
        (Counters, {"info_keys": ("speed",)}, ValueError, r"info_keys has \['speed'\].*seen were"),
        (partial(Counters, height=3.0), {"info_keys": ("height",)}, ValueError, "'height' of the simulator is float"),
        ({"class_path": "tests.unit.lit.toys.Nothing"}, {}, ValueError, "of a simulator give class_path"),
        ({"class_path": "tests.unit.lit.toys.Counting", "num_envs": 3}, {}, ValueError, "and its init_args"),
        (Counting, {"final_observation": "final"}, ValueError, "final_observation of .* belong to a simulator"),
    ],
)
def test_what_no_simulator_is_is_refused(env, options, kind, message, tmp_path: Path) -> None:
    with pytest.raises(kind, match=message):
        make_trainer(tmp_path).fit(Tiny(), datamodule=make_data(env, **options))


def test_actions_of_another_form_are_refused(tmp_path: Path) -> None:
    class Odd(Tiny):
        def act(self, observation, explore):
            return self.returned

    for returned, kind in ((torch.zeros(3), ValueError), ([0.0] * 3, TypeError)):
        data, agent = make_data(), Odd()
        agent.returned = returned
        with pytest.raises(kind, match=r"Odd.act returned .* for a batch of 3 observations, and the action space is"):
            make_trainer(tmp_path).fit(agent, datamodule=data)
        assert data.env_steps_done == len(data.replay) == 30


def test_invalid_rows_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    class Exploding(Counters):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            return observation, torch.where(torch.arange(3) == len(self.actions) - 4, math.nan, reward), *rest

    data = make_data(Exploding, skip_invalid=True)
    make_trainer(tmp_path).fit(Tiny(), datamodule=data)
    assert data.env_steps_done == 60 and len(data.replay) == 57 and data.collection.num_skipped == 3
