# SPDX-License-Identifier: Apache-2.0
"""Libraries around a ``LevelWrapper``: they reset within episodes, give seeds, and step in several processes."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.vec_env import DummyVecEnv
from tensordict import TensorDict
from torchrl.envs import GymWrapper, SerialEnv

from lightning_replay.levels import (
    LevelBuffer,
    LevelSelector,
    LevelSet,
    SequentialLevels,
    UniformLevels,
    update_rollout,
)
from lightning_replay.levels import scores as level_scores
from lightning_replay.levels.environments import LevelVectorWrapper, LevelWrapper, make_level_vector
from tests.corridors import Corridor, ToldCorridor
from tests.level_steps import buffer, scored, segment

NUM_ENVS = 3


class OptionCorridor(Corridor):
    """Its length is an option of its reset."""

    def choose_length(self) -> int:
        return int(self.options[-1]["level"])


class Made:
    """Builds the environments of a selector's actors, and keeps them where they are in this process."""

    def __init__(self, levels: LevelSelector, env: type[gymnasium.Env], **options: Any) -> None:
        self.levels, self.env, self.options = levels, env, {"check": False, **options}
        self.built: list[LevelWrapper] = []

    def __call__(self, actor: int) -> LevelWrapper:
        self.built.append(LevelWrapper(self.env(), partial(self.levels.next_level, actor), **self.options))
        return self.built[-1]

    @property
    def makers(self) -> list[Callable[[], LevelWrapper]]:
        return [partial(self, actor) for actor in range(NUM_ENVS)]


def reset_by_hand(made: Made, seed: int | None) -> None:
    for maker in made.makers:
        maker().reset(seed=seed)


def reset_by_gymnasium(made: Made, seed: int | None) -> None:
    SyncVectorEnv(made.makers, autoreset_mode=AutoresetMode.SAME_STEP).reset(seed=seed)


def reset_by_sb3(made: Made, seed: int | None) -> None:
    envs = DummyVecEnv(made.makers)
    if seed is not None:
        envs.seed(seed)  # as PPO(seed=0) does
    envs.reset()


def reset_by_torchrl(made: Made, seed: int | None) -> None:
    envs = SerialEnv(NUM_ENVS, [lambda maker=maker: GymWrapper(maker()) for maker in made.makers])
    if seed is not None:
        envs.set_seed(seed)
    envs.reset()


HOSTS = [reset_by_hand, reset_by_gymnasium, reset_by_sb3, reset_by_torchrl]


@pytest.mark.parametrize("reset", HOSTS)
@pytest.mark.parametrize(
    ("env", "options"), [(Corridor, {}), (ToldCorridor, {}), (OptionCorridor, {"level_option": "level"})]
)
def test_a_hosts_seed_is_no_level(reset: Callable[[Made, int | None], None], env: Any, options: Any) -> None:
    played = []
    for seed in (None, 0):
        levels = UniformLevels(range(10, 60), seed=0)
        made = Made(levels, env, **options)
        reset(made, seed)
        played.append([one.level_id for one in made.built[-NUM_ENVS:]])
        assert [levels.in_flight(actor)[-1] for actor in range(NUM_ENVS)] == played[-1]
    assert min(played[-1]) >= 10
    if env is not Corridor and reset is not reset_by_torchrl:  # TorchRL derives a seed for each environment
        seeds = [next(one for one in made.unwrapped.seeds if one is not None) for made in made.built[-NUM_ENVS:]]
        assert seeds in ([0, 0, 0], [0, 1, 2]), "the environment's own generator gets the seed"


def test_a_vectors_seed_is_no_level() -> None:
    levels, again = (LevelBuffer(range(10, 60), seed=0) for _ in range(2))
    given = make_level_vector(ToldCorridor, NUM_ENVS, levels, check=False).reset(seed=0)[1]["level_id"].tolist()
    assert given == make_level_vector(ToldCorridor, NUM_ENVS, again, check=False).reset()[1]["level_id"].tolist()
    assert [levels.in_flight(actor) for actor in range(NUM_ENVS)] == [[level_id] for level_id in given]


@pytest.mark.parametrize("seed", [4, -1, 2**31, 2.0])
def test_a_seed_that_is_no_level_is_named(seed: Any) -> None:
    tasks = LevelSet(["a", "b", "c", "d"])
    given = LevelWrapper(OptionCorridor(), level_option="level", level_set=tasks, check=False)
    refused = [given] if seed == 4 else [given, LevelWrapper(Corridor(), check=False)]
    for env in refused:
        with pytest.raises((ValueError, TypeError), match=f"seed is {seed}; it must be a level from 0 to .*: without"):
            env.reset(seed=seed)


def test_a_vector_refuses_wrappers_that_choose() -> None:
    levels = SequentialLevels(9)
    vector = SyncVectorEnv(Made(levels, ToldCorridor).makers, autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(ValueError, match="next_level is given to a LevelWrapper in .*; leave next_level out"):
        LevelVectorWrapper(vector, levels)


SOURCES = [
    lambda: LevelBuffer(9, score=level_scores.OneStepTdError(0.0), seed=0),
    lambda: UniformLevels(9, seed=0),
    lambda: SequentialLevels(9),
]


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("named", [False, True])
def test_a_reset_within_an_episode_leaves_nothing_in_flight(make: Callable[[], LevelSelector], named: bool) -> None:
    levels = make()
    env = LevelWrapper(Corridor(), partial(levels.next_level, 0), check=False)
    for _ in range(10):
        level_id = env.reset()[1]["level_id"]
        env.step(0)
        levels.update(0, level_id, scored(1.0, done=False), False)
        if named:  # an evaluation on a level that was not chosen
            env.reset(options={"level_id": 3})
            env.step(0)
    assert levels.stats()["in_flight"] == 1
    assert levels.in_flight(0) == [level_id]


def test_steps_of_an_episode_that_was_broken_off_are_in_no_later_score() -> None:
    levels = buffer(1)
    env = LevelWrapper(Corridor(), partial(levels.next_level, 0), check=False)
    env.reset()
    env.step(0)
    levels.update(0, 0, scored(9.0, done=False), False)
    env.reset()
    assert levels.update(0, 0, scored(1.0), True) == 1.0 and len(levels.running) == 0


def test_late_steps_of_an_episode_that_was_broken_off() -> None:
    levels = buffer(1)
    env = LevelWrapper(Corridor(), partial(levels.next_level, 0), check=False)
    for steps in (2, 5, 3):
        env.reset()
        for _ in range(steps):
            env.step(0)
    assert levels.stats()["in_flight"] == 1
    assert levels.update(0, 0, scored(9.0, done=False, length=2), False) is None
    assert levels.in_flight(0) == [0, 0]
    assert levels.update(0, 0, scored(9.0, done=False, length=4), False) is None
    resumed = buffer(1)
    resumed.load_state_dict(levels.state_dict())
    for one in (levels, resumed):
        assert one.update(0, 0, scored(1.0, length=3), True) == 1.0, "more steps than are left are of the next one"
        assert one.stats()["in_flight"] == 0


@pytest.mark.parametrize("whole", [False, True])
def test_steps_that_were_dropped_are_not_waited_for(whole: bool) -> None:
    levels = SequentialLevels(range(5, 9))
    env = LevelWrapper(ToldCorridor(), partial(levels.next_level, 0), check=False)
    for _ in range(3):
        env.reset()
        env.step(0)
    assert levels.in_flight(0) == [5, 6, 7] and levels.stats()["in_flight"] == 1
    if whole:
        update_rollout(levels, scored(1.0).unsqueeze(0), torch.tensor([[7]]))
    else:
        levels.update(0, 7, scored(1.0), True)
    assert levels.in_flight(0) == []


def test_dropped_steps_of_a_level_that_comes_again_are_not_those_of_its_next_episode() -> None:
    levels = SequentialLevels([5, 6])
    env = LevelWrapper(ToldCorridor(), partial(levels.next_level, 0), check=False)
    for _ in range(3):
        env.reset()
        env.step(0)
    assert levels.in_flight(0) == [5, 6, 5]
    update_rollout(levels, torch.cat([scored(1.0), scored(1.0)]).unsqueeze(0), torch.tensor([[6, 5]]))
    assert levels.in_flight(0) == []


def test_a_limit_around_the_wrapper_ends_episodes_with_a_score() -> None:
    levels = buffer(50)
    env = TimeLimit(LevelWrapper(ToldCorridor(), partial(levels.next_level, 0), check=False), 3)
    rows = []
    for _ in range(8):
        level_id, done = env.reset()[1]["level_id"], False
        while not done:
            *_, terminated, truncated, _ = env.step(0)
            done = terminated or truncated
            rows.append((level_id, terminated, truncated))
    level_ids, terminated, truncated = (torch.tensor([column]) for column in zip(*rows, strict=True))
    following = {"reward": torch.ones(level_ids.shape), "terminated": terminated, "truncated": truncated}
    columns = {"next": {**following, "done": terminated | truncated}}
    update_rollout(levels, TensorDict(columns, level_ids.shape), level_ids)  # all of them arrive late
    assert levels.stats()["in_flight"] == 0 and len(levels) == len(set(level_ids[0].tolist()))


# In a program, as hosts leave processes and a part of the errors behind.
PROGRAM = """
import os, sys
from functools import partial
from gymnasium.vector import AsyncVectorEnv
from stable_baselines3.common.vec_env import SubprocVecEnv
from torchrl.envs import GymWrapper, ParallelEnv
from lightning_replay.levels import LevelBuffer
from lightning_replay.levels.environments import LevelWrapper
from tests.corridors import ToldCorridor

levels = LevelBuffer(9, seed=0)
makers = [lambda actor=actor: LevelWrapper(ToldCorridor(), partial(levels.next_level, actor)) for actor in range(2)]
torchrl = [lambda make=make: GymWrapper(make()) for make in makers]
hosts = {
    "Gymnasium": lambda: AsyncVectorEnv(makers, context="fork"),
    "Stable-Baselines3": lambda: SubprocVecEnv(makers, start_method="fork"),
    "TorchRL": lambda: ParallelEnv(2, torchrl, mp_start_method="fork"),
}
for host, build in hosts.items():
    print("HOST", host, file=sys.stderr, flush=True)
    try:
        build().reset()
        print("played", file=sys.stderr, flush=True)
    except (RuntimeError, EOFError, ConnectionError) as error:
        print(error, file=sys.stderr, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_copies_in_processes_of_environments_are_refused() -> None:
    given = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=given, timeout=200, check=True
    )
    hosts = ran.stderr.split("HOST ")[1:]
    assert len(hosts) == 3
    for said in hosts:
        assert "played" not in said, said
        assert "this LevelBuffer is a copy of one in another process" in said, said
        assert "make_level_vector(env, num_envs, levels, asynchronous=True)" in said, said


def claimed(levels: LevelSelector) -> list[int]:
    levels.claim()
    return [levels.next_level(0) for _ in range(5)]


USES: dict[str, Callable[[LevelSelector], Any]] = {
    "next_level": lambda levels: levels.next_level(0),
    "next_levels": lambda levels: levels.next_levels(2),
    "start": lambda levels: levels.start(0, 3),
    "record": lambda levels: levels.record([3], [0.5]),
    "update": lambda levels: levels.update(0, levels.in_flight(0)[0], segment([1.0]), True),
}


def used(levels: LevelSelector, use: str) -> str:
    try:
        return f"returned {USES[use](levels)}"
    except RuntimeError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_copy_in_another_process_is_claimed_or_refused_in_every_use(start: str) -> None:
    selectors = [make() for make in SOURCES]
    context = multiprocessing.get_context(start)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        for levels in selectors:
            levels.start(0, 4)
            for use in USES:
                assert "is a copy of one in another process" in pool.submit(used, levels, use).result()
            expected = pool.submit(claimed, levels).result()
            assert [levels.next_level(0) for _ in range(5)] == expected


@pytest.mark.parametrize("make", SOURCES)
def test_copies_in_one_process_and_restored_states_may_be_used(make: Callable[[], LevelSelector]) -> None:
    levels = make()
    restored = make()
    restored.load_state_dict(levels.state_dict())
    for copied in (copy.deepcopy(levels), pickle.loads(pickle.dumps(levels)), restored):
        assert np.issubdtype(type(copied.next_level(0)), np.integer)
