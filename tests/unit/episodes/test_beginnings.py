# SPDX-License-Identifier: Apache-2.0
"""Ends whose last observation is another episode's first one, and rows none of which continues another, are found."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import lightning as L
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from stable_baselines3 import DQN as StableDQN
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import SliceSampler
from torchrl.envs import GymWrapper

from lightning_replay import PackedStorage, Replay, load_replay, recipes
from lightning_replay.agents import DQN
from lightning_replay.collecting import VectorSteps
from lightning_replay.episodes.returns import NStepTransitions
from lightning_replay.events import EventTable, first_in_episode, reward_at_least
from lightning_replay.lit import ReplayDataModule
from lightning_replay.sb3 import RecipeBuffer
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from tests.recipe_options import ROW_RECIPES, built, fitting
from tests.transitions import numbered_steps
from tests.unit.sharded.local_replay import built as built_shards
from tests.unit.sharded.local_replay import started_here

REPEATED = r"of \d+ truncated episodes end with the observation that another episode begins with"
NONE_CONNECTS = "none of 64 rows starts with the observation that the row before ended with"
SAME_STEP, NEXT_STEP = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


class Simulator(gymnasium.Env[Any, Any]):
    """Random observations; an episode ends after ``length`` steps. A faulty one is reset within its last step."""

    observation_space = gymnasium.spaces.Box(-99, 99, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    terminates = False

    def __init__(self, is_faulty: bool = True, length: int = 5, seed: int = 0, states: int = 10**9) -> None:
        self.is_faulty, self.length, self.states = is_faulty, length, states
        self.random = np.random.default_rng(seed)
        self.is_new = False
        self.begin()

    def begin(self) -> None:
        self.time, self.state = 0, self.drawn()

    def drawn(self) -> np.ndarray:
        return np.array([self.random.integers(self.states) / self.states, 0.0], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if not self.is_new:
            self.begin()
        self.is_new = False
        return self.state.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time, self.state = self.time + 1, self.drawn()
        ends = self.time >= self.length
        if ends and self.is_faulty:
            self.begin()
            self.is_new = True
        return self.state.copy(), 1.0, ends and self.terminates, ends and not self.terminates, {}


def vector(num_envs: int, mode: AutoresetMode = SAME_STEP, **options: Any) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Simulator, seed=n, **options) for n in range(num_envs)], autoreset_mode=mode)


def played(num_envs: int, steps: int, **options: Any) -> list[dict[Any, np.ndarray]]:
    """The rows of each step of a vector, by key."""
    envs = VectorSteps(vector(num_envs, **options))
    envs.reset(seed=0)
    taken = []
    for _ in range(steps):
        envs.step(np.zeros(num_envs, np.int64))
        taken.append(envs.columns)
    return taken


def as_blocks(taken: list[dict[Any, np.ndarray]], length: int) -> Iterator[dict[Any, np.ndarray]]:
    """The steps of each environment side by side, as collectors of TorchRL return them."""
    for first in range(0, len(taken), length):
        part = taken[first : first + length]
        yield {key: np.stack([one[key] for one in part], 1).reshape(-1, *part[0][key].shape[1:]) for key in part[0]}


def uniform(**options: Any) -> Replay:
    return recipes.uniform(capacity=10_000, batch_size=8, seed=0, **options)


def steps_of_a_vector(replay: Any, **options: Any) -> None:
    for columns in played(3, 40, **options):
        replay.extend_columns(columns)


def steps_without_numbers(replay: Any, **options: Any) -> None:
    for columns in played(3, 40, **options):
        replay.extend_columns({key: column for key, column in columns.items() if key != "trajectory"})


def steps_of_one_environment(replay: Any, **options: Any) -> None:
    for columns in played(1, 80, **options):
        replay.extend_columns({key: column for key, column in columns.items() if key != "trajectory"})


def environments_in_turn(replay: Any, **options: Any) -> None:
    for columns in played(3, 40, **options):
        for n in range(3):
            replay.extend_columns({key: column[n : n + 1] for key, column in columns.items()})


def blocks(replay: Any, **options: Any) -> None:
    for columns in as_blocks(played(3, 42, **options), 7):
        replay.extend_columns(columns)


def all_at_once(replay: Any, **options: Any) -> None:
    for columns in as_blocks(played(3, 42, **options), 42):
        replay.extend_columns(columns)


def all_ends_in_one_step(replay: Any, **options: Any) -> None:
    for columns in played(100, 11, **options):
        replay.extend_columns(columns)


def rows_with_returns_formed_before(replay: Any, **options: Any) -> None:
    delayed = uniform(transform=NStepTransitions(3, 0.9))
    steps_of_a_vector(delayed, **options)


def storage_of_torchrl(replay: Any, **options: Any) -> None:
    steps_of_a_vector(Replay(storage=LazyTensorStorage(1_000), batch_size=8), **options)


def stored_images(replay: Any, **options: Any) -> None:
    frames = uniform(frame_stack=1, image_key="observation")
    for columns in played(3, 40, **options):
        for key in ("observation", ("next", "observation")):
            columns[key] = (columns[key][:, :1] * 2.0**24).astype(np.int32).view(np.uint8).reshape(3, 1, 2, 2)
        frames.extend_columns(columns)


def shards(replay: Any, **options: Any) -> None:
    steps_of_a_vector(built_shards("uniform", 2, capacity=1_000), **options)


def collector_of_torchrl(replay: Any, **options: Any) -> None:
    collector = Collector(
        GymWrapper(Simulator(**options)), None, frames_per_batch=7, total_frames=140, replay_buffer=replay
    )
    for _ in collector:
        pass
    collector.shutdown()


def stable_baselines(replay: Any, **options: Any) -> None:
    given = {"recipe": "uniform", "seed": 0}
    options_of_dqn = {"learning_starts": 1_000, "buffer_size": 1_000, "device": "cpu"}
    model = StableDQN(
        "MlpPolicy",
        Simulator(**options),
        replay_buffer_class=RecipeBuffer,
        replay_buffer_kwargs=given,
        **options_of_dqn,
    )
    model.learn(100)


def lightning(replay: Any, **options: Any) -> None:
    env = partial(Simulator, **options)
    data = ReplayDataModule(env, replay, num_envs=2, env_steps=120, warmup_steps=110, seed=0)
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    L.Trainer(max_epochs=-1, accelerator="cpu", enable_model_summary=False, **silent).fit(DQN.for_env(env), data)


def episodes_of_rllib(replay: Any, **options: Any) -> None:
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=1_000, seed=0)
    env = Simulator(**options)
    for _ in range(12):
        episode = SingleAgentEpisode()
        episode.add_env_reset(env.reset()[0])
        while not episode.is_done:
            observation, reward, _, ends, _ = env.step(0)
            episode.add_env_step(observation, 0, reward, truncated=ends)
        buffer.add(episode.to_numpy())


WAYS_IN: list[Callable[..., None]] = [
    *(steps_of_a_vector, steps_without_numbers, steps_of_one_environment, environments_in_turn, blocks, all_at_once),
    *(all_ends_in_one_step, rows_with_returns_formed_before, storage_of_torchrl, stored_images, shards),
    *(collector_of_torchrl, stable_baselines, lightning, episodes_of_rllib),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is your metadata", "ignore::DeprecationWarning")
@pytest.mark.parametrize("way_in", WAYS_IN)
def test_ends_that_begin_other_episodes_are_reported_once_in_every_way_in(
    way_in: Callable[..., None], shared_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_here(monkeypatch)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        way_in(uniform())
    assert sum("begins with" in str(one.message) for one in heard) == 1
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        way_in(uniform(), is_faulty=False)
    assert not any("begins with" in str(one.message) for one in heard)


def test_an_environment_that_reuses_its_array_is_reported() -> None:
    class Reusing(Simulator):
        """The last observation, of which Gymnasium keeps a reference, is written over by the reset."""

        seen = np.zeros(2, np.float32)

        def reset(self, **options: Any) -> Any:
            self.seen[:] = super().reset(**options)[0]
            return self.seen, {}

        def step(self, action: Any) -> Any:
            observation, *others = super().step(action)
            self.seen[:] = observation
            return self.seen, *others

    for mode, warns in ((SAME_STEP, True), (NEXT_STEP, False)):
        envs, replay = VectorSteps(SyncVectorEnv([partial(Reusing, False)], autoreset_mode=mode)), uniform()
        envs.reset(seed=0)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(100):
                envs.step(np.zeros(1, np.int64))
                envs.store(replay)
        assert [REPEATED.split()[-1] in str(one.message) for one in heard] == [True] * warns


def test_resets_that_are_stored_as_rows_are_reported() -> None:
    envs, replay = vector(3, NEXT_STEP, is_faulty=False), uniform()
    before, _ = envs.reset(seed=0)
    with pytest.warns(UserWarning, match=REPEATED):
        for _ in range(60):
            after, reward, ended, truncated, _ = envs.step(np.zeros(3, np.int64))
            following = {"observation": after, "reward": reward, "terminated": ended, "truncated": truncated}
            columns = {("next", key): np.copy(value) for key, value in following.items()}
            replay.extend_columns({"observation": before.copy()} | columns)
            before = after


@pytest.mark.slow
@pytest.mark.parametrize("states", [1, 5, 20, 60, 200])
@pytest.mark.parametrize(("num_envs", "steps"), [(1, 400), (8, 60), (64, 20), (200, 6)])
@pytest.mark.parametrize("way_in", ["by step", "without numbers", "in turn", "blocks"])
def test_states_that_recur_by_chance_are_not_reported(way_in: str, num_envs: int, steps: int, states: int) -> None:
    replay = uniform()
    warnings.simplefilter("error")
    taken = played(num_envs, steps, is_faulty=False, states=states)
    for columns in as_blocks(taken, 4) if way_in == "blocks" else taken:
        if way_in == "without numbers":
            columns.pop("trajectory")
        for n in range(num_envs if way_in == "in turn" else 1):
            of_one = slice(n, n + 1) if way_in == "in turn" else slice(None)
            replay.extend_columns({key: column[of_one] for key, column in columns.items()})


def test_a_collector_that_marks_the_last_row_of_each_batch_goes_on() -> None:
    env = GymWrapper(Simulator(is_faulty=False, length=10**6))
    replay = uniform()
    warnings.filterwarnings("error", f".*{REPEATED}")
    collector = Collector(env, None, frames_per_batch=5, total_frames=200, set_truncated=True, replay_buffer=replay)
    for _ in collector:
        pass
    collector.shutdown()
    assert int(replay[:]["next", "done"].sum()) == 40


def going_on(flag: str, numbered: bool) -> TensorDict:
    """One environment that is never reset; every fifth step is marked as an end."""
    rows = numbered_steps(0, 200, trajectory=0)
    ends = (torch.arange(200) % 5 == 4).reshape(rows["next", "truncated"].shape)
    rows["next", flag], rows["next", "done"] = ends, ends.clone()
    if numbered:
        rows["trajectory"] = torch.arange(200) // 5
    else:
        del rows["trajectory"]
    return rows


@pytest.mark.parametrize("numbered", [True, False])
def test_an_environment_that_goes_on_is_reported_only_if_targets_use_its_ends(numbered: bool) -> None:
    with pytest.warns(
        UserWarning, match=rf"{REPEATED}\. If your environment goes on .* are right: .*check_continuity=F"
    ):
        uniform(n_steps=3).extend(going_on("truncated", numbered))
    warnings.filterwarnings("error", f".*{REPEATED}")
    uniform(n_steps=3).extend(going_on("terminated", numbered))
    for n_steps in (1, 3):
        uniform(n_steps=n_steps, check_continuity=False).extend(going_on("truncated", numbered))


def test_lives_whose_loss_is_terminated_are_not_reported() -> None:
    class Lives(Simulator):
        terminates = True

    envs, replay = VectorSteps(SyncVectorEnv([partial(Lives, seed=n) for n in range(2)])), uniform()
    warnings.filterwarnings("error", ".*begins with")
    envs.reset(seed=0)
    for _ in range(200):
        envs.step(np.zeros(2, np.int64))
        envs.store(replay)


def test_shards_that_compare_no_rows_report_no_ends(shared_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started_here(monkeypatch)
    warnings.filterwarnings("error", ".*begins with")
    steps_of_a_vector(built_shards("uniform", 2, capacity=1_000, check_continuity=False))


@pytest.mark.parametrize(("condition", "history_length"), [("stored", 1), ("remembered", 1), ("stored", 2)])
def test_shuffled_rows_are_refused_by_event_tables_only_if_something_follows_them(condition, history_length) -> None:
    reward = reward_at_least(50.0)
    if condition == "remembered":
        reward = first_in_episode(reward)
    table = EventTable("goal", condition=reward, history_length=history_length, capacity=99, min_size=1)
    replay = recipes.event_tables(1_000, 4, tables=[table], seed=0)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    rows = numbered_steps(0, 200, trajectory=0)[order]
    if condition == "stored" and history_length == 1:
        with warnings.catch_warnings(action="error"):
            replay.extend(rows)
        assert replay.stats()["tables"]["goal"]["size"] == 99
    else:
        rows = noisy(0, 200)[order]
        with pytest.raises(ValueError, match=rf"{NONE_CONNECTS}.*shuffled, store them in the order of their steps"):
            replay.extend(rows)


def test_a_few_ends_are_not_reported() -> None:
    warnings.filterwarnings("error", f".*{REPEATED}")
    steps_of_one_environment(uniform(), length=11)  # seven


def test_ends_of_the_batches_of_a_trainer_are_not_reported() -> None:
    replay = uniform()
    warnings.filterwarnings("error", f".*{REPEATED}")
    for first in range(0, 200, 5):
        rows = numbered_steps(first, 5, trajectory=0)
        rows["next", "truncated"] = ~rows["next", "truncated"]
        replay.extend(rows)
    assert int(replay[:]["next", "done"].sum()) == 40


def noisy(first: int, count: int) -> TensorDict:
    rows = numbered_steps(first, count, trajectory=0)
    rows["next", "observation"] += 0.25
    return rows


def delayed(**options: Any) -> Replay:
    return uniform(transform=NStepTransitions(3, 0.9, **options))


def slices(**options: Any) -> Replay:
    sampler = SliceSampler(slice_len=2, traj_key="trajectory")
    return Replay(storage=PackedStorage(1_000), sampler=sampler, batch_size=4, **options)


NEED_CONTINUITY = ["continuous_transition", "event_tables", "hindsight", "reverse_sweep"]
OF_RECIPES = [partial(built, name, capacity=1_000, batch_size=4) for name in [*NEED_CONTINUITY, "sequences"]]
FOLLOWING: list[Callable[..., Replay]] = [*OF_RECIPES, delayed, slices, partial(uniform, n_steps=3)]


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 7, 65])
@pytest.mark.parametrize("make", FOLLOWING)
def test_rows_of_which_none_continues_another_are_refused(make: Callable[..., Replay], at_once: int) -> None:
    replay = make()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*do not start with the observation")
        for first in range(0, 64 if at_once < 64 else 0, at_once):
            replay.extend(fitting(replay, noisy(first, min(at_once, 64 - first))))
        held, state = len(replay), replay.writer.state_dict()
        with pytest.raises(ValueError, match=rf"{NONE_CONNECTS}, .* Nothing was stored.*check_continuity=False"):
            replay.extend(fitting(replay, noisy(64, 1) if at_once < 65 else noisy(0, 65)))
        assert len(replay) == held and str(replay.writer.state_dict()) == str(state)
        connected = noisy(64, 1)
        connected["observation"] += 0.25
        replay.extend(fitting(replay, connected))  # nothing is kept of the rows that were refused
    accepting = make(check_continuity=False)
    accepting.extend(fitting(accepting, noisy(0, 100)))


@pytest.mark.parametrize("make", FOLLOWING)
def test_rows_are_taken_once_one_has_continued_another(make: Callable[..., Replay]) -> None:
    replay = make()
    replay.extend(fitting(replay, numbered_steps(0, 2, trajectory=0)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*do not start with the observation")
        replay.extend(fitting(replay, noisy(2, 100)))


@pytest.mark.parametrize("name", sorted(set(ROW_RECIPES) - set(NEED_CONTINUITY)))
def test_rows_without_continuity_are_stored_where_nothing_follows_episodes(name: str) -> None:
    replay = built(name, capacity=1_000, batch_size=4, n_steps=1)
    replay.extend(fitting(replay, noisy(0, 100)))
    assert len(replay) == 100


@pytest.mark.parametrize(
    "renewed",
    [
        lambda replay, path: replay.end_episodes(),
        lambda replay, path: replay.empty(),
        lambda replay, path: replay.load_state_dict(replay.state_dict()),
        lambda replay, path: replay.set_sampler(replay.sampler),
    ],
)
def test_rows_of_other_environments_are_compared_anew(renewed: Any, tmp_path: Any) -> None:
    replay = uniform(n_steps=3)
    replay.extend(numbered_steps(0, 2, trajectory=0))
    renewed(replay, tmp_path)
    with pytest.raises(ValueError, match=NONE_CONNECTS):
        replay.extend(noisy(2, 66))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda replay: pickle.loads(pickle.dumps(replay))])
def test_a_copy_does_not_refuse_what_goes_on(copied: Any) -> None:
    replay = uniform(n_steps=3)
    replay.extend(numbered_steps(0, 1, trajectory=0))
    copied(replay).extend(numbered_steps(1, 1, trajectory=0))


def test_a_refusal_names_what_a_loaded_replay_can_do(tmp_path: Any) -> None:
    replay = uniform(n_steps=3)
    replay.extend(numbered_steps(0, 2, trajectory=0))
    replay.save(tmp_path)
    again = load_replay(tmp_path)
    with pytest.raises(ValueError, match=NONE_CONNECTS):
        again.extend(noisy(2, 66))
    assert len(again) == 2
