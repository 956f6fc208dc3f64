# SPDX-License-Identifier: Apache-2.0
"""Level replay in PPO, APPO and IMPALA: what is played, what it scores, what survives."""

from __future__ import annotations

import copy
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import ray
import torch
from pyarrow import fs
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator

import rllib_ext
from lightning_replay.levels import LevelBuffer, LevelSet, scores
from lightning_replay.levels.scores import L1ValueLoss
from rllib_ext.levels.level_assignment import attach_player, end_round
from rllib_ext.levels.server import Fragment, LevelServer

from .shard_contents import wait_until_ended
from .test_rllib_examples import rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray", "algorithms_end")]

LEVELS, HELD_OUT = range(12), (100, 101, 102, 103)
DISCOUNT, LAMBDA = 0.9, 0.8


class Corridor(gym.Env):
    """Observes its level and step; levels differ in length, rewards and ends. Held-out ones reward nothing."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        pass

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        assert seed is not None
        self.level, self.count = seed, 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        ends = self.count == 3 + 2 * (self.level % 4)
        reward = float(self.level + action) if self.level < 100 else 0.0
        return self._observation(), reward, ends and self.level % 3 > 0, ends and self.level % 3 == 0, {}

    def _observation(self) -> Any:
        return np.array([self.level, self.count], np.float32)


class Told(Corridor):
    def set_level(self, level_id: int) -> None:
        self.told = level_id

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=self.told)


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def small(algorithm: type[AlgorithmConfig], runners: int, **options: Any) -> AlgorithmConfig:
    """An algorithm of tiny networks, two environments on each EnvRunner."""
    config = (
        algorithm()
        .environment(Corridor)
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=2, rollout_fragment_length=10)
        .env_runners(use_env_runner_state_server=False)  # a process less
        .training(gamma=DISCOUNT, train_batch_size_per_learner=40, lr=0.01)
        .rl_module(model_config={"fcnet_hiddens": [8]})
        .reporting(min_sample_timesteps_per_iteration=40, min_time_s_per_iteration=0)
        .debugging(seed=0, log_level="ERROR", log_sys_usage=False)
    )
    if algorithm is PPOConfig:
        config.training(lambda_=LAMBDA, num_epochs=1, minibatch_size=20)
    levels = LevelBuffer(
        LEVELS, **{"score": L1ValueLoss(DISCOUNT, LAMBDA), "staleness_weight": 0.3, "seed": 0, **options}
    )
    return rllib_ext.configure(config, levels=levels, held_out_levels=HELD_OUT)


@pytest.fixture(scope="module")
def two_runners(shared_ray: None) -> Iterator[Algorithm]:
    """PPO on two EnvRunners, used by the tests one after the other."""
    config = small(PPOConfig, 2).fault_tolerance(restart_failed_env_runners=True)
    algorithm = config.evaluation(evaluation_interval=100, evaluation_duration=8).build_algo()
    yield algorithm
    algorithm.stop()


class Watched:
    """Scores of the episodes a PPO learns from, computed anew from what its Learners are given.

    ``scores`` has those of the episodes that ended in the last update in which the level was finished.
    """

    def __init__(self, algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
        self.algorithm, self.shards = algorithm, max(algorithm.config.num_learners, 1)
        self.episodes: list[Any] = []
        self.scores: dict[int, list[float]] = {}
        self.cuts = 0
        self._sums: dict[str, np.ndarray] = {}
        update = algorithm.learner_group.update

        def watching(*, episodes: list[Any], **options: Any) -> Any:
            self._note(copy.deepcopy(episodes))
            return update(episodes=episodes, **options)

        monkeypatch.setattr(algorithm.learner_group, "update", watching)

    def _note(self, episodes: list[Any]) -> None:
        levels = {episode.id_: episode.custom_data["level_id"] for episode in episodes}
        scores: dict[int, list[float]] = {}
        (module, *_) = (result.get() for result in self.algorithm.learner_group.foreach_learner(module_of))
        self.episodes += episodes
        if self.shards > 1:
            pieces = [piece for shard in ShardEpisodesIterator(episodes, self.shards) for piece in shard]
            self.cuts += len(pieces) - len(episodes)
            episodes = sorted(pieces, key=lambda one: one.t_started)
        for piece in episodes:
            with torch.no_grad():
                observations = torch.as_tensor(piece.get_observations())
                values = module.compute_values({Columns.OBS: observations}).numpy().astype(np.float64)
            magnitudes = [0.0] * len(piece)
            carried = 0.0
            for t in reversed(range(len(piece))):
                following = 0.0 if piece.is_terminated and t == len(piece) - 1 else values[t + 1]
                delta = piece.get_rewards()[t] + DISCOUNT * following - values[t]
                carried = delta + DISCOUNT * LAMBDA * carried
                magnitudes[t] = abs(carried)
            total = self._sums.setdefault(piece.id_, np.zeros(2))
            total += (sum(magnitudes), len(piece))
            if piece.is_done:
                scores.setdefault(levels[piece.id_], []).append(total[0] / total[1])
        self.scores |= scores


def module_of(learner: Any) -> Any:
    return copy.deepcopy(learner.module["default_policy"].unwrapped())


def assert_played_as_told(episodes: list[Any]) -> None:
    for episode in episodes:
        level_id = episode.custom_data["level_id"]
        assert level_id in LEVELS and (episode.get_observations()[:, 0] == level_id).all()
        assert all(info["level_id"] == level_id for info in episode.get_infos())


def scores_of(algorithm: Algorithm) -> dict[int, float]:
    rows = rllib_ext.level_buffer(algorithm).probabilities()
    return dict(zip(rows["level_id"].tolist(), rows["score"].tolist(), strict=True))


def assert_lossless(result: dict[str, Any]) -> None:
    assert [result["levels"][key] for key in ("fragments_dropped", "gaps", "episodes_lost", "restarts")] == [0, 0, 0, 0]


def test_what_is_assigned_is_played_and_scored_by_the_values_before_the_update(
    two_runners: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(two_runners, monkeypatch)
    for _ in range(6):
        result = two_runners.train()
    assert_played_as_told(watched.episodes)
    begun = {episode.id_ for episode in watched.episodes}
    # each of four environments may have been told a level that it has not begun
    assert result["levels"]["episodes"] - 4 <= len(begun) <= result["levels"]["episodes"]
    assert any(episode.t_started > 0 for episode in watched.episodes)  # scores are joined over updates
    scores = scores_of(two_runners)
    assert len(scores) == result["levels"]["levels"] >= 10 and result["levels"]["replayed"] > 0
    assert 1.0 <= result["levels"]["effective_levels"] <= result["levels"]["levels"]
    assert scores == pytest.approx({level_id: those[-1] for level_id, those in watched.scores.items()}, rel=1e-4)
    assert_lossless(result)


def test_evaluation_plays_held_out_levels_and_measures_the_gap(two_runners: Algorithm) -> None:
    before = rllib_ext.level_buffer(two_runners).stats()
    results = two_runners.evaluate()
    figures = results["levels"]
    assert (figures["held_out_episodes"], figures["training_episodes"]) == (8, 8)
    assert figures["held_out_return_mean"] == results["env_runners"]["episode_return_mean"] == 0
    assert figures["generalization_gap"] == figures["training_return_mean"] > 0
    assert two_runners.evaluate()["env_runners"]["episode_return_mean"] == 0
    assert rllib_ext.level_buffer(two_runners).stats() == before


def next_choices(state: dict[str, Any]) -> list[int]:
    levels = LevelBuffer(LEVELS, score=L1ValueLoss(DISCOUNT, LAMBDA), staleness_weight=0.3, seed=5)
    levels.load_state_dict(state)
    return [levels.next_level(f"actor {number}") for number in range(10)]


def test_a_checkpoint_holds_the_levels(two_runners: Algorithm, tmp_path: Path) -> None:
    path = two_runners.save_to_path(tmp_path / "checkpoint")
    elsewhere = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    two_runners.save_to_path("elsewhere", filesystem=elsewhere)
    levels = rllib_ext.level_buffer(two_runners)
    state, stats, rows = levels.state_dict(), levels.stats(), levels.probabilities()
    choices = next_choices(state)
    two_runners.train()
    assert levels.stats()["episodes"] > stats["episodes"]
    two_runners.restore_from_path("elsewhere", filesystem=elsewhere)
    assert (levels.probabilities() == rows).all()
    two_runners.train()
    two_runners.restore_from_path(path)
    assert (levels.probabilities() == rows).all()
    assert next_choices(levels.state_dict()) == choices
    figures = ("levels", "episodes", "in_flight", "replayed", "score_mean", "staleness_mean")
    assert [levels.stats()[key] for key in figures] == [stats[key] for key in figures]
    for _ in range(3):
        result = two_runners.train()
    assert result["levels"]["in_flight"] <= 4 + 4  # what was in flight at the save is forgotten
    assert result["levels"]["levels"] >= stats["levels"]


def test_a_lost_env_runner_comes_back_and_plays_levels(two_runners: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rllib_ext.level_buffer(two_runners).stats()
    (runner, *_) = two_runners.env_runner_group._worker_manager.actors().values()
    process = ray.get(runner.apply.remote(process_of))
    ray.kill(runner, no_restart=False)
    watched = Watched(two_runners, monkeypatch)
    for _ in range(30):
        result = two_runners.train()
        if result["fault_tolerance"]["num_healthy_workers"] == 2:
            break
    for _ in range(3):
        result = two_runners.train()
    present = two_runners.env_runner_group.foreach_env_runner(process_of, local_env_runner=False)
    assert len(set(present)) == 2 and process not in present
    assert_played_as_told(watched.episodes)
    assert result["levels"]["episodes_lost"] > before["episodes_lost"]  # what it played
    assert result["levels"]["in_flight"] <= 8 and result["levels"]["episodes"] > before["episodes"]


def process_of(env_runner: Any) -> int:
    import os

    return os.getpid()


def test_a_lost_level_buffer_goes_on_from_the_last_result(two_runners: Algorithm) -> None:
    levels = rllib_ext.level_buffer(two_runners)
    before = two_runners.train()["levels"]
    ray.kill(levels.actor, no_restart=False)
    while (after := levels.stats())["restarts"] == 0:  # the old process may still answer
        time.sleep(0.05)
    assert after == {**before, "restarts": 1, "fragments_dropped": 0, "episodes_lost": 0, "gaps": 0}
    for _ in range(2):
        result = two_runners.train()
    assert result["levels"]["episodes"] > before["episodes"] and result["levels"]["in_flight"] <= 8


def test_pieces_of_an_episode_come_together_from_two_learners(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(PPOConfig, 0).learners(num_learners=2).env_runners(rollout_fragment_length=33)
    algorithm = config.training(train_batch_size_per_learner=33).build_algo()
    watched = Watched(algorithm, monkeypatch)
    for _ in range(4):
        result = algorithm.train()
    assert_played_as_told(watched.episodes)
    assert watched.cuts > 0  # some episodes went to both
    scores = scores_of(algorithm)
    assert scores.keys() == watched.scores.keys()
    for level_id, those in watched.scores.items():  # which of two is the later one depends on the Learners' pace
        assert any(scores[level_id] == pytest.approx(one, rel=1e-4) for one in those)
    assert_lossless(result)


@pytest.mark.parametrize(("algorithm", "runners"), [(APPOConfig, 0), (IMPALAConfig, 1)])
def test_asynchronous_algorithms(algorithm: Any, runners: int) -> None:
    built = small(algorithm, runners).learners(num_learners=runners).build_algo()
    for iteration in range(25):
        result = built.train()
        levels, finished = result["levels"], result["env_runners"]["num_episodes_lifetime"]
        # Scores are as late as the Learners, so how many there are after a few iterations depends on the machine.
        if iteration >= 4 and levels["levels"] >= 8 and levels["episodes"] - levels["in_flight"] >= finished / 2:
            break
    else:
        pytest.fail(f"of {finished} finished episodes few were scored: {levels}")
    assert_lossless(result)
    for level_id, score in scores_of(built).items():
        assert score > 0 or level_id == 0


class ClipRewards(ConnectorV2):
    """A user's connector, after which no return is a success."""

    def __call__(self, *, batch: Any, episodes: Any, **rest: Any) -> Any:
        for episode in episodes:
            episode.rewards.data = np.minimum(episode.rewards.data, 0.1)
        return batch


@pytest.mark.parametrize("clips", [False, True])
def test_levels_of_a_set_are_scored_by_the_success_of_their_episodes(
    monkeypatch: pytest.MonkeyPatch, clips: bool
) -> None:
    corridors = LevelSet([f"corridor {level}" for level in LEVELS], groups=["short", "long"] * 6)
    levels = LevelBuffer(corridors, score=scores.Learnability(window=4, success=25.0), seed=0)
    config = small(PPOConfig, 0)
    if clips:
        config.learners(learner_connector=lambda *spaces: ClipRewards())
    algorithm = rllib_ext.configure(config, levels=levels, held_out_levels=HELD_OUT).build_algo()
    watched = Watched(algorithm, monkeypatch)
    for _ in range(20):
        result = algorithm.train()
    returns: dict[str, float] = {}
    outcomes: dict[int, list[bool]] = {}
    for piece in watched.episodes:
        returns[piece.id_] = returns.get(piece.id_, 0.0) + piece.get_return()
        if piece.is_done:
            outcomes.setdefault(piece.custom_data["level_id"], []).append(returns[piece.id_] >= 25.0)
    rows = rllib_ext.level_buffer(algorithm).probabilities()
    assert rows["level_id"].sort().values.tolist() == sorted(outcomes) and len(outcomes) == 12
    for row in rows:
        last = outcomes[int(row["level_id"])][-4:]
        assert (float(row["successes"]), float(row["outcomes"])) == (sum(last), len(last))
        assert float(row["score"]) == pytest.approx(sum(last) / len(last) * (1 - sum(last) / len(last)))
    assert rows["successes"].sum() > 0 and (rows["successes"] < rows["outcomes"]).any()
    assert result["levels"]["effective_levels"] > 2
    assert_lossless(result)


class Counted(LevelServer):
    """Counts the calls that draw."""

    calls = 0

    def draw(self, *arguments: Any, **options: Any) -> list[int]:
        self.calls += 1
        return super().draw(*arguments, **options)

    def counted(self) -> int:
        return self.calls


def supplied(tmp_path: Path) -> tuple[Any, Any, LevelBuffer]:
    """A level server, an EnvRunner of two environments that draws from it, and an equal buffer without Ray."""
    own, direct = (LevelBuffer(LEVELS, score=L1ValueLoss(), replay_in_flight=False, seed=0) for _ in range(2))
    options = {"environments": 2, "max_lag": 4, "max_pending": 100, "flush": False, "spare": str(tmp_path)}
    server = ray.remote(num_cpus=0)(Counted).remote(ray.cloudpickle.dumps(own), **options)
    runner = SimpleNamespace(worker_index=1, config=SimpleNamespace(num_envs_per_env_runner=2))
    attach_player(runner, server)
    return server, runner, direct


def test_an_env_runner_draws_the_levels_of_a_round_in_one_call(tmp_path: Path) -> None:
    server, runner, direct = supplied(tmp_path)
    supply = runner.level_supply
    expected: list[int] = []
    # begun, drawn, calls; what is left over is played first
    rounds = [(6, 6, 3), (6, 6, 1), (6, 6, 1), (9, 10, 3), (9, 8, 1), (2, 9, 1), (2, 0, 0)]
    for number, (begun, ahead, calls) in enumerate(rounds):
        before = ray.get(server.counted.remote())
        if number:
            assert supply.is_due
            supply.begin_round()
            assert not supply.is_due
        drawn = [supply.take(None) for _ in range(begun)]
        expected += [direct.next_level(f"{number}-{place}") for place in range(ahead)]  # by the scores until here
        names = [(name, level_of()) for name, level_of in drawn]
        assert ray.get(server.counted.remote()) == before + calls
        played, expected = expected[:begun], expected[begun:]
        assert [level_id for _, level_id in names] == played
        reward = np.arange(begun, dtype=np.float32)
        fragments = [
            Fragment(name, 0, reward[place : place + 1], np.zeros(2, np.float32), True, False)
            for place, (name, _) in enumerate(names)
        ]
        ray.get(server.score.remote(fragments))
        for place, level_id in enumerate(played):
            actor = next(
                name for name in list(direct.running.state_dict()["actors"]) if level_id in direct.in_flight(name)
            )
            direct.update(actor, level_id, fragments[place].steps(), True)
        end_round(env_runner=runner)
    stats = ray.get(server.stats.remote())
    assert stats["in_flight"] == len(expected) == 5 and stats["episodes_lost"] == stats["fragments_dropped"] == 0
    ray.kill(server)


def test_an_episode_that_was_broken_off_is_given_up_with_the_next_call(tmp_path: Path) -> None:
    server, runner, _ = supplied(tmp_path)
    supply = runner.level_supply
    first, second = (supply.take(None) for _ in range(2))
    third = supply.take(second[0])  # a broken-off episode is abandoned with the next call
    assert third not in (first, second) and third[1]() in LEVELS
    stats = ray.get(server.stats.remote())
    assert (stats["episodes"], stats["in_flight"], stats["episodes_lost"]) == (4, 3, 1)
    ray.kill(server)


def test_a_level_that_was_never_played_goes_to_the_next_episode() -> None:
    names: list[str] = []

    def started(*, episode: Any, env: Any, env_index: int, **ignored: Any) -> None:
        assert episode.custom_data["level_id"] == env.envs[env_index].level_id
        names.append(episode.id_)

    # each sample begins with a reset of both environments, one of which has been given a level at the end of the last
    config = small(PPOConfig, 0).env_runners(batch_mode="complete_episodes").callbacks(on_episode_start=started)
    result = rllib_ext.configure(config, levels=LevelBuffer(LEVELS, seed=0)).build_algo().train()
    assert len(set(names)) == len(names) >= 8
    assert 0 <= result["levels"]["episodes"] - len(names) <= 2  # two are drawn at a time


@pytest.mark.parametrize("seed", [0, None])
def test_levels_are_set_before_the_first_reset(seed: int | None) -> None:
    config = small(PPOConfig, 0).environment(Told).debugging(seed=seed)
    result = rllib_ext.configure(config, levels={"levels": 12}).build_algo().train()
    assert result["levels"]["episodes"] > result["levels"]["levels"] > 0


@pytest.fixture(scope="module")
def scores_new_levels(shared_ray: None) -> Iterator[Algorithm]:
    """PPO in the driver that learns from replayed levels alone, used by the tests one after the other."""
    algorithm = small(PPOConfig, 0, train_on_new_levels=False, min_fill=0.5).build_algo()
    yield algorithm
    algorithm.stop()


def weights_of(algorithm: Algorithm) -> list[torch.Tensor]:
    return list(module_of(algorithm.learner_group._learner).parameters())


def test_ppo_does_not_learn_from_levels_that_are_scored_only(scores_new_levels: Algorithm) -> None:
    before, moved = weights_of(scores_new_levels), []
    for _ in range(4):
        result = scores_new_levels.train()
        pairs = zip(before, weights_of(scores_new_levels), strict=True)
        moved.append((result["levels"]["replayed"] > 0, any(not torch.equal(one, other) for one, other in pairs)))
    assert moved[0] == (False, False) and moved[-1] == (True, True)
    assert_lossless(result)


def test_an_algorithm_that_is_built_again_goes_on(scores_new_levels: Algorithm, tmp_path: Path) -> None:
    path = scores_new_levels.save_to_path(tmp_path / "checkpoint")
    levels = rllib_ext.level_buffer(scores_new_levels)
    again = Algorithm.from_checkpoint(path)
    restored = rllib_ext.level_buffer(again)
    assert restored.name != levels.name and (restored.probabilities() == levels.probabilities()).all()
    assert next_choices(restored.state_dict()) == next_choices(levels.state_dict())
    result = again.train()
    again.stop()
    wait_until_ended(restored.actor)
    assert_lossless(result)
    assert result["levels"]["episodes"] > levels.stats()["episodes"]
    shutil.rmtree(Path(path) / "levels")
    with pytest.raises(FileNotFoundError, match="holds no levels: it was saved without rllib_ext.configure"):
        scores_new_levels.restore_from_path(path)
    scores_new_levels.restore_from_path(path, restore_levels=False)


def test_the_example(run_example: Any) -> None:
    lines = run_example("rllib_plr_ppo.py")
    table = rows(lines, "env_steps  mazes_scored  replayed  staleness")
    assert len(table) == 5 and int(table[-1][0]) >= 3_000 and int(table[-1][1]) >= 60 and float(table[-1][2]) > 0
    assert all(abs(float(held_out) + float(gap) - float(trained)) < 0.02 for *_, held_out, trained, gap in table)
    assert sum(line.startswith("with probability") for line in lines) == 3
    checkpoint = Path(lines[-1].removeprefix("checkpoint with the level buffer: "))
    assert (checkpoint / "levels").is_dir()
    shutil.rmtree(checkpoint)
