# SPDX-License-Identifier: Apache-2.0
"""A picture of the learning curve at the end of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

import lightning as L

from lightning_replay.lit.callbacks.evaluate import Evaluate
from lightning_replay.lit.callbacks.generalization import GeneralizationGap
from lightning_replay.lit.env_step_datamodule import source_of
from lightning_replay.pictures import import_pyplot
from lightning_replay.validation import check_kind

__all__ = ["LearningCurve", "draw_learning_curves"]

Curve = Sequence[tuple[int, float]]
_PICTURE = "the learning curve"
_MOST_EPISODES = 1_000


class LearningCurve(L.Callback):
    """Draws training returns, and evaluations if an ``Evaluate`` callback runs, against environment steps.

    Needs matplotlib: ``pip install 'lightning-replay[plots]'``.

    Args:
        path: of the picture; ``learning_curve.png`` in the trainer's ``log_dir`` if absent.
    """

    def __init__(self, path: str | None = None) -> None:
        check_kind("path", path, str | PathLike | None, "a path, or None")
        self.path = path

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Finds out before the training, not after it, that matplotlib is missing."""
        import_pyplot(_PICTURE)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the picture."""
        source = source_of(trainer, self)
        curves: dict[str, Curve] = {}
        if source.collection.episodes:
            curves |= _training_curve([(e.env_steps, e.episode_return) for e in source.collection.episodes])
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GeneralizationGap) and callback.history:
                curves |= {"held-out levels": callback.history, "levels trained on": callback.training_history}
            elif isinstance(callback, Evaluate) and callback.history:
                curves["evaluation"] = callback.history
        path = Path(self.path) if self.path else Path(trainer.log_dir or ".") / "learning_curve.png"
        draw_learning_curves(curves, path)


def _training_curve(episodes: Curve) -> dict[str, Curve]:
    """Each episode, or of many the means of as many consecutive ones as leave a readable line."""
    if len(episodes) <= _MOST_EPISODES:
        return {"training episodes": episodes}
    size = -(-len(episodes) // (_MOST_EPISODES // 5))
    groups = [episodes[start : start + size] for start in range(0, len(episodes), size)]
    means = [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
    return {f"training episodes, means of {size}": means}


def draw_learning_curves(curves: Mapping[str, Curve], path: Path, title: str = "") -> None:
    """Writes one line per curve of ``(env_steps, return)`` points as a PNG file."""
    pyplot = import_pyplot(_PICTURE)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for label, points in curves.items():
        marker = "o" if len(points) == 1 else None  # of which there is no line
        axes.plot([steps for steps, _ in points], [value for _, value in points], label=label, marker=marker)
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return")
    axes.set_title(title)
    if curves:
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
