# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import os
import re
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig

import rllib_ext
from lightning_replay.options import config_directory, config_files
from rllib_ext.__main__ import main
from rllib_ext.apex import ApexDQNConfig
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.config_file import Settings, Stop, parse, updates_per_env_step
from rllib_ext.environments import EnvironmentFromPath
from tests.goal_steps import distance
from tests.unit.rllib_ext.episodes import buffer_of, column, numbered, numbers

CONFIGS = [name for name in config_files() if name.startswith("rllib/")]
SMALL: dict[str, Any] = {
    "algorithm": "DQN",
    "environment": {"env": "CartPole-v1"},
    "training": {"n_step": [1, 3], "gamma": 0.9},
    "replay": {"recipe": "uniform", "capacity": 500},
    "stop": {"env_steps": 40},
}


def written(folder: Path, **sections: Any) -> Path:
    """A file of ``SMALL`` with other sections; ``None`` leaves one out."""
    given = {name: value for name, value in {**SMALL, **sections}.items() if value is not None}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(given))
    return path


def refused(message: str, path: Path, overrides: dict[str, Any] | None = None) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        rllib_ext.load_config(path, overrides)


def test_sections_are_method_calls(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        algorithm="SAC",
        environment={"env": "Pendulum-v1"},
        env_runners={"num_envs_per_env_runner": 2},
        rl_module={"model_config": {"fcnet_hiddens": [8]}},
        debugging={"seed": 7},
        checkpoint="somewhere",
        stop={"iterations": 3, "episode_return": 100},
    )
    config, settings = rllib_ext.load_config(path)
    assert type(config) is SACConfig and config.env == "Pendulum-v1" and config.seed == 7
    assert config.num_envs_per_env_runner == 2 and config.gamma == 0.9 and config.n_step == [1, 3]
    assert config.model_config["fcnet_hiddens"] == [8]
    assert settings == Settings(Stop(iterations=3, episode_return=100), "somewhere")


def test_the_config_is_configured(tmp_path: Path) -> None:
    path = written(tmp_path, configure={"restore": False})
    config, settings = rllib_ext.load_config(path, {"configure.incremental": False})
    assert type(config) is DQNConfig and settings.checkpoint is None
    assert config.replay_buffer_config == {"type": RecipeEpisodeReplayBuffer, "recipe": "uniform", "capacity": 500}
    (hook,) = config.callbacks_on_algorithm_init
    assert hook.keywords == {"restore": False, "incremental": False, "assign_tasks": False}


def test_environments_by_class_path(tmp_path: Path) -> None:
    path = "gymnasium.envs.classic_control.CartPoleEnv"
    environment = {"env": path, "env_config": {"sutton_barto_reward": True}}
    config, _ = rllib_ext.load_config(written(tmp_path, environment=environment))
    assert config.env is EnvironmentFromPath
    assert config.env(config.env_config).unwrapped._sutton_barto_reward
    rllibs_kind = "ray.rllib.examples.envs.classes.simple_corridor.SimpleCorridor"
    config, _ = rllib_ext.load_config(written(tmp_path, environment={"env": rllibs_kind}))
    assert config.env.__name__ == "SimpleCorridor" and config.env_config == {}
    for env, message in (("Nothing", "environment.env names .*, which cannot"), ("make", "no class of gymnasium.Env")):
        refused(message, written(tmp_path, environment={"env": f"gymnasium.{env}"}))


FLATTEN = "ray.rllib.connectors.env_to_module.FlattenObservations"


def test_connectors_and_functions_of_goals_by_class_path(tmp_path: Path) -> None:
    connector = {
        "class_path": "ray.rllib.connectors.env_to_module.PrevActionsPrevRewards",
        "init_args": {"n_prev_actions": 3},
    }
    runners = {"env_to_module_connector": connector}
    replay = {"recipe": "hindsight", "capacity": 500, "reward": "tests.goal_steps.distance"}
    config, _ = rllib_ext.load_config(written(tmp_path, env_runners=runners, replay=replay))
    assert config._env_to_module_connector(None, {}, None).n_prev_actions == 3
    (relabel,) = buffer_of(config.replay_buffer_config).replay.transform
    assert relabel._functions == (distance, None)
    connector["class_path"] = "ray.rllib.Nothing"
    refused("env_to_module_connector names 'ray.rllib.Nothing', which cannot", written(tmp_path, env_runners=runners))
    for wrong, error, message in (
        ({"class_path": FLATTEN, "init_args": 3}, ValueError, "accepted are class_path and init_args"),
        ({"init_args": {}}, TypeError, "it must be a connector by its class path, {class_path: ray.rllib.connectors"),
        (FLATTEN, TypeError, "it must be a connector by its class path"),
    ):
        with pytest.raises(error, match=message):
            rllib_ext.load_config(written(tmp_path, env_runners={"env_to_module_connector": wrong}))
    refused("reward is None and no env is given", written(tmp_path, replay={**replay, "reward": None}))


def test_rewards_are_shaped_as_a_file_says(tmp_path: Path) -> None:
    """The option that stands in the file as a comment, with returns over three steps too; gamma is 0.97."""
    text = (config_directory() / "rllib/sset_dqn_two_rooms.yaml").read_text()
    path = tmp_path / "shaped.yaml"
    path.write_text(re.sub(r"(?m)^( +)# (transform:|  )", r"\1\2", text))
    option = "replay.transform.init_args"
    condition = {"class_path": "lightning_replay.events.reward_at_least", "init_args": {"threshold": 4.0}}
    table = {"name": "goal", "condition": condition, "history_length": 2, "capacity": 50, "share": 0.5}
    own = {f"{option}.potential": "tests.unit.transforms.test_shaping.squared", "replay.tables": [table]}
    config, _ = rllib_ext.load_config(path, own)
    buffer = buffer_of(config.replay_buffer_config)
    buffer.add(numbered("episode", 6, terminated=True))  # observed are 0 to 6, and the rewards are 0 to 5
    for n_step in (1, 3):
        drawn = buffer.sample(200, n_step=n_step, gamma=0.97)
        for first, reward in zip(numbers(drawn), column(drawn, "get_rewards"), strict=True):
            steps = min(n_step, 6 - first)
            last = 0.0 if first + steps == 6 else 0.97**steps * ((first + steps) ** 2 + 1)
            total = sum(0.97**step * (first + step) for step in range(steps))
            assert reward == pytest.approx(total + last - (first**2 + 1), abs=1e-4)
    refused("a transform of the replay has the discount 0.9, and gamma is 0.97", path, {f"{option}.discount": 0.9})
    refused("potential names 'tests.nowhere', which cannot be imported", path, {f"{option}.potential": "tests.nowhere"})


def test_own_recipes_by_import_path(tmp_path: Path) -> None:
    path = "lightning_replay.recipes.prioritized"
    replay = {"recipe": path, "capacity": 500, "priority_exponent": 0.25}
    config, _ = rllib_ext.load_config(written(tmp_path, replay=replay))
    assert buffer_of(config.replay_buffer_config).replay.sampler.priority_exponent == 0.25
    refused("has no option 'priority_exponnt'", written(tmp_path, replay={**replay, "priority_exponnt": 1}))
    for recipe, message in {
        "no_such_module.recipe": "recipe names 'no_such_module.recipe', which cannot be imported",
        "math.sqrt": "recipe 'math.sqrt' has no option 'capacity'; accepted are x",
        "lightning_replay.recipes.surprise_retention": "keeps rows by importance, .* name the parts",
    }.items():
        refused(message, written(tmp_path, replay={"recipe": recipe, "capacity": 500}))


def test_overrides_by_dotted_key(tmp_path: Path) -> None:
    overrides = {"training.gamma": 0.5, "learners.num_learners": 0, "replay": {"recipe": "prioritized", "capacity": 60}}
    config, settings = rllib_ext.load_config(written(tmp_path), {**overrides, "checkpoint": "there"})
    assert (config.gamma, config.num_learners, settings.checkpoint) == (0.5, 0, "there")
    assert config.replay_buffer_config["recipe"] == "prioritized" and config.n_step == [1, 3]
    refused("checkpoint.a cannot be set", written(tmp_path, checkpoint="here"), {"checkpoint.a": 1})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"algorithm": None}, "algorithm is None; accepted are DQN, "),
        ({"replay": None}, "the file has no key 'replay'; algorithm, environment, replay and stop are needed"),
        ({"algorithm": "A2C"}, "algorithm is 'A2C'; accepted are DQN, ApexDQN, SAC, TQC, PPO, APPO, IMPALA"),
        ({"algorithm": "PPO", "replay": None}, "the file has no key 'levels'; algorithm, environment, levels and stop"),
        ({"algorithm": "PPO"}, "the key replay is for DQN, ApexDQN, SAC, TQC; algorithm is PPO, which takes levels"),
        ({"levels": {"levels": 9}}, "the key levels is for PPO, APPO, IMPALA; algorithm is DQN, which takes replay"),
        ({"algorithm": ["DQN"]}, r"algorithm is \['DQN'\]; accepted are"),
        ({"trainig": {}}, "the file has no 'trainig'; accepted are algorithm, .*training. Did you mean 'training'?"),
        ({"training": {"gama": 0.9}}, "training has no 'gama'; accepted are .*double_q, .* Did you mean 'gamma'?"),
        ({"env_runners": {"num_rollout_workers": 1}}, "env_runners has no 'num_rollout_workers'"),  # deprecated
        ({"training": {"replay_buffer_config": {}}}, "the key replay describes the buffer"),
        ({"training": 3}, "training is 3; it holds arguments by name"),
        ({"rl_module": {"model_config": {"fcnet_hidden": [8]}}}, "rl_module.model_config has no 'fcnet_hidden'"),
        ({"replay": {"recipe": "unifrom", "capacity": 10}}, "there is no recipe 'unifrom'"),
        ({"replay": {"recipe": "uniform", "capacity": 20}}, "capacity is 20, below the 32 rows of a train batch"),
        ({"configure": {"restores": True}}, "configure has no 'restores'; accepted are assign_tasks, check_env"),
        ({"stop": {}}, "stop is empty: training would never end"),
        ({"stop": {"steps": 3}}, "stop has no 'steps'; accepted are env_steps, episode_return, iterations"),
        ({"stop": {"env_steps": "many"}}, "stop.env_steps is 'many'; it must be a finite number"),
        ({"checkpoint": 3}, "checkpoint is 3; it must be a path"),
    ],
)
def test_what_is_not_accepted_is_said(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    refused(message, written(tmp_path, **sections))


@pytest.mark.parametrize(
    ("text", "message"),
    [("algorithm: [", "no valid YAML"), ("a: 1\na: 2", "no valid YAML: given twice: a"), ("", "holds no keys")],
)
def test_files_that_are_no_configs(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    refused(message, tmp_path / "config.yaml")


def test_a_missing_file_lists_those_of_the_library(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*nowhere.yaml; .*rllib/per_dqn_cartpole.yaml"):
        rllib_ext.load_config(tmp_path / "nowhere.yaml")


def test_numbers_as_people_write_them() -> None:
    assert parse("[3e-4, -1E+2, 2e5, 1.0e-3, 50_000, 3e, e4]") == [3e-4, -100.0, 2e5, 1e-3, 50_000, "3e", "e4"]


def test_the_first_limit_reached_ends_training() -> None:
    runners = {"num_env_steps_sampled_lifetime": 100, "episode_return_mean": 7.5}
    result = {"env_runners": runners, "training_iteration": 4}
    for reached in ({"env_steps": 100}, {"episode_return": 7.5}, {"env_steps": 101, "iterations": 4}):
        assert Stop(**reached).is_reached(result)
    assert not Stop(env_steps=101, iterations=5, episode_return=7.6).is_reached(result)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_file_begins_with_its_command_and_its_paper(name: str) -> None:
    text = (config_directory() / name).read_text()
    assert text.startswith(f"# python -m rllib_ext configs/{name}\n# ")
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert "https://" in "".join(comments)
    assert yaml.safe_load(text)["checkpoint"] == f"runs/{name.removesuffix('.yaml')}"


# Gradient steps for each environment step.
UPDATES = {
    "apex_dqn_cartpole": Fraction(1, 4),  # 16 rows for each step, in batches of 64
    "dpcer_sac_point_maze": Fraction(1, 4),
    "hindsight_sac_point_maze": Fraction(1),
    "nmer_sac_pendulum": Fraction(1),
    "per_dqn_cartpole": Fraction(1),
    "per_nstep_dqn_cartpole": Fraction(1, 3),  # RLlib's fragments are as long as its returns
    "plr_learnability_ppo_multiroom": Fraction(4 * 8, 4_096),  # epochs and minibatches
    "plr_ppo_multiroom": Fraction(4 * 8, 4_096),
    "recurrent_dqn_recall": Fraction(1, 4),
    "retention_dqn_atari": Fraction(1),  # as in the paper
    "sharded_dqn_cartpole": Fraction(1, 4),  # 2 EnvRunners with 4 environments, 3 steps each
    "sset_dqn_two_rooms": Fraction(1, 8),  # 2 EnvRunners with 2 environments, 2 steps each
    "two_learners_dqn_cartpole": Fraction(1, 4),
    "uniform_sac_pendulum": Fraction(1),
}


UNCHECKED = {"require_cpus": False, "check_environments": False}


def test_each_file_states_its_updates_per_step() -> None:
    stated, computed = {}, {}
    for name in CONFIGS:
        (found,) = re.findall("^# Updates per environment step: (.*)$", (config_directory() / name).read_text(), re.M)
        config, _ = rllib_ext.load_config(config_directory() / name, {"configure": UNCHECKED})
        stated[name[6:-5]] = Fraction(found)
        computed[name[6:-5]] = pytest.approx(updates_per_env_step(config), rel=1e-9)
    assert stated == UPDATES and stated == computed


def test_updates_per_step_of_other_configs() -> None:
    config = DQNConfig().environment("CartPole-v1").training(train_batch_size_per_learner=32, training_intensity=2)
    assert updates_per_env_step(config.env_runners(num_env_runners=0)) == 1 / 16  # 16 rounds of one step
    assert math.isnan(updates_per_env_step(config.env_runners(batch_mode="complete_episodes")))
    apex = ApexDQNConfig().environment("CartPole-v1")
    assert math.isnan(updates_per_env_step(apex))
    assert updates_per_env_step(apex.training(samples_per_insert=8)) == 8 / 512
    ppo = PPOConfig().environment("CartPole-v1").learners(num_learners=2)
    ppo.training(train_batch_size_per_learner=100, minibatch_size=30, num_epochs=3)
    assert updates_per_env_step(ppo) == 3 * 4 / 200
    assert updates_per_env_step(ppo.training(minibatch_size=None)) == 3 / 200


TINY = [
    *("--set", "stop.env_steps=80", "--set", "reporting.min_sample_timesteps_per_iteration=40"),
    *("--set", "training.num_steps_sampled_before_learning_starts=40"),
]


TINY_IMAGES = [
    *("--set", "rl_module.model_config.conv_filters=[[8, 8, 4], [16, 4, 2]]"),
    *("--set", "rl_module.model_config.head_fcnet_hiddens=[32]", "--set", "training.training_intensity=null"),
]


TINY_PPO = [
    *("--set", "stop.env_steps=80", "--set", "training.train_batch_size_per_learner=40"),
    *("--set", "training.minibatch_size=20", "--set", "training.num_epochs=1"),
    *("--set", "env_runners={num_env_runners: 0, num_envs_per_env_runner: 2, rollout_fragment_length: 10}"),
    *("--set", "levels.levels=2", "--set", "environment.env_config.max_steps=9"),
    *("--set", "evaluation={evaluation_interval: 2, evaluation_duration: 3}"),
]


# The driver's own EnvRunner plays and one Learner learns: each remote one starts for seconds. Two of them are in
# tests/integration/test_rllib_faults.py and test_rllib_cluster.py.
RUNNERS = {
    "rllib/two_learners_dqn_cartpole.yaml": ("env_runners.num_env_runners=0", "learners.num_learners=1"),
    "rllib/sharded_dqn_cartpole.yaml": (
        "env_runners.num_env_runners=0",
        "learners.num_learners=0",
        "replay.num_shards=1",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONFIGS if "plr" not in name])
def test_each_file_trains(name: str, shared_ray: None, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    settings, waiting = list(TINY), 0
    for setting in RUNNERS.get(name, ("env_runners.num_env_runners=0",)):
        settings += ["--set", setting]
    if "sac" in name:
        settings += ["--set", "training.train_batch_size_per_learner=64"]
    if "atari" in name:
        pytest.importorskip("ale_py")
        settings, waiting = [*settings, *TINY_IMAGES], 4  # the last steps wait for their returns over 5
    main([str(config_directory() / name), *settings])
    rate, header, *lines, last = capsys.readouterr().out.splitlines()
    evaluates = "evaluation_interval" in (config_directory() / name).read_text()
    assert header.split() == ["env_steps", "updates", "return", "stored", "drawn", *["eval"] * evaluates]
    env_steps, updates, _, stored, drawn, *evaluated = lines[-1].split()
    assert len(evaluated) == evaluates  # the second iteration is evaluated
    learned, played = (int(lines[-1].split()[place]) - int(lines[0].split()[place]) for place in (1, 0))
    expected = float(rate.removeprefix("updates per environment step: "))
    # A round of several environments goes on while one of them begins an episode, and has more steps then; the limiter
    # of Ape-X holds the ratio over a run that is longer than this one.
    is_vector = "num_envs_per_env_runner" in (config_directory() / name).read_text()
    tolerance = 0.25 if is_vector else 1e-3  # of a number with four digits
    assert "apex" in name or learned == pytest.approx(expected * played, rel=tolerance)
    assert int(updates) >= 1
    assert 80 <= int(env_steps) <= int(stored) + waiting and int(stored) <= int(env_steps) and int(drawn) >= 64
    folder = tmp_path / "runs" / name.removesuffix(".yaml") / "second"
    assert last == f"checkpoint with the replay buffer: {folder}" and (folder / "replay_buffer").is_dir()
    assert ray.is_initialized()


@pytest.mark.slow
def test_a_signal_while_the_checkpoint_is_saved_does_not_lose_it(
    shared_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Algorithm.save_to_path

    def signalled(algorithm: Algorithm, *arguments: Any, **options: Any) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return save(algorithm, *arguments, **options)

    def end(number: int, frame: Any) -> None:  # as that of Ray
        raise SystemExit(number)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Algorithm, "save_to_path", signalled)
    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit) as ended:
            name = "rllib/per_dqn_cartpole.yaml"
            main([str(config_directory() / name), *TINY, "--set", "env_runners.num_env_runners=0"])
        assert ended.value.code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "runs" / "rllib" / "per_dqn_cartpole" / "second" / "replay_buffer").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plr_ppo_multiroom", "plr_learnability_ppo_multiroom"])
def test_the_files_of_levels_train(name: str, shared_ray: None, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    pytest.importorskip("minigrid")
    monkeypatch.chdir(tmp_path)
    main([str(config_directory() / f"rllib/{name}.yaml"), *TINY_PPO])
    rate, header, *lines, last = capsys.readouterr().out.splitlines()
    assert rate == "updates per environment step: 0.05"
    assert header.split() == ["env_steps", "updates", "return", "levels", "episodes", "held_out", "gap"]
    env_steps, updates, _, levels, episodes, held_out, gap = lines[-1].split()
    assert int(updates) >= 4  # minibatches of 20 out of two times 40 steps
    assert (float(held_out), float(gap)) == (0.0, 0.0)  # nine steps are too few for a goal
    assert int(env_steps) >= 80 and int(levels) == 2 and int(episodes) >= 8
    folder = tmp_path / "runs" / "rllib" / name / "second"
    assert last == f"checkpoint with the level buffer: {folder}" and (folder / "levels").is_dir()


@pytest.mark.slow
def test_a_checkpoint_is_gone_on_from(shared_ray: None, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    training = {"num_steps_sampled_before_learning_starts": 40}
    reporting = {"min_sample_timesteps_per_iteration": 40, "min_time_s_per_iteration": 0}
    evaluation = {"evaluation_interval": 2, "evaluation_duration": 1}
    path = written(tmp_path, training=training, reporting=reporting, evaluation=evaluation)
    main([str(path), "--checkpoint", "first", "--set", "stop={iterations: 2}"])
    _, _, first, second, _ = capsys.readouterr().out.splitlines()
    env_steps, updates, *_, evaluated = second.split()
    assert [len(line.split()) for line in (first, second)] == [5, 6] and float(evaluated) >= 1  # a reward for each step
    main([str(path), "--restore", "first", "--set", "stop={iterations: 4}"])
    _, _, third, fourth = capsys.readouterr().out.splitlines()
    steps_after, updates_after, _, stored, _ = third.split()
    assert int(steps_after) == int(stored) > int(env_steps) >= 80
    assert int(updates_after) > int(updates) > 0
    assert len(fourth.split()) == 6


@pytest.mark.slow
def test_errors_of_the_command_are_one_line(shared_ray: None, tmp_path: Path) -> None:
    for arguments, message in (
        ([str(written(tmp_path)), "--set", "training.gama=3"], "error: training has no 'gama'"),
        ([str(written(tmp_path)), "--set", "training.gamma"], "error: --set training.gamma has no value"),
        ([str(written(tmp_path)), "--set", "env_runners.num_env_runners=9"], "error: 9 EnvRunners"),
        ([str(written(tmp_path)), "--checkpoint", "memory://bucket"], "error: .*system type in URI: memory://bucket"),
        ([str(written(tmp_path)), "--checkpoint", "s3:/bucket"], "error: .*must be a folder, or a URL as text"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(arguments)


def test_the_command_refuses_numbers_out_of_range(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["file.yaml", "--num-cpus=-1"])
    assert "argument --num-cpus: -1 is below 1" in capsys.readouterr().err


def test_the_command_lists_the_files_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert f"  {config_directory() / 'rllib' / 'nmer_sac_pendulum.yaml'}\n" in capsys.readouterr().out


def test_the_command_reads_its_file_before_it_starts_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # it may be, by an earlier test in this process
    monkeypatch.setattr(ray, "init", lambda *options, **more: started.append(options))
    with pytest.raises(SystemExit, match=r"python -m rllib_ext: error: there is no file .*none.yaml"):
        main([str(tmp_path / "none.yaml")])
    assert not started
