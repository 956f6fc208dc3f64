# SPDX-License-Identifier: Apache-2.0
"""Plays levels chosen by their scores and hands Lightning one rollout after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import lightning as L
import numpy as np
from tensordict import TensorDictBase

from lightning_replay.envs.building import build_environment, check_env
from lightning_replay.levels import LevelSelector, update_rollout
from lightning_replay.levels.environments import LevelWrapper, checked_probes, make_level_vector
from lightning_replay.levels.level_ids import checked_held_out
from lightning_replay.levels.scores import EpisodeScore
from lightning_replay.lit.collection import RolloutSchedule
from lightning_replay.lit.data import EnvStepDataModule, UpdateStream
from lightning_replay.lit.level_collection import LevelCollection, ReturnNormalization
from lightning_replay.lit.rollouts import Successes, level_returns, make_environment, stochastic_policy
from lightning_replay.options import check_kind, checked_flag, checked_optional_count, with_named_arguments


class LevelDataModule(EnvStepDataModule):
    """Rollouts of ``num_envs`` environments, each of whose episodes plays the level that ``levels`` chooses for it.

    Give it to ``Trainer(max_epochs=-1).fit(agent, datamodule=...)`` with an on-policy agent such as
    :class:`~lightning_replay.agents.PPO`. For each update it collects ``rollout_length`` steps per environment, scores
    the levels played with the values recorded meanwhile, and only then passes the rollout to ``training_step``. It
    stops the trainer when ``env_steps`` are collected. Its clocks are ``env_steps_done`` and ``updates_done``.

    Checkpoints hold the levels, scores and all generators. After ``fit(ckpt_path=...)`` contents, counters and next
    choices equal a run without a break. The environments start new episodes.

    Args:
        env: Gymnasium id, or a callable that builds one environment, which takes its level as the seed of ``reset``
            or by a method ``set_level``.
        levels: chooses the levels: a :class:`~lightning_replay.levels.LevelBuffer`, or a baseline such as
            :class:`~lightning_replay.levels.UniformLevels`.
        env_steps: Environment steps of the whole run.
        num_envs: Number of environments that are stepped together.
        rollout_length: Steps of each environment per rollout.
        rollouts_per_epoch: rollouts in one of Lightning's epochs, 10 by default. With the callbacks ``Evaluate`` and
            ``GeneralizationGap``, an epoch ends with each evaluation instead.
        asynchronous: step environments each in its own process (then keep a script's main part under ``__main__``).
        flush_unfinished: scores the levels of unfinished episodes at each rollout's end, as the paper's released code
            does. Otherwise, the pieces of an episode are joined, as in the paper.
        return_normalization: Scale of the rewards for the agent and the scores, except scores of whole episodes, whose
            returns are not normalized. ``None`` leaves all as they are.
        held_out_levels: ids to test on, or how many: then the largest ids there are, below 2^31. If the level set is
            unbounded, training may still reach one: then it is left out, with a warning.
        env_kwargs: Further arguments of the environment.
        evaluation_env_kwargs: Arguments that differ in evaluation.
        check: whether to check at the start that the level determines the environment, or ids of levels to check with,
            if not all of 0 to 7 exist.
        seed: Seed for the environments' own randomness, if levels are set by ``set_level``. ``levels`` has its own.

    Raises:
        TypeError: during the run a reward that is no number.
        ValueError: no or impossible held-out levels, or at the first step an environment that ignores its level.

    Example:
        >>> from lightning_replay.levels import LevelBuffer
        >>> data = LevelDataModule("CartPole-v1", LevelBuffer(levels=100, seed=0), env_steps=1_000, num_envs=4)
        >>> data.remaining_updates, data.held_out_levels[-1] == 2**31 - 1
        (1, True)
    """

    env: str | Callable[..., gymnasium.Env[Any, Any]]
    pace: RolloutSchedule
    collection: LevelCollection
    updates_done: int
    updates_per_checkpoint = 10  # rollouts of thousands of steps, and checkpoints without a replay

    @with_named_arguments
    def __init__(
        self,
        env: str | Callable[..., gymnasium.Env[Any, Any]],
        levels: LevelSelector,
        env_steps: int,
        num_envs: int = 16,
        rollout_length: int = 256,
        rollouts_per_epoch: int | None = None,
        asynchronous: bool = False,
        flush_unfinished: bool = False,
        return_normalization: ReturnNormalization | None = None,
        held_out_levels: int | Sequence[int] = 100,
        env_kwargs: dict[str, Any] | None = None,
        evaluation_env_kwargs: dict[str, Any] | None = None,
        check: bool | Sequence[int] = True,
        seed: int | None = None,
    ) -> None:
        check_env(env)
        super().__init__(env, asynchronous, env_kwargs, evaluation_env_kwargs)
        accepted = "LevelBuffer(...), UniformLevels(...) or SequentialLevels(...) of lightning_replay.levels"
        check_kind("levels", levels, LevelSelector, f"{accepted}; transitions are replayed with ReplayDataModule")
        accepted = "a ReturnNormalization(discount=0.999), or None"
        check_kind("return_normalization", return_normalization, ReturnNormalization | None, accepted)
        checked_probes(check)
        self.pace = RolloutSchedule(env_steps, num_envs, rollout_length)
        self.rollout_rows: int = num_envs * rollout_length
        self.levels = levels
        self.rollouts_per_epoch: int | None = checked_optional_count("rollouts_per_epoch", rollouts_per_epoch)
        self.flush_unfinished: bool = checked_flag("flush_unfinished", flush_unfinished)
        self.return_normalization = return_normalization
        self.discounting_parts: Mapping[str, Any] = {
            "return_normalization": return_normalization,
            "levels.score": levels.score,
        }
        self.held_out_levels: Sequence[int] = checked_held_out(held_out_levels)
        self.evaluation_episodes: int = len(self.held_out_levels)
        self._steps_before = 0  # the newest rollout
        make = partial(build_environment, env, self.env_kwargs)
        environments = partial(make_level_vector, make, num_envs, levels, check=check, asynchronous=self._asynchronous)
        self.collection = LevelCollection(levels, environments, seed, return_normalization)

    def __repr__(self) -> str:
        return self._describe(repr(self.levels))

    def make_environment(self) -> gymnasium.Env[Any, Any]:
        """Builds one more environment of the same kind, for evaluation. ``reset(seed=...)`` chooses its level."""
        return LevelWrapper(super().make_environment(), check=False)

    def setup(self, stage: str) -> None:
        """Checks the held-out levels, and uses the levels in this process.

        :meta private:
        """
        self.levels.check_held_out(self.held_out_levels)
        super().setup(stage)
        self.levels.claim()  # one process has the whole run, which may be another than the one that built this

    def train_dataloader(self) -> UpdateStream:
        """Returns one epoch of rollouts.

        :meta private:
        """
        return UpdateStream(self, self._updates_of_epoch("rollouts_per_epoch", self.rollouts_per_epoch, 10))

    def evaluation_returns(self) -> Iterable[float]:
        """Plays the held-out levels and returns their returns.

        :meta private:
        """
        return self.returns_on(self.held_out_levels, self._agent, seed=10_000)

    def returns_on(
        self, level_ids: Sequence[int], agent: L.LightningModule, seed: int, successes: Successes | None = None
    ) -> np.ndarray:
        """Plays an episode on each level, with exploration, and returns the returns, float64 ``[L]``.

        :meta private:
        """
        env = partial(make_environment, self.env, self.evaluation_env_kwargs)
        with stochastic_policy(agent, seed) as policy:

            def checked_policy(observations: Any) -> Any:
                self.check_stopped()
                return policy(observations)

            return level_returns(checked_policy, env, level_ids, self.pace.num_envs, seed, successes=successes)

    @property
    def remaining_updates(self) -> int:
        """Rollouts that remain.

        :meta private:
        """
        return self.pace.updates_after(self.env_steps_done)

    def draw(self) -> TensorDictBase:
        """Collects the next rollout ``[num_envs, T]``, scores its levels, and returns it on the agent's device.

        Its keys are listed in :meth:`~lightning_replay.lit.level_collection.LevelCollection.collect`.
        """
        agent = self._agent
        collection = self.collection
        self.is_update_open: bool = False
        self._steps_before = collection.env_steps
        try:
            rollout = collection.collect(agent, self.pace.length_after(self._steps_before))
            # Scored before the update, with the values predicted during collection.
            scored = rollout
            if isinstance(self.levels.score, EpisodeScore):  # It needs returns in the environment's units.
                scored = rollout.copy().set(("next", "reward"), collection.rewards)
            update_rollout(self.levels, scored, rollout["level_id"])
            if self.flush_unfinished:  # scores need no policy, and no level is chosen before it is updated
                self.levels.flush()
        except BaseException:
            collection.env_steps = self._steps_before  # no update will use these steps
            raise
        self.updates_done += 1
        self.is_update_open = True
        return rollout.to(agent.device)

    def drop_open_update(self) -> None:
        """Takes back the newest rollout if it was not learned from.

        :meta private:
        """
        if self.is_update_open:  # the rollout is collected again
            self.collection.env_steps = self._steps_before
        super().drop_open_update()

    def state_dict(self) -> dict[str, Any]:
        """Returns the clocks, the generators, and the levels.

        :meta private:
        """
        return super().state_dict() | {"levels": self.levels.state_dict(), "num_envs": self.pace.num_envs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, while fitting only.

        :meta private:
        """
        if not self._is_fitting:  # other stages need none of it
            return
        if (state["collection"]["normalization"] is None) != (self.return_normalization is None):
            raise ValueError(
                "return_normalization must be given in both runs or in neither: scores of the resumed run are in other "
                "units. Give it as it was."
            )
        self.levels.load_state_dict(state["levels"])
        for actor in range(self.pace.num_envs, state["num_envs"]):  # the others abandon theirs when they begin
            self.levels.abandon(actor)
        super().load_state_dict(state)


def level_source_of(trainer: L.Trainer, callback: L.Callback) -> LevelDataModule:
    """Returns the trainer's data module, or raises ``TypeError`` if it has no levels."""
    source = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(source, LevelDataModule):
        raise TypeError(
            f"{type(callback).__name__} is about levels, of which {type(source).__name__} has none; fit with a "
            "LevelDataModule."
        )
    return source
