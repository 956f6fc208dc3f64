# SPDX-License-Identifier: Apache-2.0
"""What errors of agents and of the Lightning integration advise works: each remedy is executed."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FilterObservation, TransformAction, TransformObservation

from lightning_replay import recipes
from lightning_replay.agents import DQN, MPDQN, PPO, SAC, TD3, OffPolicyAgent, Rainbow, RecurrentDQN
from lightning_replay.envs.building import TaskChoice
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.levels import UniformLevels
from lightning_replay.lit import LevelDataModule, ReplayCheckpoint, ReplayDataModule, UpdatePriorities
from lightning_replay.schedulers import MeanReturn
from lightning_replay.transforms import PotentialShaping
from tests.advice import Advice, advice, assert_leads_on

from .toys import Counting, Tiny, make_data, make_replay, make_trainer

Lever = partial(Counting, num_actions=2)
PLANE, LEVER = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
CAMERA = spaces.Box(0, 255, (4, 8, 8), np.uint8)
PARTS = spaces.Dict({"camera": CAMERA, "place": PLANE})
SHOTS = spaces.Tuple((LEVER, spaces.Box(-1, 1, (1,), np.float32), spaces.Box(0, 1, (2,), np.float32)))
STEPS = {"env_steps": 22, "warmup_steps": 20}


class Still(gymnasium.Env[Any, Any]):
    """Observes a sample of its space, and ends after three steps."""

    def __init__(self, observation_space: Any = PLANE, action_space: Any = LEVER) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self.observation_space.sample(), 0.0, self.count == 3, False, {}


class Chosen(TaskChoice, Still):
    TASKS = ("target", "near")

    def __init__(self) -> None:
        Still.__init__(self)
        TaskChoice.__init__(self)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._begin_task(options)
        return Still.reset(self, seed=seed)


class Mute(Tiny):
    """Forgets its TD errors, and the callback for them."""

    def __init__(self) -> None:
        super().__init__(gives_td_error=False)


class Spoken(Tiny):
    def configure_callbacks(self) -> Any:
        return [UpdatePriorities()]


class Actless(Tiny):
    act: Any = None


def replay(**options: Any) -> Any:
    return recipes.uniform(capacity=100, batch_size=4, **options)


def sequences() -> Any:
    return recipes.sequences(capacity=100, batch_size=2, length=2)


def fit(agent: Any, data: Any, **of_trainer: Any) -> None:
    make_trainer(".", **of_trainer).fit(agent, datamodule=data)


def fit_in(agent: Any, env: Any, held: Any = None, **options: Any) -> None:
    fit(agent, ReplayDataModule(env, replay() if held is None else held, **(STEPS | options)))


def small(kind: Any, **options: Any) -> Any:
    return kind(hidden_sizes=[4], **options)


def sizes(kind: type[OffPolicyAgent] | type[PPO], observation: Any, action: Any) -> Any:
    return kind.sizes_from(observation, action)


def tables(**options: Any) -> Any:
    table = EventTable("late", condition=reward_at_least(4.0), history_length=2, capacity=8, min_size=1)
    return recipes.event_tables(capacity=100, batch_size=4, tables=[table], **options)


def curriculum() -> Any:
    return recipes.parallel_curriculum(["target", "near"], 50, 4)


CASES = [
    advice(
        "continuous actions for discrete ones",
        lambda: sizes(SAC, PLANE, LEVER),
        "Use DQN for Discrete actions",
        lambda: sizes(DQN, PLANE, LEVER),
    ),
    advice(
        "discrete actions for continuous ones",
        lambda: sizes(DQN, PLANE, PLANE),
        "Use TD3 or SAC for a Box",
        lambda: sizes(TD3, PLANE, PLANE),
        lambda: sizes(SAC, PLANE, PLANE),
    ),
    advice(
        "an agent of actions with parameters",
        lambda: sizes(MPDQN, PLANE, LEVER),
        "Use DQN for Discrete, TD3 or SAC for a Box",
        lambda: sizes(DQN, PLANE, LEVER),
        lambda: sizes(MPDQN, PLANE, SHOTS),
    ),
    advice(
        "discrete actions that do not start at 0",
        lambda: sizes(DQN, PLANE, spaces.Discrete(2, start=1)),
        "Discrete actions that start at 0",
        lambda: DQN.for_env(TransformAction(Still(action_space=spaces.Discrete(2, start=1)), lambda a: a + 1, LEVER)),
    ),
    advice(
        "PPO with a dictionary",
        lambda: sizes(PPO, PARTS, LEVER),
        "DQN, SAC and TD3 encode dictionaries, .*; use one of these, or convert .* by gymnasium.wrappers.TransformObs",
        lambda: sizes(DQN, PARTS, LEVER),
        lambda: sizes(SAC, PARTS, PLANE),
        lambda: PPO.for_env(TransformObservation(Still(PARTS), lambda seen: seen["place"], PLANE)),
    ),
    advice(
        "Rainbow without a camera",
        lambda: sizes(Rainbow, PLANE, LEVER),
        "Use DQN for other observations",
        lambda: sizes(DQN, PLANE, LEVER),
        lambda: sizes(Rainbow, CAMERA, LEVER),
    ),
    advice(
        "text among the observations",
        lambda: fit_in(small(DQN), partial(Still, spaces.Dict({"place": PLANE, "said": spaces.Text(4)}))),
        "FilterObservation, or convert .* by gymnasium.wrappers.TransformObservation",
        lambda: fit_in(
            small(DQN),
            lambda: FilterObservation(Still(spaces.Dict({"place": PLANE, "said": spaces.Text(4)})), ["place"]),
        ),
    ),
    advice(
        "a recurrent agent with rows",
        lambda: fit_in(small(RecurrentDQN), Lever),
        "use recipes.sequences, or DQN",
        lambda: fit_in(RecurrentDQN(hidden_sizes=[4], state_size=4), Lever, sequences()),
        lambda: fit_in(small(DQN), Lever),
    ),
    advice(
        "an agent of rows with sequences",
        lambda: fit_in(small(DQN), Lever, sequences()),
        "use another recipe, or RecurrentDQN",
        lambda: fit_in(small(DQN), Lever),
    ),
    advice(
        "PPO with transitions",
        lambda: fit_in(small(PPO), Lever),
        r"give PPO a LevelDataModule \(LevelDataModule\(..., levels=UniformLevels\(None\)\) for levels without end\)",
        lambda: fit(
            small(PPO, minibatches=1),
            LevelDataModule(Still, levels=UniformLevels(None), env_steps=8, rollout_length=8, num_envs=1),
        ),
    ),
    advice(
        "a module that cannot act",
        lambda: fit(Actless(), make_data()),
        r"no method act\(observation, explore\) -> action, .*; add it, or use an agent of lightning_replay.agents",
        lambda: fit(Tiny(), make_data(**STEPS)),
        lambda: fit_in(small(SAC), Counting),
    ),
    advice(
        "priorities without TD errors",
        lambda: fit(Mute(), make_data(make_replay(prioritized=True), **STEPS)),
        r"Return \[UpdatePriorities\(\)\] from configure_callbacks",
        lambda: fit(Spoken(), make_data(make_replay(prioritized=True), **STEPS)),
    ),
    advice(
        "another discount than the agent's",
        lambda: fit_in(small(DQN), Lever, replay(n_steps=2, discount=0.9)),
        "give both the same discount",
        lambda: fit_in(small(DQN, discount=0.9), Lever, replay(n_steps=2, discount=0.9)),
    ),
    advice(
        "another discount of potentials",
        lambda: fit_in(small(DQN), Lever, replay(transform=PotentialShaping(lambda seen: seen[..., 0], 0.9))),
        "give both the same discount",
        lambda: fit_in(
            small(DQN, discount=0.9), Lever, replay(transform=PotentialShaping(lambda seen: seen[..., 0], 0.9))
        ),
    ),
    advice(
        "weights of 64 bits",
        lambda: fit(small(DQN), make_data(env=Lever), precision="64-true"),
        r"Use Trainer\(precision='32-true'\), or 'bf16-mixed'",
        lambda: fit(small(DQN), make_data(env=Lever, **STEPS), precision="32-true"),
        lambda: fit(small(DQN), make_data(env=Lever, **STEPS), precision="bf16-mixed"),
    ),
    advice(
        "conflicts without event tables",
        lambda: fit_in(small(DQN, conflict_aversion=0.5), Lever),
        r"draw from event tables \(recipes.event_tables\), or set conflict_aversion=0.0",
        lambda: fit_in(small(DQN, conflict_aversion=0.5), Lever, tables(min_size=1)),
        lambda: fit_in(small(DQN, conflict_aversion=0.0), Lever),
    ),
    advice(
        "tasks without a curriculum",
        lambda: ReplayDataModule(Lever, replay(), **STEPS, progress=MeanReturn(0.0, 1.0)),
        "Use lightning_replay.recipes.parallel_curriculum, or leave it out",
        lambda: fit_in(small(DQN), Chosen, curriculum(), progress=MeanReturn(0.0, 1.0)),
    ),
    advice(
        "a curriculum in an environment without tasks",
        lambda: fit_in(small(DQN), Still, curriculum()),
        r"Give the environment both \(lightning_replay.envs.building.TaskChoice\), or use a replay without tasks",
        lambda: fit_in(small(DQN), Chosen, curriculum()),
        lambda: fit_in(small(DQN), Still),
    ),
    advice(
        "updates beside steps",
        lambda: ReplayDataModule(Lever, replay(), **STEPS, updates=10),
        "Leave these out, or give env, env_steps and warmup_steps without updates",
        lambda: ReplayDataModule(None, replay(), updates=10),
        lambda: ReplayDataModule(Lever, replay(), **STEPS),
    ),
    advice(
        "steps that are all warm-up",
        lambda: ReplayDataModule(Lever, replay(), env_steps=20, warmup_steps=20),
        "Raise env_steps or lower warmup_steps",
        lambda: ReplayDataModule(Lever, replay(), env_steps=21, warmup_steps=20),
        lambda: ReplayDataModule(Lever, replay(), env_steps=20, warmup_steps=19),
    ),
    advice(
        "levels for a data module of transitions",
        lambda: ReplayDataModule(Lever, UniformLevels(4), **STEPS),  # type: ignore[arg-type]
        "levels are replayed with LevelDataModule",
        lambda: LevelDataModule(Still, levels=UniformLevels(4), env_steps=8),
    ),
]


pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")  # of short runs


@pytest.mark.slow
@pytest.mark.parametrize("one", CASES)
def test_the_advice_of_the_error_works(one: Advice) -> None:
    torch.manual_seed(0)
    assert_leads_on(one)


def test_the_advice_of_resuming_works(tmp_path: Path) -> None:
    def resumed(folder: str, env_steps: int = 24, **options: Any) -> None:
        data = ReplayDataModule(Lever, replay(**options), env_steps=env_steps, warmup_steps=20)
        make_trainer(tmp_path).fit(small(DQN), datamodule=data, ckpt_path=tmp_path / folder / "last.ckpt")

    saving = ReplayCheckpoint(tmp_path / "there", every_n_updates=1)
    make_trainer(tmp_path, [saving]).fit(small(DQN), datamodule=ReplayDataModule(Lever, replay(), **STEPS))
    for folder in ("alone", "together"):
        (tmp_path / folder).mkdir()
        shutil.copy(tmp_path / "there" / "last.ckpt", tmp_path / folder)
    shutil.copytree(tmp_path / "there", tmp_path / "together", dirs_exist_ok=True)
    assert_leads_on(
        Advice(
            "a checkpoint without its folder",
            lambda: resumed("alone"),
            "Move both together, or load the weights alone with load_from_checkpoint",
            (lambda: resumed("together"), lambda: DQN.load_from_checkpoint(tmp_path / "alone" / "last.ckpt")),
        )
    )
