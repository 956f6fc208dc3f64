# SPDX-License-Identifier: Apache-2.0
"""What attacks on saves save: a replay buffer, levels, a Lightning run, an RLlib algorithm."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch

from lightning_replay import load_replay, recipes, save_replay
from lightning_replay.levels import LevelBuffer
from lightning_replay.replay import Replay
from lightning_replay.saving.folders import Folder
from tests import level_steps
from tests.attack.states import fingerprint
from tests.attack.variants import Variant
from tests.attack.worlds import World


class Subject(ABC):
    """Something that is changed, saved into one place again and again, and loaded from there."""

    name: ClassVar[str]
    may_be_refused: ClassVar[bool] = False  # what a save over another one leaves that is cut short
    kept: ClassVar[int] = 1  # saves that the place holds
    refuses_by_others: ClassVar[bool] = False  # in their own words, of files of other libraries

    def __init__(self, folder: Path, seed: int) -> None:
        self.place = folder / self.name
        self.random = random.Random(seed)
        self._ending = ExitStack()

    @abstractmethod
    def change(self) -> None:
        """Changes what the next save holds."""

    @abstractmethod
    def save(self) -> None:
        """Saves into the place, over the save that is there."""

    @abstractmethod
    def state(self) -> str:
        """Returns a fingerprint of what a save of now holds."""

    @abstractmethod
    def load(self) -> str:
        """Returns a fingerprint of what the save in the place holds, loaded as users do."""

    def close(self) -> None:
        self._ending.close()


class ReplaySubject(Subject):
    """A prioritized buffer of several chunks, saved over the save before, of which it shares files."""

    name = "replay"
    most_rows = 200  # that come before a save

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.world, self.replay = self.build(folder, seed)

    def build(self, folder: Path, seed: int) -> tuple[World, Replay]:
        world, replay = World(seed), recipes.prioritized(40_000, 32, seed=seed)
        for _ in range(4):
            replay.extend(world.take(10_000))
        return world, replay

    def change(self) -> None:
        self.replay.extend(self.world.take(self.random.randrange(1, self.most_rows)))
        batch = self.replay.sample()
        self.replay.update_priority(batch, torch.rand(len(batch)))

    def save(self) -> None:
        save_replay(self.replay, self.place, previous=self.place if self.place.exists() else None)

    def state(self) -> str:
        return fingerprint(self.replay.state_dict())

    def load(self) -> str:
        return fingerprint(load_replay(self.place, trust=["tests"]).state_dict())


class RecipeSubject(ReplaySubject):
    """A small buffer of any recipe."""

    name = "recipe"
    most_rows = 12

    def __init__(self, folder: Path, seed: int, variant: Variant) -> None:
        self.variant = variant
        super().__init__(folder, seed)
        for _ in range(5):
            self.change()

    def build(self, folder: Path, seed: int) -> tuple[World, Replay]:
        world, replay = self.variant.world(seed), self.variant.build(24, 6, seed, folder / "rows")
        replay.extend(world.take(24))
        return world, replay


class LevelsSubject(Subject):
    """Scores of levels, some of them being played."""

    name = "levels"

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.levels = self._build(seed)

    def _build(self, seed: int) -> LevelBuffer:
        return level_steps.buffer(5_000, seed=seed)

    def change(self) -> None:
        for _ in range(20):
            level = self.levels.next_level(0)
            self.levels.update(0, level, level_steps.scored(self.random.random()), episode_done=True)
        self.levels.next_level(1)

    def save(self) -> None:
        self.levels.save(self.place)

    def state(self) -> str:
        return fingerprint(self.levels.state_dict())

    def load(self) -> str:
        levels = self._build(0)
        levels.load(self.place)
        return fingerprint(levels.state_dict())


class LightningSubject(Subject):
    """A Trainer with a data module, whose checkpoint is a file and the replay beside it."""

    name = "lightning.ckpt"
    refuses_by_others = True

    def __init__(self, folder: Path, seed: int) -> None:
        import lightning as L

        super().__init__(folder, seed)
        L.seed_everything(seed, verbose=False)
        self.steps = 60
        self.trainer = self._trainer(folder)
        self.agent, self.data = self._parts(seed)
        self.trainer.fit(self.agent, self.data)

    def _trainer(self, folder: Path) -> Any:
        import lightning as L

        off = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
        options = {"accelerator": "cpu", "default_root_dir": folder, **dict.fromkeys(off, False)}
        return L.Trainer(max_steps=self.steps, max_epochs=-1, **options)

    def _parts(self, seed: int) -> tuple[Any, Any]:
        from lightning_replay.agents import DQN
        from lightning_replay.lit import ReplayDataModule

        replay = recipes.prioritized(2_000, 16, seed=seed)
        data = ReplayDataModule("CartPole-v1", replay, env_steps=10**6, warmup_steps=50, seed=seed)
        return DQN(hidden_sizes=[8]), data

    def change(self) -> None:
        self.steps += 3
        self.trainer.fit_loop.epoch_loop.max_steps = self.steps
        self.trainer.fit(self.agent, self.data)

    def save(self) -> None:
        self.trainer.save_checkpoint(self.place)

    def state(self) -> str:
        return _of_run(self.agent, self.data)

    def load(self) -> str:
        """By a Trainer and a data module of their own, which resume and have nothing left to do."""
        agent, data = self._parts(0)
        steps = torch.load(self.place, weights_only=False)["global_step"] if self.place.exists() else 0
        trainer = self._trainer(self.place.parent)
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit(agent, data, ckpt_path=self.place, weights_only=False)
        return _of_run(agent, data)


def _of_run(agent: Any, data: Any) -> str:
    return fingerprint({"agent": dict(agent.state_dict()), "replay": data.replay.state_dict()})


class RllibSubject(Subject):
    """An RLlib algorithm in this process, saved over its checkpoint by its own ``save_to_path``."""

    name = "rllib"
    may_be_refused = True

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.algorithm, self.other = self._build(seed), self._build(seed + 1)
        for algorithm in (self.algorithm, self.other):
            self._ending.callback(algorithm.stop)
        self.change()

    def _build(self, seed: int) -> Any:
        from ray.rllib.algorithms.dqn import DQNConfig

        import rllib_ext
        from tests.integration.rllib_algorithms import small

        config = small(DQNConfig, "CartPole-v1", "prioritized").env_runners(num_env_runners=0).debugging(seed=seed)
        return rllib_ext.configure(config).build_algo()

    def change(self) -> None:
        self.algorithm.train()

    def save(self) -> None:
        self.algorithm.save_to_path(self.place)

    def state(self) -> str:
        return self._state_of(self.algorithm)

    def load(self) -> str:
        self.other.restore_from_path(self.place)
        return self._state_of(self.other)

    def _state_of(self, algorithm: Any) -> str:
        weights = algorithm.learner_group.get_weights()
        return fingerprint({"weights": weights, "replay": algorithm.local_replay_buffer.replay.state_dict()})


class RllibCommandSubject(RllibSubject):
    """An RLlib algorithm, saved as the command ``python -m rllib_ext`` does, which leaves a whole checkpoint."""

    name = "rllib command"
    may_be_refused = False
    kept = 2

    def save(self) -> None:
        from rllib_ext.turns import save_in_turns

        save_in_turns(self.algorithm, Folder.of_user(self.place))

    def load(self) -> str:
        from rllib_ext.turns import newest_in

        self.other.restore_from_path(newest_in(Folder.of_user(self.place)).path)
        return self._state_of(self.other)


SUBJECTS: dict[str, type[Subject]] = {
    kind.name: kind for kind in (ReplaySubject, LevelsSubject, LightningSubject, RllibSubject, RllibCommandSubject)
}
