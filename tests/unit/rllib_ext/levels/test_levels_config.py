# SPDX-License-Identifier: Apache-2.0
"""What ``configure(config, levels=...)`` checks and adds; real EnvRunners that evaluate play held-out levels."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray import cloudpickle
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from tensordict import TensorDict

import rllib_ext
from lightning_replay import forking
from lightning_replay.levels import LevelBuffer, SequentialLevels, UniformLevels, scores
from rllib_ext.hooks import EVENTS
from rllib_ext.levels import level_assignment
from rllib_ext.levels.checks import built_levels
from rllib_ext.levels.evaluation import RESULTS, measure_gap
from rllib_ext.levels.evaluation import test_of as level_test_of


class Numbered(gym.Env):
    """Observes its level; every third step ends an episode."""

    observation_space = gym.spaces.Box(0, 2.0**31, (1,), np.float64)
    action_space: gym.Space = gym.spaces.Discrete(3)

    def __init__(self, config: Any = None) -> None:
        pass

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        assert seed is not None
        self.level, self.count = seed, 0
        return np.array([self.level], np.float64), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return np.array([self.level], np.float64), 1.0, self.count == 3, False, {}


class Constant(Numbered):
    """Ignores its seed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed=seed)
        return np.zeros_like(observation), info


class Forgetful(Numbered):
    """The same level begins in several ways."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed=seed)
        return observation + np.random.default_rng().random(1), info


class Few(Numbered):
    told = 0

    def set_level(self, level_id: int) -> None:
        if level_id >= 10:
            raise KeyError(level_id)
        self.told = level_id

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=self.told)


class Steered(Numbered):
    """Takes real actions."""

    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)


class Named(Numbered):
    """Observes a dictionary."""

    observation_space = gym.spaces.Dict({"level": Numbered.observation_space})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed=seed)
        return {"level": observation}, info


class NoLevels(Numbered):
    def __init__(self, config: Any = None) -> None:
        raise OSError("no screen")


def plain(algorithm: type[AlgorithmConfig] = PPOConfig, env: Any = Numbered) -> AlgorithmConfig:
    return algorithm().environment(env).env_runners(num_env_runners=0).debugging(seed=3)


def configured(config: AlgorithmConfig, levels: Any = None, **options: Any) -> AlgorithmConfig:
    levels = {"levels": 8} if levels is None else levels
    return rllib_ext.configure(config, levels=levels, **{"require_cpus": False, **options})


def hooks(config: AlgorithmConfig) -> dict[str, Any]:
    return {name: getattr(config, f"callbacks_{name}") for name in EVENTS}


def test_the_config_travels_without_the_librarys_torch() -> None:
    config = configured(plain())
    (hook,) = config.callbacks_on_algorithm_init
    assert isinstance(hook.keywords["packed"], bytes)
    assert isinstance(cloudpickle.loads(hook.keywords["packed"]), LevelBuffer)


def test_levels_from_another_process_are_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = LevelBuffer(8, seed=0)
    monkeypatch.setattr(forking, "process", "another")  # as where Tune builds the algorithm
    with pytest.raises(RuntimeError, match="is a copy of one in another process"):
        levels.next_level(0)
    configured(plain(), levels)


def test_levels_are_an_object_or_options_or_a_class_path() -> None:
    config = plain().training(gamma=0.9, lambda_=0.7)
    options = {
        "levels": 5,
        "prioritization": {"class_path": "lightning_replay.levels.Greedy", "init_args": {"epsilon": 0.5}},
        "first_score": "smooth",
    }
    given = [
        built_levels(options, config),
        *(
            built_levels({"class_path": f"lightning_replay.levels.{kind}", "init_args": {"levels": 5, **more}}, config)
            for kind, more in (("LevelBuffer", {"seed": 1}), ("SequentialLevels", {}), ("tscl", {}))
        ),
        built_levels(UniformLevels(5, seed=0), config),
    ]
    assert [type(one) for one in given] == [LevelBuffer, LevelBuffer, SequentialLevels, LevelBuffer, UniformLevels]
    assert [one.first_score for one in given[:2]] == ["smooth", "replace"]
    assert first_score(given[0]) == pytest.approx((0.9 + 0.9 * 0.7 * 0.9) / 2)  # discount and λ are the algorithm's
    assert first_score(given[1]) == first_score(given[0])
    of_impala = built_levels({"levels": 5}, plain(IMPALAConfig))
    assert first_score(of_impala) == pytest.approx((0.99 + 0.99 * 0.95 * 0.99) / 2)
    assert torch.equal(given[0].table.generator.get_state(), generator_state(3))
    assert torch.equal(given[1].table.generator.get_state(), generator_state(1))
    of_paper = built_levels({"class_path": "lightning_replay.levels.plr", "init_args": {"levels": 5}}, config)
    assert first_score(of_paper) == first_score(given[1]) and of_paper.table.staleness_weight == 0.1
    assert torch.equal(of_paper.table.generator.get_state(), generator_state(3))
    score = {"class_path": "lightning_replay.levels.scores.PolicyEntropy"}
    assert first_score(built_levels({"levels": 5, "score": score}, config)) == pytest.approx(1.0)


def generator_state(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def first_score(levels: Any) -> float:
    """Of two steps, the values 0, 0 and 1 and no rewards, ended by a time limit."""
    levels = cloudpickle.loads(cloudpickle.dumps(levels))
    zero, ends = torch.zeros(2), torch.tensor([False, True])
    following = {"reward": zero, "state_value": torch.tensor([0.0, 1.0]), "terminated": ~ends & ends, "done": ends}
    steps = TensorDict({"state_value": zero, "logits": torch.zeros(2, 4), "next": following}, [2])
    return levels.update("actor", levels.next_level("actor"), steps, episode_done=True)


def no_connectors(config: AlgorithmConfig) -> AlgorithmConfig:
    return config.learners(add_default_connectors_to_learner_pipeline=False)


def several_agents(config: AlgorithmConfig) -> AlgorithmConfig:
    return config.multi_agent(policies={"one", "other"}, policy_mapping_fn=lambda *_, **__: "one")


def own_level(generator: torch.Generator) -> int:
    return 2**31


def own_score(steps: Any) -> float:
    return float(steps["no such key"].sum())


def half(level_id: int, generator: torch.Generator) -> int:
    return level_id // 2


@pytest.mark.parametrize(
    ("config", "levels", "message"),
    [
        (plain(DQNConfig), None, "DQN does not learn from whole episodes .*; levels are replayed with PPO"),
        (PPOConfig(), None, "the config has no environment"),
        (plain().api_stack(False, False), None, "the config is on the old API stack"),
        (several_agents(plain()), None, "levels are replayed for one agent; the config has several"),
        (plain(APPOConfig).learners(num_aggregator_actors_per_learner=1), None, "num_aggregator_actors_per_learner"),
        (no_connectors(plain()), None, "add_default_connectors_to_learner_pipeline is False"),
        (plain().env_runners(gym_env_vectorize_mode="async"), None, "gym_env_vectorize_mode is 'async'"),
        (plain(IMPALAConfig), {"levels": 8, "train_on_new_levels": False}, "must not be learned from; IMPALA builds"),
        (plain(APPOConfig), LevelBuffer(capacity=8, editor=half), "must not be learned from; APPO builds its"),
        (plain(env=Constant), None, "ignores its level"),
        (plain(env=Forgetful), None, "does not follow its level"),
        (plain(env=Named), None, "the observations of .*Named.* are a Dict, .* FlattenObservations"),
        (plain(), {"levels": [1, 1]}, "level 1 is given twice"),
        (plain(), {"levels": [2**31, 5]}, "level 2147483648 is drawn; the ids of levels are integers from 0"),
        (plain(), LevelBuffer(capacity=8, generate=own_level, seed=0), "level 2147483648 is drawn"),
        (plain(), {"levels": 8, "score": own_score}, "the score of the level buffer cannot be computed: .*no such key"),
        (plain(env=Steered), {"levels": 8, "score": scores.PolicyEntropy()}, "logits only where actions are discrete"),
        (plain(), {"levelz": 8}, "LevelBuffer has no argument 'levelz'. Did you mean 'levels'"),
        (plain(), {"levels": 8, "score": {"class_path": "PositiveValueLoss"}}, "levels.score names .*L1ValueLoss'"),
    ],
)
def test_what_cannot_work_is_refused(config: AlgorithmConfig, levels: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        configured(config, levels)
    assert not any(hooks(config).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out_levels": [7, 8]}, "1 of held_out_levels are trained on, as .7."),
        ({"held_out_levels": 0}, "held_out_levels is 0; it must be how many, from 1 to 1000000, or different ids"),
        ({"held_out_levels": [9, 9]}, "different ids from 0"),
    ],
)
def test_held_out_levels_are_others(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configured(plain(), **options)


def test_scores_after_every_update_need_one_learner_and_ppo() -> None:
    configured(plain(), flush=True)
    for config in (plain().learners(num_learners=2), plain(IMPALAConfig)):
        with pytest.raises(ValueError, match="flush=True makes scores of unfinished episodes after every update"):
            configured(config, flush=True)


def test_other_levels_and_too_few_cpus_are_refused() -> None:
    with pytest.raises(TypeError, match=r"levels is 3; it must be LevelBuffer"):
        configured(plain(), 3)
    with pytest.raises(TypeError, match=r"config is \{'levels': 8\}; .* PPOConfig\(\), .* and after it the levels"):
        rllib_ext.configure({"levels": 8}, levels=plain())  # type: ignore[type-var,arg-type]
    with pytest.raises(ValueError, match="999 EnvRunners"):
        configured(plain().env_runners(num_env_runners=999), require_cpus=True)


def test_the_environment_is_looked_at_before_any_env_runner_is() -> None:
    with pytest.raises(OSError, match="no screen"):
        configured(plain(env=NoLevels))
    configured(plain(env=NoLevels), check_environments=False)
    evaluated = plain(env=Few).evaluation(evaluation_interval=1)
    with pytest.raises(ValueError, match="cannot play level 2147483647, which evaluation would: KeyError"):
        configured(evaluated)
    configured(evaluated, held_out_levels=[8, 9])
    configured(plain(env="CartPole-v1"))


def test_held_out_levels_that_nothing_plays_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rllib_ext"):
        configured(plain())
        configured(plain().evaluation(evaluation_interval=1), held_out_levels=5)
        configured(plain().evaluation(evaluation_num_env_runners=1), held_out_levels=5)
        assert "held_out_levels" not in caplog.text
        configured(plain(), held_out_levels=5)
    assert "played by evaluation, which is off" in caplog.text and ".evaluation(evaluation_interval=" in caplog.text


def test_a_score_with_another_discount_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rllib_ext"):
        configured(plain().training(gamma=0.9, lambda_=0.8), LevelBuffer(8))
        configured(plain(IMPALAConfig).training(gamma=0.9), LevelBuffer(8))
    first, second = (one.getMessage() for one in caplog.records if one.name.startswith("rllib_ext"))
    assert "scored with L1ValueLoss(discount=0.999, gae_lambda=0.95), and" in first
    assert first.endswith("give the level buffer score=L1ValueLoss(discount=0.9, gae_lambda=0.8)")
    assert second.endswith("score=L1ValueLoss(discount=0.9)")
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="rllib_ext"):
        configured(plain().training(gamma=0.9))
        configured(plain(), UniformLevels(8))
    assert not [record for record in caplog.records if record.name.startswith("rllib_ext")]


def evaluating(config: AlgorithmConfig, worker_index: int) -> SingleAgentEnvRunner:
    config = config.copy(copy_frozen=False)
    config.freeze()
    return SingleAgentEnvRunner(config=config.get_evaluation_config_object(), worker_index=worker_index)


def played(runner: SingleAgentEnvRunner, episodes: int) -> list[int]:
    result = runner.sample(num_episodes=episodes, random_actions=True)
    for episode in result:
        assert (episode.get_observations()[:, 0] == episode.custom_data["level_id"]).all()
    return [episode.custom_data["level_id"] for episode in result]


def test_held_out_levels_are_played_equally_often_by_all_that_evaluate() -> None:
    config = plain().env_runners(num_envs_per_env_runner=2).evaluation(evaluation_num_env_runners=2)
    configured(config, held_out_levels=range(100, 112))
    runners = [evaluating(config, index) for index in (1, 2)]
    assert sorted(played(runners[0], 2)) == [100, 102] and sorted(played(runners[1], 2)) == [101, 103]
    rest = [level_id for _ in range(2) for runner in runners for level_id in played(runner, 2)]
    # levels that were told to environments and not played wait for the next evaluation
    assert sorted(rest) == list(range(104, 112))
    for runner in runners:
        assert level_test_of(runner, range(100, 112)).finish(runner) == [3.0] * 6


HELD_OUT = range(100, 106)


class Uneven(Numbered):
    """Every fourth level takes 50 steps, the others 2; each step gives the level as reward."""

    fails_at: int | None = None  # step, counted from now on

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if Uneven.fails_at is not None:
            Uneven.fails_at -= 1
            if Uneven.fails_at == 0:
                Uneven.fails_at = None
                raise OSError("the simulator is gone")
        observation, *_ = super().step(action)
        return observation, float(self.level), self.count == length(self.level), False, {}


def length(level_id: int) -> int:
    return 50 if level_id % 4 == 0 else 2


def returns_on(levels: Any) -> list[float]:
    return [float(level_id * length(level_id)) for level_id in levels]


def uneven(environments: int = 2, worker_index: int = 0, runners: int = 0, **options: Any) -> SingleAgentEnvRunner:
    """An EnvRunner that evaluates, without Ray."""
    config = PPOConfig().environment(Uneven).debugging(seed=3)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=environments)
    config.fault_tolerance(restart_failed_sub_environments=True)
    config.evaluation(evaluation_interval=1, evaluation_num_env_runners=runners)
    rllib_ext.configure(config, levels={"levels": 12}, held_out_levels=HELD_OUT, require_cpus=False, **options)
    return evaluating(config, worker_index)


@pytest.mark.parametrize("environments", [1, 2, 5])
def test_each_level_counts_once_however_long_its_episode(environments: int) -> None:
    runner = uneven(environments)
    levels = [3, 4, 5, 6, 8, 9, 12, 7]
    assert sorted(level_test_of(runner, HELD_OUT).play(runner, levels)) == sorted(returns_on(levels))


def test_held_out_levels_count_once_though_rllib_breaks_the_long_ones_off() -> None:
    runner = uneven()
    first, second = HELD_OUT[:3], HELD_OUT[3:]
    for levels in ([*HELD_OUT], first, second, [*HELD_OUT] * 2):
        assert len(runner.sample(num_episodes=len(levels))) == len(levels)
        runner.get_metrics()
        assert sorted(level_test_of(runner, HELD_OUT).finish(runner)) == sorted(returns_on(levels))
        assert not runner.get_metrics()["num_episodes"].peek() > 0


def test_a_level_that_was_broken_off_is_given_again() -> None:
    runner = uneven()
    for _ in range(2):  # 100 is long, in the first environment
        ended = runner.sample(num_episodes=1)
        assert runner.env.unwrapped.envs[0].level_id == 100
    assert ended[0].custom_data["level_id"] == 102


def test_without_the_gap_levels_are_played_in_turn() -> None:
    runner = uneven(1, generalization_gap=False)
    ended = [episode.custom_data["level_id"] for _ in range(2) for episode in runner.sample(num_episodes=4)]
    assert ended == [*HELD_OUT, *HELD_OUT[:2]]


def test_a_level_without_an_end_counts_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level_assignment, "MAX_EPISODE_STEPS", 20)
    runner = uneven()
    levels = [3, 4, 5]  # level 4 takes 50 steps
    with pytest.warns(UserWarning, match="an evaluation episode in <.*> had not ended after 20 steps"):
        played = level_test_of(runner, HELD_OUT).play(runner, levels)
    assert played == [3.0 * 2, 4.0 * 20, 5.0 * 2]


@pytest.mark.parametrize("fails_at", [1, 30])
def test_levels_are_played_anew_after_an_environment_failed(fails_at: int) -> None:
    runner = uneven()
    Uneven.fails_at = fails_at
    levels = [4, 5, 8, 9]
    assert level_test_of(runner, HELD_OUT).play(runner, levels) == returns_on(levels)
    assert Uneven.fails_at is None


class Group:
    def __init__(self, runners: list[SingleAgentEnvRunner]) -> None:
        self.runners = runners

    def num_remote_env_runners(self) -> int:
        return sum(bool(runner.worker_index) for runner in self.runners)

    def foreach_env_runner(self, function: Any, **ignored: Any) -> list[Any]:
        return [function(runner) for runner in self.runners]


@pytest.mark.parametrize("episodes", [{0: 2}, {2: 1}, {1: 1, 3: 1}, {1: 1, 3: 0}, {1: 2, 3: None}])
def test_the_gap_needs_no_env_runner_of_a_certain_index(episodes: dict[int, int | None]) -> None:
    runners = [uneven(1, index, max(episodes)) for index in episodes]
    for runner, count in zip(runners, episodes.values(), strict=True):
        if count is not None:  # an EnvRunner that came back has played nothing
            runner.sample(num_episodes=count)
    duration = sum(count or 0 for count in episodes.values())
    algorithm = SimpleNamespace(
        eval_env_runner_group=Group(runners),
        levels=SimpleNamespace(played_levels=lambda: [3, 4], gap_generator=np.random.default_rng(0)),
        config=SimpleNamespace(evaluation_sample_timeout_s=None),
    )
    results: dict[str, Any] = {}
    measure_gap(algorithm=algorithm, evaluation_metrics=results)
    figures = results[RESULTS]
    assert figures["held_out_episodes"] == figures["training_episodes"] == duration
    mean = figures["training_return_mean"]
    assert mean in returns_on([3, 4]) if duration == 1 else mean == np.mean(returns_on([3, 4]))
    assert figures["generalization_gap"] == mean - figures["held_out_return_mean"]
