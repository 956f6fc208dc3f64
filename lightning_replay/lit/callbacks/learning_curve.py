# SPDX-License-Identifier: Apache-2.0
"""A picture of the learning curve at the end of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from os import PathLike
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

from lightning_replay.analysis.plotting import (
    consecutive_groups,
    count_on,
    fill_band,
    import_matplotlib,
    make_figure,
    save_figure,
)
from lightning_replay.lit.callbacks.evaluate import Evaluate, GeneralizationGap
from lightning_replay.lit.collectors import Episode
from lightning_replay.lit.datamodules.env_steps import ActsAtUpdates, source_of
from lightning_replay.validation import check_kind

__all__ = ["LearningCurve", "Picture", "draw_learning_curves"]

Curve = Sequence[tuple[int, float]]
_PICTURE = "the learning curve"


class Picture(L.Callback):
    """Writes a picture at the end of training. Needs matplotlib: ``pip install 'lightning-replay[plots]'``.

    Args:
        path: of the picture; by default a file in the trainer's ``log_dir``, named as the class.
    """

    _content: str  # what is drawn, for the error without matplotlib
    _file_name: str

    def __init__(self, path: str | None = None) -> None:
        check_kind("path", path, str | PathLike | None, "a path, or None")
        self.path = path

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Imports matplotlib, so that it is missing before the training and not after it."""
        import_matplotlib(self._content)

    def _file(self, trainer: L.Trainer) -> Path:
        return Path(self.path) if self.path else Path(trainer.log_dir or ".") / self._file_name


class LearningCurve(Picture, ActsAtUpdates):
    """Draws training returns, and evaluations if an ``Evaluate`` callback runs, against environment steps.

    Many training episodes are drawn as means of consecutive ones, with a band of one standard deviation. Needs
    matplotlib: ``pip install 'lightning-replay[plots]'``.

    Args:
        path: of the picture; ``learning_curve.png`` in the trainer's ``log_dir`` if absent.
    """

    _content, _file_name = _PICTURE, "learning_curve.png"

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path)
        self.history: list[tuple[int, float]] = []
        self._newest: Episode | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.history and self.history[-1][0] > source_of(trainer, self).env_steps_done:
            self.history.clear()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        episodes = source_of(trainer, self).collection.episodes
        ended = list(takewhile(lambda episode: episode is not self._newest, reversed(episodes)))
        if ended:
            self._newest = ended[0]
            self.history += [(episode.env_steps, episode.episode_return) for episode in reversed(ended)]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        curves: dict[str, Curve] = {"training episodes": self.history} if self.history else {}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GeneralizationGap) and callback.history:
                curves |= {"held-out levels": callback.history, "levels trained on": callback.training_history}
            elif isinstance(callback, Evaluate) and callback.history:
                of = f", mean of {callback.episodes} episodes" if callback.episodes > 1 else ""
                curves[f"evaluation{of}"] = callback.history
        env = source_of(trainer, self).env
        on = f" on {env}" if isinstance(env, str) else ""
        draw_learning_curves(curves, self._file(trainer), f"Learning curve of {type(pl_module).__name__}{on}")

    def state_dict(self) -> dict[str, Any]:
        """The training episodes so far: steps and returns, float64 ``[E, 2]``."""
        return {"history": torch.tensor(self.history, dtype=torch.float64).reshape(-1, 2)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = [(int(steps), value) for steps, value in state_dict["history"].tolist()]


def draw_learning_curves(curves: Mapping[str, Curve], path: Path, title: str = "Learning curve") -> None:
    """Writes a picture with one line per curve of ``(env_steps, return)`` points.

    A curve of more than 100 points is drawn as the means of at most 50 groups of consecutive ones, with a band of one
    standard deviation of the returns in a group.

    Args:
        curves: by their names in the legend.
        path: of the file.
        title: above the figure.
    """
    figure, panels = make_figure(_PICTURE)
    axes = panels[0, 0]
    for label, points in curves.items():
        groups = consecutive_groups(points) if points else []
        if len(groups) == len(points):
            marker = "o" if len(points) == 1 else None  # a single point has no line
            axes.plot([steps for steps, _ in points], [value for _, value in points], label=label, marker=marker)
            continue
        at, mean = np.array([(group[-1, 0], group[:, 1].mean()) for group in groups]).T
        words = f"{label}, mean ± standard deviation of about {round(len(points) / len(groups))}"
        (line,) = axes.plot(at, mean, label=words)
        fill_band(axes, at, mean, np.array([group[:, 1].std() for group in groups]), line)
    axes.set(xlabel="environment steps", ylabel="return of an episode", title=title)
    count_on(axes.xaxis)
    if curves:
        axes.legend(fontsize="small")
    save_figure(figure, path)
