# SPDX-License-Identifier: Apache-2.0
"""Callbacks that draw pictures: learning curves, contents of the buffer, levels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from os import PathLike
from pathlib import Path
from typing import Any

import gymnasium
import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from tensordict import TensorDictBase

from lightning_replay.inspection.contents import LevelContents, ReplayContents, look_at
from lightning_replay.inspection.page import Subject, page_of, pictures_of
from lightning_replay.inspection.plotting import (
    consecutive_groups,
    count_on,
    fill_band,
    import_matplotlib,
    log_colors,
    make_figure,
    save_figure,
)
from lightning_replay.levels.environments import LevelWrapper
from lightning_replay.lit.collection import Episode
from lightning_replay.lit.data import ActsAtUpdates, EnvStepDataModule, source_of
from lightning_replay.lit.evaluation import Evaluate, GeneralizationGap
from lightning_replay.lit.level_data import LevelDataModule, level_source_of
from lightning_replay.lit.replay_data import ReplayDataModule
from lightning_replay.lit.rollouts import make_environment
from lightning_replay.mixed_replay import MixedReplay
from lightning_replay.options import check_kind, checked_count, checked_local_path, checked_optional_count
from lightning_replay.replay import Replay
from lightning_replay.state import Stateful

_UPDATES = 10_000
_ROLLOUTS = 100


class _Picture(L.Callback):
    """Writes to a ``path``, by default a file in the trainer's ``log_dir``."""

    _file_name: str
    _content: str = ""  # what is drawn with matplotlib, for the error without it

    def __init__(self, path: str | None = None) -> None:
        check_kind("path", path, str | PathLike | None, "a path, or None")
        self.path = path

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuses a missing Matplotlib and a URL before the training begins.

        :meta private:
        """
        if self._content:
            import_matplotlib(self._content)
        self._file(trainer)

    def _file(self, trainer: L.Trainer) -> Path:
        return checked_local_path("path", self.path or Path(trainer.log_dir or ".") / self._file_name)


class InspectBuffer(Stateful, _Picture, ActsAtUpdates):
    """Every ``every_n_updates`` and at the end looks into the replay or the levels, and writes a page of pictures.

    The page is that of ``lightning-replay inspect``, with the figures over the run so far. All loggers record the
    figures as ``replay/*`` or ``levels/*``, see
    :meth:`~lightning_replay.inspection.contents.ReplayContents.figures`. TensorBoard and W&B also record pictures (film
    strips of the episodes of the highest priority, heat maps of levels), TensorBoard histograms of ages and priorities.
    Of a :class:`~lightning_replay.MixedReplay` it shows both sides, with figures ``replay/online/*`` and
    ``replay/offline/*``. Reads rewards and episode ends of all rows: about 0.5 s for a million.

    Args:
        every_n_updates: updates of the data module between two looks, by default 10,000 with a replay and 100 with
            levels.
        path: Path of the page, by default ``buffer.html`` in the trainer's ``log_dir``.

    Raises:
        TypeError: at ``fit``, a data module that counts no environment steps, or a sharded replay.
    """

    saved_attributes: tuple[str, ...] = ("history",)
    _file_name = "buffer.html"

    def __init__(self, every_n_updates: int | None = None, path: str | None = None) -> None:
        super().__init__(path)
        self.every_n_updates: int | None = checked_optional_count("every_n_updates", every_n_updates)
        self.history: dict[str, tuple[list[float], list[float]]] = {}
        self._last = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuses a replay whose rows cannot be read.

        :meta private:
        """
        source = source_of(trainer, self)
        if isinstance(source, ReplayDataModule):
            accepted = "a Replay in this process, whose rows can be read; leave InspectBuffer out"
            check_kind("replay", source.replay, Replay | MixedReplay, accepted)
        if any(steps[-1] > source.steps_done for steps, _ in self.history.values()):
            self.history.clear()  # It belongs to another run.
        self._last = source.updates_done

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Writes the page if a look is due.

        :meta private:
        """
        source = source_of(trainer, self)
        if self.is_due(source):
            self._look(trainer, pl_module, source)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the page of the last update.

        :meta private:
        """
        source = source_of(trainer, self)
        if source.updates_done > self._last or not self.history:
            self._look(trainer, pl_module, source)

    def is_due(self, source: EnvStepDataModule) -> bool:
        """Returns whether the callback acts after the newest update.

        :meta private:
        """
        every = self.every_n_updates or (_ROLLOUTS if isinstance(source, LevelDataModule) else _UPDATES)
        return source.updates_done // every > self._last // every

    def _look(self, trainer: L.Trainer, pl_module: L.LightningModule, source: EnvStepDataModule) -> None:
        self._last = source.updates_done
        if isinstance(source, ReplayDataModule):
            prefix = "replay"
            subjects = [Subject(side, look_at(replay)) for side, replay in _sides_of(source.replay)]
        elif isinstance(source, LevelDataModule):
            prefix = "levels"
            subjects = [Subject("", look_at(source.levels))]
        else:
            return
        figures: dict[str, float] = {}
        for side, contents, _ in subjects:
            figures |= {f"{side}/{name}".lstrip("/"): float(value) for name, value in contents.figures().items()}
        for name, value in figures.items():
            steps, values = self.history.setdefault(name, ([], []))
            steps.append(source.steps_done)
            values.append(value)
        for logger in trainer.loggers:
            logger.log_metrics({f"{prefix}/{name}": value for name, value in figures.items()})
        for side, contents, _ in subjects:
            pictures = pictures_of(contents)
            histograms = _histograms(contents)
            for logger in trainer.loggers:
                _log_pictures(logger, f"{prefix}/{side}".rstrip("/"), pictures, histograms, source.steps_done)
        if trainer.is_global_zero:
            file = self._file(trainer)
            file.parent.mkdir(parents=True, exist_ok=True)
            subtitle = f"environment step {source.env_steps_done:,}, update {source.updates_done:,}"
            page = page_of(f"Buffer of {type(pl_module).__name__}", subtitle, subjects, self.history)
            file.write_text(page, encoding="utf-8")


def _sides_of(replay: Any) -> Iterator[tuple[str, Replay]]:
    # The replay, or with their names the sides of a mixed one.
    if isinstance(replay, MixedReplay):
        yield from (("online", replay.online), ("offline", replay.offline))
    else:
        yield "", replay


def _histograms(contents: ReplayContents | LevelContents) -> dict[str, np.ndarray]:
    if isinstance(contents, LevelContents):
        return {"score": contents.score} if len(contents) else {}
    found = {} if contents.ages is None else {"age": contents.ages}
    if contents.draws is not None and contents.draws.priority is not None:
        found["priority"] = contents.draws.priority
    return {name: values for name, values in found.items() if len(values)}


def _log_pictures(
    logger: Logger, prefix: str, pictures: dict[str, np.ndarray], histograms: dict[str, np.ndarray], step: int
) -> None:
    if isinstance(logger, WandbLogger):
        for name, picture in pictures.items():
            logger.log_image(f"{prefix}/{name}", [picture], step)
    elif isinstance(logger, TensorBoardLogger):
        for name, picture in pictures.items():
            logger.experiment.add_image(f"{prefix}/{name}", picture, step, dataformats="HWC")
        for name, values in histograms.items():
            logger.experiment.add_histogram(f"{prefix}/{name}_histogram", values, step)


Curve = Sequence[tuple[int, float]]


class LearningCurve(_Picture, ActsAtUpdates):
    """Draws training returns, and evaluations if an ``Evaluate`` callback runs, against environment steps.

    Many training episodes are drawn as means of consecutive ones, with a band of one standard deviation. Needs
    matplotlib: ``pip install 'lightning-replay[plots]'``.

    Args:
        path: Path of the picture, by default ``learning_curve.png`` in the trainer's ``log_dir``.
    """

    _content = "the learning curve"
    _file_name = "learning_curve.png"

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path)
        self.history: list[tuple[int, float]] = []
        self._newest: Episode | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Removes the points of another run.

        :meta private:
        """
        if self.history and self.history[-1][0] > source_of(trainer, self).steps_done:
            self.history.clear()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Collects the episodes that ended.

        :meta private:
        """
        episodes = source_of(trainer, self).collection.episodes
        # Episodes are compared by identity, because the collector drops old ones and their number stays the same.
        ended = list(takewhile(lambda episode: episode is not self._newest, reversed(episodes)))
        if ended:
            self._newest = ended[0]
            self.history += [(episode.env_steps, episode.episode_return) for episode in reversed(ended)]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draws the picture.

        :meta private:
        """
        curves: dict[str, Curve] = {"training episodes": self.history} if self.history else {}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GeneralizationGap) and callback.history:
                curves |= {"held-out levels": callback.history, "levels trained on": callback.training_history}
            elif isinstance(callback, Evaluate) and callback.history:
                of = f", mean of {callback.episodes} episodes" if callback.episodes > 1 else ""
                curves[f"evaluation{of}"] = callback.history
        source = source_of(trainer, self)
        on = f" on {source.env}" if isinstance(source.env, str) else ""
        clock = "environment steps" if source.pace.env_steps else "updates"
        draw_learning_curves(curves, self._file(trainer), f"Learning curve of {type(pl_module).__name__}{on}", clock)

    def state_dict(self) -> dict[str, Any]:
        """Returns the points, float64 ``[N, 2]``.

        :meta private:
        """
        return {"history": torch.tensor(self.history, dtype=torch.float64).reshape(-1, 2)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`.

        :meta private:
        """
        self.history = [(int(steps), value) for steps, value in state_dict["history"].tolist()]


def draw_learning_curves(
    curves: Mapping[str, Curve], path: Path, title: str = "Learning curve", clock: str = "environment steps"
) -> None:
    """Writes a picture with one line per curve of ``(env_steps, return)`` points.

    A curve of more than 100 points is drawn as the means of at most 50 groups of consecutive points. A band shows one
    standard deviation of the returns in a group.

    Args:
        curves: Curves by their names in the legend.
        path: Path of the file.
        title: Title above the figure.
        clock: Unit of the steps of the points.
    """
    figure, panels = make_figure(LearningCurve._content)
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
    axes.set(xlabel=clock, ylabel="return of an episode", title=title)
    count_on(axes.xaxis)
    if curves:
        axes.legend(fontsize="small")
    save_figure(figure, path)


Difficulty = Callable[[int], float]
Curriculum = Sequence[tuple[int, Mapping[float, float]]]


class LevelCurriculum(Stateful, _Picture):
    """Draws the probability of replaying levels of each difficulty over the run, figure 4 of the paper.

    During the run loggers record ``levels/expected_difficulty``. Selectors without scores have no such probabilities:
    nothing is drawn, and one line is printed.
    Jiang et al. 2021, https://arxiv.org/abs/2010.03934. Needs matplotlib: ``pip install 'lightning-replay[plots]'``.

    Args:
        difficulty: function of a level's id to one of a few numbers, called once per level, by default
            ``info["difficulty"]`` of a reset to that level in a separate environment.
        every_n_rollouts: Number of rollouts between two records.
        path: Path of the picture, by default ``level_curriculum.png`` in the trainer's ``log_dir``.

    Raises:
        ValueError: during the run an environment whose infos have no difficulty.
    """

    saved_attributes: tuple[str, ...] = ("history",)
    _content = "the picture of the level curriculum"
    _file_name = "level_curriculum.png"

    def __init__(
        self, difficulty: Difficulty | None = None, every_n_rollouts: int = 10, path: str | None = None
    ) -> None:
        super().__init__(path)
        check_kind("difficulty", difficulty, Callable | None, "a function from a level's id to a number, or None")
        self.difficulty = difficulty
        self.every_n_rollouts: int = checked_count("every_n_rollouts", every_n_rollouts)
        self.history: list[tuple[int, dict[float, float]]] = []
        self._known: dict[int, float] = {}
        self._environment: gymnasium.Env[Any, Any] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Removes the records of another run.

        :meta private:
        """
        if self.history and self.history[-1][0] > level_source_of(trainer, self).env_steps_done:
            self.history.clear()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Adds a record if one is due.

        :meta private:
        """
        source = level_source_of(trainer, self)
        if (source.updates_done % self.every_n_rollouts and not source.is_finished) or len(source.levels) == 0:
            return
        levels = source.levels.probabilities()
        known = self._known
        masses: dict[float, float] = defaultdict(float)
        # one measurement for each level that is held. Forgotten levels are dropped
        self._known = {
            one: known[one] if one in known else self._measure(trainer, one) for one in levels["level_id"].tolist()
        }
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
        """Draws the picture, or prints why there is none.

        :meta private:
        """
        if self.history:
            draw_level_curriculum(self.history, self._file(trainer))
        else:
            _print_reason(self, trainer, f"fewer than {self.every_n_rollouts} rollouts were made")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Closes the environment.

        :meta private:
        """
        if self._environment is not None:
            self._environment.close()
            self._environment = None


class ScoreAgainstStaleness(_Picture):
    """Draws each level's score against its staleness, colored by its probability, as they are at the end.

    For selectors without scores nothing is drawn, and one line is printed. Needs matplotlib:
    ``pip install 'lightning-replay[plots]'``.

    Args:
        path: Path of the picture, by default ``score_against_staleness.png`` in the trainer's ``log_dir``.
    """

    _content = "the picture of scores against staleness"
    _file_name = "score_against_staleness.png"

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draws the picture, or prints why there is none.

        :meta private:
        """
        levels = level_source_of(trainer, self).levels.probabilities()
        if len(levels):
            draw_score_against_staleness(levels, self._file(trainer))
        else:
            _print_reason(self, trainer)


def draw_level_curriculum(history: Curriculum, path: Path) -> None:
    """Writes a PNG file with one stacked area per difficulty, or one stacked bar for a single record.

    More than 100 records are drawn as means of at most 50 groups of consecutive ones.

    Args:
        history: environment steps and the probability of each difficulty then. A missing difficulty has none.
        path: Path of the file.
    """
    difficulties = sorted({difficulty for _, masses in history for difficulty in masses})
    records = [[step, *(masses.get(difficulty, 0.0) for difficulty in difficulties)] for step, masses in history]
    groups = consecutive_groups(records)
    steps = [int(group[-1, 0]) for group in groups]
    areas = np.array([group[:, 1:].mean(0) for group in groups]).T
    of = "" if len(groups) == len(history) else f", mean of about {round(len(history) / len(groups))} records"
    figure, panels = make_figure(LevelCurriculum._content)
    axes = panels[0, 0]
    colors = import_matplotlib(LevelCurriculum._content).colormaps["viridis"](np.linspace(0.0, 1.0, len(difficulties)))
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
    axes.legend(title="difficulty", loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)  # the order of the stack
    save_figure(figure, path)


def draw_score_against_staleness(levels: TensorDictBase, path: Path) -> None:
    """Writes a PNG file with one point per level of ``levels.probabilities()``, the most probable on top.

    Colors are on a logarithmic scale, because ranks at a low temperature give one level nearly all the probability.
    """
    figure, panels = make_figure(ScoreAgainstStaleness._content)
    levels = levels[levels["probability"].argsort()]
    colors, norm = log_colors(levels["probability"].numpy())
    axes = panels[0, 0]
    staleness = levels["staleness"].numpy()
    points = axes.scatter(staleness, levels["score"].numpy(), c=colors, norm=norm, s=18)
    axes.set(xlabel="staleness (episodes since the level was played)", ylabel="score of the level")
    axes.set_title(f"Scores and staleness of {len(levels):,} levels")
    figure.colorbar(points, label="probability of replay (logarithmic)")
    save_figure(figure, path)


def _print_reason(callback: L.Callback, trainer: L.Trainer, where_there_are_scores: str = "") -> None:
    levels = level_source_of(trainer, callback).levels
    reason = where_there_are_scores if len(levels) else "no level has a score"
    rank_zero_info(f"{type(callback).__name__} drew nothing, because {reason}: {levels!r}")
