# SPDX-License-Identifier: Apache-2.0
"""Every kind of replay through every way in of the hosts that a page names: it trains there, or is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from lightning.pytorch.loggers import CSVLogger
from stable_baselines3 import DQN
from tensordict import TensorDictBase
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import Collector
from torchrl.envs import GymEnv

from lightning_replay import MixedReplay, recipes
from lightning_replay.collecting import VectorSteps
from lightning_replay.lit import InspectBuffer, LogReplayStats, ReplayDataModule
from lightning_replay.sb3 import RecipeBuffer
from tests.integration.test_torchrl_ecosystem import OF_TRAINERS, dqn_trainer, sac_trainer
from tests.recipe_options import TASKS, built
from tests.unit.lit.toys import Tiny, make_trainer

STEPS = 200


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def of_recipe(name: str, **options: Any) -> Callable[..., Any]:
    return partial(built, name, **{"capacity": 1_000, "batch_size": 32, "seed": 0} | options)


def mixed_with(way: Callable[..., Any]) -> MixedReplay:
    """Its offline rows have come the same way."""
    offline = way(of_recipe("uniform"))
    return recipes.mixed(online=of_recipe("prioritized")(), offline=offline, batch_size=32, seed=0)


KINDS: dict[str, dict[str, Any]] = {name: {} for name in sorted(recipes.known())}
KINDS |= {
    "prioritized, n_steps": {"n_steps": 3, "discount": 0.9},
    "event_tables, prioritized": {"priority_exponent": 0.6},
}
KINDS |= {"neighborhood_mixup, prioritized": {"priority_exponent": 0.6}, "uniform, prefetch": {"prefetch": 2}}
KINDS |= {"sequences, prioritized": {"priority_exponent": 0.6}}


# What they need where actions are discrete.
DISCRETE: dict[str, dict[str, Any]] = {name: {"keys": ["observation"]} for name in ("noisy", "mixup")}
DISCRETE |= {"continuous_transition": {"keys": ["observation"]}, "neighborhood_mixup": {"discrete": "same_action"}}
CONTINUOUS = ("trainer_of_sac", "data_module")
REFUSED = {
    ("parallel_curriculum", "trainer"): "need a column 'task', int64",
    ("parallel_curriculum", "trainer_of_sac"): "need a column 'task', int64",
    ("parallel_curriculum", "vector_steps"): "need a column 'task', int64",
    ("parallel_curriculum", "data_module"): "Give the environment both",
    **{(name, "stable_baselines"): "use a recipe of rows" for name in ("parallel_curriculum", "sequences")},
}


def with_tasks(rows: TensorDictBase) -> TensorDictBase:
    return rows.set("task", torch.arange(len(rows)) % len(TASKS))


def collector(build: Callable[..., Any]) -> Any:
    replay = build()
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    postproc = with_tasks if replay.tasks else None
    options = {"frames_per_batch": 50, "total_frames": STEPS, "postproc": postproc}
    collecting = Collector(env, None, replay_buffer=replay, auto_register_policy_transforms=True, **options)
    for _ in collecting:
        batch = replay.sample()
        replay.update_priority(batch, torch.rand(batch.shape))
    collecting.shutdown()
    return replay


def trainer(build: Callable[..., Any]) -> Any:
    replay = build()
    dqn_trainer(replay).train()
    return replay


def trainer_of_sac(build: Callable[..., Any]) -> Any:
    replay = build()
    sac_trainer(replay).train()
    return replay


def vector_steps(build: Callable[..., Any]) -> Any:
    replay = build()
    envs = VectorSteps(SyncVectorEnv([partial(gymnasium.make, "CartPole-v1")] * 2))
    envs.reset(seed=0)
    for _ in range(STEPS // 2):
        envs.step(envs.action_space.sample())
        envs.store(replay)
    batch = replay.sample()
    replay.update_priority(batch, torch.rand(batch.shape))
    return replay


def stable_baselines(build: Callable[..., Any]) -> Any:
    options = {"replay_buffer_class": RecipeBuffer, "replay_buffer_kwargs": {"recipe": lambda capacity: build()}}
    options |= {"policy_kwargs": {"net_arch": [8]}, "learning_starts": 60, "device": "cpu", "seed": 0}
    model = DQN("MlpPolicy", "CartPole-v1", buffer_size=1_000, batch_size=32, **options)
    return model.learn(STEPS).replay_buffer.replay


def data_module(build: Callable[..., Any]) -> Any:
    replay = build()
    data = ReplayDataModule("Pendulum-v1", replay, env_steps=STEPS, warmup_steps=100, seed=0)
    callbacks = [InspectBuffer(every_n_updates=50), LogReplayStats(every_n_updates=50)]
    make_trainer(".", callbacks, logger=CSVLogger(".")).fit(Tiny(), datamodule=data)
    assert next(Path().rglob("buffer.html")).stat().st_size > 1_000
    return replay


WAYS = {way.__name__: way for way in (collector, trainer, vector_steps, stable_baselines, trainer_of_sac, data_module)}
# Each recipe goes through every host, a recipe with options through one. The two trainers of TorchRL differ only in the
# actions that are stored, so that the second has those that mix actions, and weights.
WITH_SAC = (
    "prioritized",
    "continuous_transition",
    "mixup",
    "neighborhood_mixup",
    "noisy",
    "parallel_curriculum",
    "mixed",
)
PAIRS = [
    (kind, way)
    for kind in [*sorted(recipes.known()), "mixed"]
    for way in WAYS
    if way != "trainer_of_sac" or kind in WITH_SAC
]
PAIRS += zip([kind for kind in KINDS if "," in kind], WAYS, strict=False)


@pytest.mark.slow
@pytest.mark.filterwarnings(*OF_TRAINERS)
@pytest.mark.filterwarnings("ignore:rows of offline lack columns of online:UserWarning")
@pytest.mark.parametrize(("kind", "way"), PAIRS)
def test_a_replay_trains_in_every_host_or_is_refused(kind: str, way: str) -> None:
    go, recipe = WAYS[way], kind.partition(",")[0]
    options = KINDS.get(kind, {}) | ({} if way in CONTINUOUS else DISCRETE.get(recipe, {}))
    build = partial(mixed_with, go) if kind == "mixed" else of_recipe(recipe, **options)
    if refusal := REFUSED.get((recipe, way)):
        with pytest.raises(ValueError, match=refusal):
            go(build)
        return
    replay = go(build)
    # A vector that resets in a step of its own takes fewer steps.
    assert len(replay.entered) == STEPS if way != "vector_steps" else 0.8 * STEPS < len(replay.entered) <= STEPS
    batch = replay.sample()
    assert len(batch) == 32
    assert np.isfinite(batch["next", "reward"].numpy()).all()
    for side in (replay.online, replay.offline) if kind == "mixed" else (replay,):
        assert side.stats()["priorities_updated"] > 0 or not side.takes_feedback


@pytest.mark.filterwarnings(*OF_TRAINERS)
@pytest.mark.filterwarnings("ignore:rows of offline lack columns of online:UserWarning")
def test_a_checkpoint_of_a_trainer_of_torchrl_contains_both_sides(tmp_path: Path) -> None:
    offline = trainer(of_recipe("uniform"))

    def built_with(rows: Any) -> tuple[MixedReplay, Any]:
        replay = recipes.mixed(online=of_recipe("prioritized")(), offline=rows, batch_size=32, seed=0)
        saving = {"save_trainer_file": tmp_path / "saved", "save_trainer_interval": STEPS - 1}
        return replay, dqn_trainer(replay, checkpoint=Checkpoint(), **saving)

    replay, first = built_with(offline)
    first.train()
    again, resumed = built_with(of_recipe("uniform")())
    resumed.load_from_file(tmp_path / "saved")
    assert resumed.collected_frames == STEPS
    for side, other in ((replay.online, again.online), (replay.offline, again.offline)):
        assert (side[:] == other[:]).all() and len(side) == STEPS
    for _ in range(3):
        assert again.sample()["index"].equal(replay.sample()["index"])
