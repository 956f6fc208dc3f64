# SPDX-License-Identifier: Apache-2.0
"""Pictures of the levels that were replayed: the curriculum over time, scores against staleness at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import lightning as L
import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from tensordict import TensorDictBase

from lightning_replay.analysis.plotting import (
    consecutive_groups,
    count_on,
    import_matplotlib,
    log_colors,
    make_figure,
    save_figure,
)
from lightning_replay.levels.environments.level_wrappers import LevelWrapper
from lightning_replay.lit.callbacks.learning_curve import Picture
from lightning_replay.lit.datamodules.levels import level_source_of
from lightning_replay.lit.environments import make_environment
from lightning_replay.validation import check_callable, checked_count

__all__ = ["LevelCurriculum", "ScoreAgainstStaleness", "draw_level_curriculum", "draw_score_against_staleness"]

Difficulty = Callable[[int], float]
Curriculum = Sequence[tuple[int, Mapping[float, float]]]
_CURRICULUM = "the picture of the level curriculum"
_SCATTER = "the picture of scores against staleness"


class LevelCurriculum(Picture):
    """Draws the probability of replaying levels of each difficulty over the run, figure 4 of the paper.

    During the run loggers record ``levels/expected_difficulty``. Selectors without scores have no such probabilities:
    nothing is drawn, and one line is printed.
    Jiang et al. 2021, https://arxiv.org/abs/2010.03934. Needs matplotlib: ``pip install 'lightning-replay[plots]'``.

    Args:
        difficulty: function of a level's id to one of a few numbers, called once per level; by default
            ``info["difficulty"]`` of a reset to that level in an environment of its own.
        every_n_rollouts: rollouts between two records.
        path: of the picture; ``level_curriculum.png`` in the trainer's ``log_dir`` if absent.

    Raises:
        ValueError: a count below 1; during the run an environment whose infos have no difficulty.
    """

    _content, _file_name = _CURRICULUM, "level_curriculum.png"

    def __init__(
        self, difficulty: Difficulty | None = None, every_n_rollouts: int = 10, path: str | None = None
    ) -> None:
        super().__init__(path)
        if difficulty is not None:
            check_callable("difficulty", difficulty, "a function from a level's id to a number, or None")
        self.difficulty = difficulty
        self.every_n_rollouts: int = checked_count("every_n_rollouts", every_n_rollouts)
        self.history: list[tuple[int, dict[float, float]]] = []
        self._known: dict[int, float] = {}
        self._environment: gymnasium.Env[Any, Any] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.history and self.history[-1][0] > level_source_of(trainer, self).env_steps_done:
            self.history.clear()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Records when due, and at the end."""
        source = level_source_of(trainer, self)
        if (source.updates_done % self.every_n_rollouts and not source.is_finished) or len(source.levels) == 0:
            return
        levels = source.levels.probabilities()
        known, masses = self._known, defaultdict[float, float](float)
        ids = levels["level_id"].tolist()
        self._known = {one: known[one] if one in known else self._measure(trainer, one) for one in ids}
        for difficulty, probability in zip(self._known.values(), levels["probability"].tolist(), strict=True):
            masses[difficulty] += probability
        self.history.append((source.env_steps_done, dict(sorted(masses.items()))))
        expected = sum(difficulty * mass for difficulty, mass in masses.items())
        for logger in trainer.loggers:
            logger.log_metrics({"levels/expected_difficulty": expected})

    def _measure(self, trainer: L.Trainer, level_id: int) -> float:
        if self.difficulty is not None:
            return float(self.difficulty(level_id))
        if self._environment is None:
            source = level_source_of(trainer, self)
            self._environment = LevelWrapper(make_environment(source.env, source.env_kwargs), check=False)
        _, info = self._environment.reset(seed=level_id)
        if "difficulty" not in info:
            raise ValueError(
                f'a reset of {self._environment} gives no info["difficulty"], only {sorted(map(str, info))}; give '
                "LevelCurriculum(difficulty=...), a function from a level's id to a number."
            )
        return float(info["difficulty"])

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.history:
            draw_level_curriculum(self.history, self._file(trainer))
        else:
            _print_reason(self, trainer, f"fewer than {self.every_n_rollouts} rollouts were made")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def state_dict(self) -> dict[str, Any]:
        return {"history": [[steps, list(masses.items())] for steps, masses in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = [
            (int(steps), {float(d): float(m) for d, m in masses}) for steps, masses in state_dict["history"]
        ]


class ScoreAgainstStaleness(Picture):
    """Draws each level's score against its staleness, coloured by its probability, as they are at the end.

    For selectors without scores nothing is drawn, and one line is printed. Needs matplotlib:
    ``pip install 'lightning-replay[plots]'``.

    Args:
        path: of the picture; ``score_against_staleness.png`` in the trainer's ``log_dir`` if absent.
    """

    _content, _file_name = _SCATTER, "score_against_staleness.png"

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        levels = level_source_of(trainer, self).levels.probabilities()
        if len(levels):
            draw_score_against_staleness(levels, self._file(trainer))
        else:
            _print_reason(self, trainer)


def draw_level_curriculum(history: Curriculum, path: Path) -> None:
    """Writes a PNG file with one stacked area per difficulty; of a single record one stacked bar.

    More than 100 records are drawn as means of at most 50 groups of consecutive ones.

    Args:
        history: environment steps and the probability of each difficulty then; one that is missing has none.
        path: of the file.
    """
    difficulties = sorted({difficulty for _, masses in history for difficulty in masses})
    records = [[step, *(masses.get(difficulty, 0.0) for difficulty in difficulties)] for step, masses in history]
    groups = consecutive_groups(records)
    steps = [int(group[-1, 0]) for group in groups]
    areas = np.array([group[:, 1:].mean(0) for group in groups]).T
    of = "" if len(groups) == len(history) else f", mean of about {round(len(history) / len(groups))} records"
    figure, panels = make_figure(_CURRICULUM)
    axes = panels[0, 0]
    colors = import_matplotlib(_CURRICULUM).colormaps["viridis"](np.linspace(0.0, 1.0, len(difficulties)))
    labels = [f"{difficulty:g}" for difficulty in difficulties]
    if len(history) > 1:
        axes.stackplot(steps, areas, labels=labels, colors=colors)
        axes.set_xlim(steps[0], steps[-1])
        count_on(axes.xaxis)
    else:
        for label, color, mass, below in zip(labels, colors, areas, areas.cumsum(axis=0) - areas, strict=True):
            axes.bar([str(step) for step in steps], mass, bottom=below, width=0.1, label=label, color=color)
        axes.set_xlim(-0.5, 0.5)
    axes.set(xlabel="environment steps", ylabel=f"probability of replay{of}", ylim=(0.0, 1.0))
    axes.set_title("Level curriculum: difficulty of the levels replayed")
    axes.legend(title="difficulty", loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)  # as they are stacked
    save_figure(figure, path)


def draw_score_against_staleness(levels: TensorDictBase, path: Path) -> None:
    """Writes a PNG file with one point per level of ``levels.probabilities()``, the most probable on top.

    Colours are on a logarithmic scale, because ranks at a low temperature give one level nearly all the probability.
    """
    figure, panels = make_figure(_SCATTER)
    levels = levels[levels["probability"].argsort()]
    colors, norm = log_colors(levels["probability"].numpy())
    axes = panels[0, 0]
    staleness, score = levels["staleness"].numpy(), levels["score"].numpy()
    points = axes.scatter(staleness, score, c=colors, norm=norm, s=18)
    axes.set(xlabel="staleness (episodes since the level was played)", ylabel="score of the level")
    axes.set_title(f"Scores and staleness of {len(levels):,} levels")
    figure.colorbar(points, label="probability of replay (logarithmic)")
    save_figure(figure, path)


def _print_reason(callback: L.Callback, trainer: L.Trainer, where_there_are_scores: str = "") -> None:
    levels = level_source_of(trainer, callback).levels
    reason = where_there_are_scores if len(levels) else "no level has a score"
    rank_zero_info(f"{type(callback).__name__} drew nothing, because {reason}: {levels!r}")
