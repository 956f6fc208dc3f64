# SPDX-License-Identifier: Apache-2.0
"""Rollouts of chosen levels under a trainer: what is recorded, scored, counted, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_replay import forking
from lightning_replay.agents import PPO
from lightning_replay.levels import SequentialLevels, UniformLevels, scores
from lightning_replay.lit import ReplayDataModule, ReturnNormalization
from tests.unit.lit.level_toys import Deaf, Doors, Stairs, Valuer, fit, make_agent, make_data, make_levels, value_of
from tests.unit.lit.toys import Counting, make_replay, make_trainer


def pieces(rollout):
    """Actor, level, steps and whether done, of every piece of an episode, in the order of scoring."""
    for actor, row in enumerate(rollout):
        start = 0
        for stop in range(1, row.shape[0] + 1):
            done = bool(row["next", "done"][stop - 1])
            if done or stop == row.shape[0]:
                yield actor, int(row["level_id"][start]), row[start:stop], done
                start = stop


def mean(found):
    """Of scores of pieces, weighted by their lengths."""
    return sum(score * length for score, length in found) / sum(length for _, length in found)


def test_each_step_is_of_the_level_it_is_recorded_with(tmp_path: Path) -> None:
    levels = make_levels()
    data = make_data(levels, env_steps=120)
    _, agent = fit(tmp_path, data)
    assert len(agent.rollouts) == 8
    for rollout in agent.rollouts:
        assert torch.equal(rollout["level_id"], rollout["observation"][..., 0].long())
        assert rollout["level_id"].dtype == torch.int64
    together = torch.cat(agent.rollouts, 1)
    for actor in range(3):
        steps, done = together["observation"][actor, :, 1].tolist(), together["next", "done"][actor, :, 0].tolist()
        expected = [0.0]
        for ended in done[:-1]:
            expected.append(0.0 if ended else expected[-1] + 1)
        assert steps == expected
        begun = [level for level, step in zip(together["level_id"][actor].tolist(), steps, strict=True) if step == 0]
        given = [level for who, level, _, _ in levels.given if who == actor]
        assert begun == given[: len(begun)] and len(given) - len(begun) == int(done[-1])
    level, step = together["level_id"], together["observation"][..., 1] + 1
    ends = step > level % 4
    assert torch.equal(together["next", "done"][..., 0], ends)
    assert torch.equal(together["next", "truncated"][..., 0], ends & (level % 2 == 1))
    assert torch.equal(together["next", "terminated"][..., 0], ends & (level % 2 == 0))
    assert torch.allclose(together["next", "reward"][..., 0], level + step / 10)


def test_values_are_those_of_the_policy_that_collected(tmp_path: Path) -> None:
    _, agent = fit(tmp_path, make_data(env_steps=120))
    assert agent.weights == pytest.approx([2.0 - 0.1 * k for k in range(8)])
    for rollout, weight in zip(agent.rollouts, agent.weights, strict=True):
        assert torch.equal(rollout["state_value"], value_of(rollout["observation"], weight))
        # what follows is this level's own next observation, also where a time limit ends the episode
        behind = rollout["observation"] + torch.tensor([0.0, 1.0])
        expected = value_of(behind, weight).masked_fill(rollout["next", "terminated"], 0.0)
        assert torch.allclose(rollout["next", "state_value"], expected)
    assert set(agent.modes) == {(False, False)} and agent.training


class Reusing(Stairs):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.info = np.zeros(2), {}

    def _same(self, observation, info):
        self.seen[:] = observation
        self.info.update(info)
        return self.seen, self.info

    def reset(self, *, seed=None, options=None):
        return self._same(*super().reset(seed=seed))

    def step(self, action):
        observation, *others, info = super().step(action)
        observation, info = self._same(observation, info)
        return observation, *others, info


class Repeating(Valuer):
    def act_with_value(self, observation):
        columns = super().act_with_value(observation)
        if not hasattr(self, "returned"):
            self.returned = columns.clone()
        return self.returned.update_(columns)


def test_arrays_that_environments_and_agents_reuse_are_copied(tmp_path: Path) -> None:
    rollouts = []
    for env, agent in ((Stairs, Valuer()), (Reusing, Repeating())):
        torch.manual_seed(0)
        fit(tmp_path, make_data(env=env, env_steps=120), agent)
        rollouts.append(torch.cat(agent.rollouts, 1))
    assert rollouts[0]["action"].unique().tolist() == [0, 1, 2] and rollouts[0]["next", "truncated"].any()
    for key, column in rollouts[0].items(True, True):
        assert torch.equal(column, rollouts[1][key]), key


@pytest.mark.parametrize("flush", [False, True])
def test_scores_are_those_recomputed_from_the_rollouts(tmp_path: Path, flush: bool) -> None:
    levels = make_levels(score=scores.L1ValueLoss(discount=0.9, gae_lambda=0.5))
    _, agent = fit(tmp_path, make_data(levels, env_steps=120, flush_unfinished=flush))
    expected: dict[int, float] = {}
    running: dict[int, list[tuple[float, int]]] = {actor: [] for actor in range(3)}
    for rollout in agent.rollouts:
        unfinished: dict[int, int] = {}
        for actor, level, steps, done in pieces(rollout):
            columns = [steps["next", "reward"], steps["state_value"], steps["next", "state_value"]]
            ends = [steps["next", "terminated"], steps["next", "done"]]
            score = scores.l1_value_loss(*columns, *ends, discount=0.9, gae_lambda=0.5)
            running[actor].append((float(score), len(steps)))
            if done:
                expected[level] = mean(running.pop(actor))
                running[actor] = []
            else:
                unfinished[actor] = level
        if flush:  # after all that ended
            for actor, level in unfinished.items():
                expected[level] = mean(running.pop(actor))
                running[actor] = []
    found = levels.probabilities()
    assert dict(zip(found["level_id"].tolist(), found["score"].tolist(), strict=True)) == pytest.approx(expected)
    assert len(expected) > 6


def test_levels_are_scored_before_the_policy_learns(tmp_path: Path) -> None:
    counted = []

    class Watching(Valuer):
        def training_step(self, batch, batch_idx):
            ended = {int(level) for level in batch["level_id"][batch["next", "done"][..., 0]]}
            known = set(self.trainer.datamodule.levels.probabilities()["level_id"].tolist())
            counted.append(ended <= known)
            return super().training_step(batch, batch_idx)

    fit(tmp_path, make_data(), Watching())
    assert counted == [True] * 4


@pytest.mark.parametrize(
    ("env_steps", "num_envs", "rollout_length", "lengths"),
    [(60, 3, 5, [5] * 4), (61, 3, 5, [5] * 4 + [1]), (70, 4, 8, [8, 8, 2]), (2, 4, 8, [1]), (60, 1, 20, [20] * 3)],
)
def test_it_stops_by_itself(tmp_path: Path, env_steps: int, num_envs: int, rollout_length: int, lengths) -> None:
    data = make_data(env_steps=env_steps, num_envs=num_envs, rollout_length=rollout_length, rollouts_per_epoch=3)
    trainer, agent = fit(tmp_path, data)
    assert [rollout.shape for rollout in agent.rollouts] == [(num_envs, length) for length in lengths]
    assert data.env_steps_done == num_envs * sum(lengths) and data.env_steps_done - env_steps < num_envs
    assert data.is_finished and data.updates_done == trainer.global_step == len(lengths)
    assert str(data).startswith(f"LevelDataModule(Stairs, {data.env_steps_done} of {env_steps} env steps")
    assert trainer.current_epoch == -(-len(lengths) // 3)


def test_robust_replay_trains_on_levels_that_had_a_score(tmp_path: Path) -> None:
    levels = make_levels(train_on_new_levels=False, replay_probability=0.5)
    _, agent = fit(tmp_path, make_data(levels, env_steps=120))
    together = torch.cat(agent.rollouts, 1)
    begun = together["observation"][..., 1] == 0
    for actor in range(3):
        given = [(level, known, trains) for who, level, known, trains in levels.given if who == actor]
        assert all(known == trains for _, known, trains in given)
        episode = begun[actor].cumsum(0) - 1
        expected = torch.tensor([trains for _, _, trains in given])[episode]
        assert torch.equal(together["is_trained"][actor], expected)
    assert 0 < together["is_trained"].float().mean() < 1


def test_episodes_are_counted_with_their_levels_and_unchanged_rewards(tmp_path: Path) -> None:
    data = make_data(SequentialLevels([6, 3, 4]), return_normalization=ReturnNormalization(), env_steps=30)
    _, agent = fit(tmp_path, data)
    assert agent.rollouts[0]["next", "reward"][:, 1:].max() < 3.0
    first = list(data.collection.episodes)[:4]  # levels 4, 6 and 3 end after 1, 3 and 4 steps; then comes 6
    assert [(e.env_steps, e.length, e.level_id) for e in first] == [(3, 1, 4), (9, 3, 6), (12, 4, 3), (12, 3, 6)]
    assert [e.episode_return for e in first] == pytest.approx([4.1, 18.6, 13.0, 18.6])
    last = [e.episode_return for e in data.collection.episodes][-10:]
    assert data.collection.recent_return == pytest.approx(np.mean(last))
    assert sorted(data.collection.played_levels) == [3, 4, 6]


def test_rewards_are_divided_by_the_spread_of_returns() -> None:
    normalization, generator = ReturnNormalization(discount=0.9, clip=2.0), np.random.default_rng(0)
    seen, sums = [], np.zeros(4)
    for _ in range(50):
        reward, done = generator.normal(size=4), generator.random(4) < 0.2
        found = normalization(reward, done)
        sums = 0.9 * sums + reward
        seen.append(sums.copy())
        sums[done] = 0.0
        assert found == pytest.approx(np.clip(reward / np.sqrt(np.var(seen) + 1e-8), -2.0, 2.0), abs=1e-6)
    again = ReturnNormalization(discount=0.9, clip=2.0)
    again.load_state_dict(normalization.state_dict())
    assert again.scale == normalization.scale


def test_environments_with_set_level(tmp_path: Path) -> None:
    _, agent = fit(tmp_path, make_data(UniformLevels(9, seed=0), Doors), make_agent_of(4))
    for rollout in agent.rollouts:
        assert torch.equal(rollout["observation"][..., :3].argmax(-1), rollout["level_id"] % 3)


def make_agent_of(size: int) -> Valuer:
    class Wide(Valuer):
        def value(self, observation):
            return value_of(observation[:, :2], self.weight)

    return Wide()


def test_validate_plays_the_held_out_levels(tmp_path: Path) -> None:
    data = make_data(held_out_levels=[100, 102])  # 100.1, and 102.1 + 102.2 + 102.3
    trainer = make_trainer(tmp_path)
    assert trainer.validate(Valuer(), datamodule=data, verbose=False)[0]["eval/return"] == pytest.approx(203.35)
    assert data.env_steps_done == 0 and data.levels.episodes == 0


def test_arguments_reach_the_environment(tmp_path: Path) -> None:
    data = make_data(env_kwargs={"reward": 0.0}, evaluation_env_kwargs={"reward": 2.0}, held_out_levels=[100])
    trainer, agent = fit(tmp_path, data)
    assert not agent.rollouts[0]["next", "reward"].any()
    assert trainer.validate(agent, datamodule=data, verbose=False)[0]["eval/return"] == pytest.approx(200.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out_levels": 0}, "held_out_levels is 0; it must be how many, from 1 to"),
        ({"held_out_levels": 2**40}, "held_out_levels is 1099511627776; it must be how many"),
        ({"held_out_levels": [3, 3]}, "held_out_levels is .3, 3.; it must be how many, from 1 to 1000000, or diff"),
        ({"held_out_levels": [-1]}, r"held_out_levels\[0\] is -1; it must be a whole number from 0 to 2..31 - 1"),
    ],
)
def test_held_out_levels_are_distinct_ids_or_their_number(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_data(**options)


def test_an_environment_that_ignores_its_level_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="level"):
        fit(tmp_path, make_data(env=Deaf))
    fit(tmp_path, make_data(env=Deaf, check=False))


def test_all_other_discounts_are_named_at_once_with_the_options_to_give(tmp_path: Path) -> None:
    agent = PPO(hidden_sizes=(8,), discount=0.99, gae_lambda=0.9)
    with pytest.raises(ValueError) as raised:
        fit(tmp_path, make_data(return_normalization=ReturnNormalization(0.999)), agent)
    score = "--data.init_args.levels.init_args.score"
    assert str(raised.value) == (
        "return_normalization of the data module has discount 0.999, the agent 0.99; "
        "levels.score of the data module has discount 0.999, the agent 0.99; "
        "levels.score of the data module has gae_lambda 0.95, the agent 0.9. Give the same, on the command line by "
        "--data.init_args.return_normalization.init_args.discount=0.99 "
        f"{score}=lightning_replay.levels.scores.L1ValueLoss "
        f"{score}.init_args.discount=0.99 {score}.init_args.gae_lambda=0.9"
    )


def test_a_score_of_another_discount_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="levels.score of the data module has discount 0.9, the agent 0.999"):
        fit(tmp_path, make_data(make_levels(score=scores.OneStepTdError(0.9))), make_agent())


def test_a_data_module_that_comes_from_another_process_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_data()
    monkeypatch.setattr(forking, "process", "another")
    with pytest.raises(RuntimeError, match="is a copy of one in another process"):
        data.levels.next_level(0)
    fit(tmp_path, data, make_agent())


def test_a_score_of_your_own_reads_any_column(tmp_path: Path) -> None:
    def score(steps: TensorDict) -> float:
        return float(steps["observation"][:, 0].mean())

    levels = make_levels(score=score)
    fit(tmp_path, make_data(levels), make_agent())
    rows = levels.probabilities()
    assert len(rows) > 0 and rows["score"].tolist() == rows["level_id"].tolist(), "it observes its level"


def test_fewer_rows_than_minibatches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="minibatches is 16, and a rollout of the data module has 15 rows"):
        fit(tmp_path, make_data(), PPO(hidden_sizes=(8,), minibatches=16))
    fit(tmp_path, make_data(), PPO(hidden_sizes=(8,), epochs=1, minibatches=15))


def test_replayed_transitions_are_refused_by_ppo(tmp_path: Path) -> None:
    data = ReplayDataModule(Counting, make_replay(), env_steps=25, warmup_steps=20, env_kwargs={"num_actions": 2})
    agent = PPO(observation_shape=(2,), num_actions=2, hidden_sizes=(8,))
    with pytest.raises(TypeError, match=r"ReplayDataModule replays transitions; give PPO a LevelDataModule"):
        make_trainer(tmp_path).fit(agent, datamodule=data)
