# SPDX-License-Identifier: Apache-2.0
"""Evaluation during training, and the progress bar."""

from __future__ import annotations

import math
import sys
import time
from contextlib import closing

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ProgressBar, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from tqdm.auto import tqdm

from lightning_replay.envs.building import MAX_EPISODE_STEPS
from lightning_replay.lightning_compat import end_epoch
from lightning_replay.lit.data import ActsAtUpdates, EnvStepDataModule, source_of
from lightning_replay.lit.level_data import level_source_of
from lightning_replay.lit.rollouts import Successes, SuccessFunction
from lightning_replay.options import checked_count, checked_number
from lightning_replay.state import Stateful


class ReplayProgressBar(ProgressBar, ActsAtUpdates):
    """Shows environment steps, recent training return, last evaluation and updates per second.

    Give it to the trainer among its callbacks. It replaces Lightning's bar.

    Args:
        refresh_seconds: time between two refreshes, at least 10 if the output is no terminal. A refresh costs as much
            as a small update.

    Attributes:
        evaluation: Newest return of an evaluation, which ``Evaluate`` sets, NaN before the first.
    """

    def __init__(self, refresh_seconds: float = 0.5) -> None:
        super().__init__()
        checked_number("refresh_seconds", refresh_seconds, 0.0)
        self.refresh_seconds: float = refresh_seconds if sys.stderr.isatty() else max(refresh_seconds, 10.0)
        self.evaluation: float = math.nan
        self._is_enabled = True
        self._bar: tqdm | None = None

    def enable(self) -> None:
        """Shows the bar.

        :meta private:
        """
        self._is_enabled = True

    def disable(self) -> None:  # Lightning calls it where a progress bar is not shown, such as in further processes
        """Hides the bar. Lightning calls this in further processes.

        :meta private:
        """
        self._is_enabled = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Shows the bar of a run.

        :meta private:
        """
        source = trainer.datamodule  # type: ignore[attr-defined]
        if not self._is_enabled or not isinstance(source, EnvStepDataModule):
            return
        self._bar = tqdm(
            total=source.total_steps,
            initial=source.steps_done,
            unit="step" if source.pace.env_steps else "update",
            dynamic_ncols=True,
        )
        self._last_updates = source.updates_done
        self._last_time = self._last_described = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Refreshes the bar, if a refresh is due.

        :meta private:
        """
        if self.is_due(source_of(trainer, self)):
            self._refresh(trainer, time.perf_counter())

    def is_due(self, source: EnvStepDataModule) -> bool:
        """Returns whether the callback acts after the newest update.

        :meta private:
        """
        return self._bar is not None and time.perf_counter() - self._last_time >= self.refresh_seconds

    def describe(self, activity: str) -> None:
        """Shows an activity between two steps, if a refresh is due. An empty text removes it."""
        now = time.perf_counter()
        if self._bar is None or (activity and now - self._last_described < self.refresh_seconds):
            return
        self._last_described = now
        self._bar.set_description_str(activity, refresh=bool(activity))

    def _refresh(self, trainer: L.Trainer, now: float) -> None:
        source = source_of(trainer, self)
        assert self._bar is not None
        shown = {
            "return": source.collection.recent_return,
            "eval/return": self.evaluation,
            "updates/s": (source.updates_done - self._last_updates) / max(now - self._last_time, 1e-9),
        }
        postfix = {
            name: f"{value:.{1 if abs(value) >= 10 else 2}f}" for name, value in shown.items() if not math.isnan(value)
        }
        self._bar.set_postfix(postfix, refresh=False)
        self._bar.n = source.steps_done
        self._bar.refresh()
        self._last_updates = source.updates_done
        self._last_time = now

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Closes the bar.

        :meta private:
        """
        if self._bar is not None:
            self._refresh(trainer, time.perf_counter())
            self._bar.close()
            self._bar = None


class Evaluate(Stateful, L.Callback, ActsAtUpdates):
    """Every ``every_n_env_steps`` plays episodes without exploration in a separate environment.

    Their mean is ``trainer.callback_metrics["eval/return"]`` until the next training step changes the weights that it
    is the score of. Loggers record it against environment steps. Each evaluation ends one of Lightning's epochs, and
    each epoch ends with one. The agent is evaluated before the first update too. All evaluations of a run start from
    the same seeds, and none changes the training's random numbers. With Lightning's ``WeightAveraging`` the averaged
    weights are evaluated, as a checkpoint holds them.

    If the infos of the last steps have a flag ``is_success``, or ``success``, the share of the episodes that succeeded
    is ``eval/success_rate`` in the same places. ``ReplayCheckpoint(monitor="eval/success_rate")`` keeps the best.
    An episode without the flag counts as a failure if another one of the run has it.

    Args:
        every_n_env_steps: training steps between evaluations, or updates in a run that collects nothing.
        episodes: Number of episodes per evaluation.
        seed: Seed of the first episode. The next episodes have the next seeds.
        max_episode_steps: Number of steps after which an episode is cut and counted, with a warning.
        success: Function ``(episode_return, infos)`` that returns whether an episode succeeded, in place of the flag.
            ``infos`` come from its last step. Of a simulator both hold tensors ``[N]`` of all environments at every
            step, and the function returns a tensor ``[N]``.

    Attributes:
        history: Step and mean return of each evaluation.
        success_history: Step and success rate of each evaluation, from the first one with a flag on.
    """

    saved_attributes: tuple[str, ...] = ("history", "success_history")

    def __init__(
        self,
        every_n_env_steps: int = 5_000,
        episodes: int = 5,
        seed: int = 10_000,
        max_episode_steps: int = MAX_EPISODE_STEPS,
        success: SuccessFunction | None = None,
    ) -> None:
        self.every_n_env_steps: int = checked_count("every_n_env_steps", every_n_env_steps)
        self.episodes: int = checked_count("episodes", episodes)
        self.seed: int = checked_count("seed", seed, 0)
        self.max_episode_steps: int = checked_count("max_episode_steps", max_episode_steps)
        self.success: SuccessFunction = Successes(success).function
        self.history: list[tuple[int, float]] = []
        self.success_history: list[tuple[int, float]] = []
        self._is_current = False  # whether the weights are those of the last evaluation

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Requires an environment, and lets evaluations end the epochs.

        :meta private:
        """
        if stage == TrainerFn.FITTING:
            source = source_of(trainer, self)
            source.required_environment(type(self).__name__)
            source.is_evaluated = True  # each evaluation ends an epoch

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluates the untrained agent, or publishes the last evaluation of a resumed run.

        :meta private:
        """
        # After a resume the last evaluation is published again. Otherwise, the untrained agent is evaluated.
        source = source_of(trainer, self)
        if self.history and self.history[-1][0] <= source.steps_done > 0:
            self._publish(trainer)
            if self.is_due(source):  # a signal interrupted this evaluation
                self._evaluate(trainer, pl_module)
        else:
            self.history.clear()
            self.success_history.clear()
            self._evaluate(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Removes the score of the weights that this step changes.

        :meta private:
        """
        if self._is_current:  # this step changes the weights that the score is of
            self._is_current = False
            for name in self._metrics():
                trainer.callback_metrics.pop(name, None)
        if self.is_due(source_of(trainer, self)):
            end_epoch(trainer)  # now, as schedulers of automatic optimization step before on_train_batch_end

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Ends the epoch if an evaluation is due.

        :meta private:
        """
        if not self.is_due(source_of(trainer, self)):
            return
        end_epoch(trainer)
        # Weights are averaged once per update, whatever the order of the callbacks.
        _call_averaging(trainer, "on_train_batch_end", pl_module, outputs, batch, batch_idx)
        # The hook of the agent follows, and may change the weights.
        if not is_overridden("on_train_batch_end", pl_module):
            self._evaluate_epoch(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluates, unless the weights have a score.

        :meta private:
        """
        # After the agent's own hook, or when the epoch ended for another reason, such as max_steps.
        if not self._is_current:
            self._evaluate_epoch(trainer, pl_module)

    def is_due(self, source: EnvStepDataModule) -> bool:
        """Returns whether the callback acts after the newest update.

        :meta private:
        """
        last = self.history[-1][0]
        now = source.steps_done
        if now >= source.total_steps:  # further updates may follow the last step
            return source.is_finished and now > last
        return now // self.every_n_env_steps > last // self.every_n_env_steps

    def _evaluate_epoch(self, trainer: L.Trainer, agent: L.LightningModule) -> None:
        _call_averaging(trainer, "on_train_epoch_end", agent)
        self._evaluate(trainer, agent)

    def _evaluate(self, trainer: L.Trainer, agent: L.LightningModule) -> None:
        _call_averaging(trainer, "on_validation_epoch_start", agent)
        try:
            self._play(trainer, agent)
        finally:
            _call_averaging(trainer, "on_validation_epoch_end", agent)
        self._publish(trainer)
        for logger in trainer.loggers:
            logger.log_metrics(self._metrics())

    def _play(self, trainer: L.Trainer, agent: L.LightningModule) -> None:
        source = source_of(trainer, self)
        bar = trainer.progress_bar_callback
        returns: list[float] = []
        successes = Successes(self.success)
        with closing(
            source.played_returns(agent, self.episodes, self.seed, self.max_episode_steps, successes)
        ) as played:
            for episode_return in played:
                returns.append(episode_return)
                if isinstance(bar, ReplayProgressBar):  # games may be long
                    is_last = len(returns) == self.episodes
                    bar.describe("" if is_last else f"evaluating, {len(returns)} of {self.episodes} played")
        self.history.append((source.steps_done, float(np.mean(returns))))
        self._note_rate(successes)

    def _note_rate(self, successes: Successes) -> None:
        rate = successes.rate()
        if rate is not None or self.success_history:  # Some environments give the flag only if it is true.
            self.success_history.append((self.history[-1][0], rate or 0.0))

    def _metrics(self) -> dict[str, float]:
        named = (("eval/return", self.history), ("eval/success_rate", self.success_history))
        return {name: history[-1][1] for name, history in named if history}

    def _publish(self, trainer: L.Trainer) -> None:
        self._is_current = True
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in self._metrics().items()})
        if isinstance(trainer.progress_bar_callback, ReplayProgressBar):
            trainer.progress_bar_callback.evaluation = self.history[-1][1]


def _call_averaging(trainer: L.Trainer, hook: str, *arguments: object) -> None:
    """Calls a hook of the callbacks that average weights, as Lightning's own validation does."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by its connectors
        if isinstance(callback, WeightAveraging):
            getattr(callback, hook)(trainer, *arguments)


class GeneralizationGap(Evaluate):
    """Every ``every_n_env_steps`` plays one episode on each held-out level and on as many levels trained on.

    This is the test protocol of Prioritized Level Replay: the policy acts as in training, with exploration, and rewards
    are the environment's. ``trainer.callback_metrics`` has ``eval/return``, the mean on the data module's
    ``held_out_levels``. Once levels have been played, it also has ``eval/train_return``, the mean on levels drawn from
    them, and ``eval/generalization_gap``, the second minus the first. ``eval/success_rate`` is that of the held-out
    levels. When it plays, see :class:`Evaluate`.

    Args:
        every_n_env_steps: training steps between evaluations.
        seed: Seed for the actions, the drawn levels, and the environments' own randomness.
        success: Function as in :class:`Evaluate`.
    """

    saved_attributes: tuple[str, ...] = (*Evaluate.saved_attributes, "training_history")

    def __init__(
        self, every_n_env_steps: int = 50_000, seed: int = 10_000, success: SuccessFunction | None = None
    ) -> None:
        super().__init__(every_n_env_steps, seed=seed, success=success)
        self.training_history: list[tuple[int, float]] = []

    @property
    def gap(self) -> float | None:
        """Return on levels trained on minus that on held-out ones, of the last evaluation that had both."""
        held_out = dict(self.history)
        if not self.training_history or self.training_history[-1][0] not in held_out:
            return None
        steps, trained = self.training_history[-1]
        return trained - held_out[steps]

    def _play(self, trainer: L.Trainer, agent: L.LightningModule) -> None:
        source = level_source_of(trainer, self)
        if not self.history:
            self.training_history.clear()
        played = source.collection.played_levels
        both = set(source.held_out_levels) & set(played)
        held_out = [level_id for level_id in source.held_out_levels if level_id not in both]
        if not held_out:
            raise ValueError("all held_out_levels have been trained on; give levels that are not among the buffer's.")
        if both:
            rank_zero_warn(
                f"{len(both)} of held_out_levels have been trained on meanwhile; they are left out from now."
            )
        trained_on = np.random.default_rng(self.seed).permutation(played)[: len(source.held_out_levels)].tolist()
        successes = Successes(self.success)
        for history, level_ids, noted in (
            (self.history, held_out, successes),
            (self.training_history, trained_on, None),
        ):
            if level_ids:
                history.append(
                    (source.env_steps_done, float(source.returns_on(level_ids, agent, self.seed, noted).mean()))
                )
        self._note_rate(successes)

    def _metrics(self) -> dict[str, float]:
        metrics = super()._metrics()
        if self.gap is not None:
            metrics |= {"eval/train_return": self.training_history[-1][1], "eval/generalization_gap": self.gap}
        return metrics
