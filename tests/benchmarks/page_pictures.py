# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the pages that show a method and no result.

python -m tests.benchmarks.page_pictures
"""

from __future__ import annotations

import warnings
from pathlib import Path

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict

from lightning_replay import Replay, recipes
from lightning_replay.envs import half_field as soccer
from lightning_replay.envs.half_field import MARGIN, HalfField
from lightning_replay.inspection.plotting import COLORS, make_figure, save_figure
from lightning_replay.lit.pictures import draw_level_curriculum, draw_score_against_staleness
from tests.benchmarks.learning.experiments import locks as experiment
from tests.benchmarks.learning.learners.combination_lock import CombinationLocks, TabularActorCritic
from tests.benchmarks.learning.pictures import NARROW_WIDTH, shrink

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
STARTS = 100  # of each task
ROWS, DRAWN = 2_000, 600
SEED, STALENESS_WEIGHT = 200, 0.3  # of the levels; the first seed of the experiment


def draw_half_field(path: Path) -> None:
    """Where the ball lies at the starts of every task of half-field soccer, over one start as ``render`` draws it."""
    figure, panels = make_figure("the tasks", 2, 2, 5.6, NARROW_WIDTH, sharex=True, sharey=True)
    env = HalfField(render_mode="rgb_array")
    half = soccer.HALF_WIDTH + MARGIN
    for axes, task in zip(panels.flat, HalfField.TASKS, strict=True):
        env.task = task
        balls = []
        for seed in range(STARTS):
            env.reset(seed=seed)
            balls.append((env.ball.x, env.ball.y))
        axes.imshow(env.render(), extent=(-MARGIN, soccer.FIELD_LENGTH + MARGIN, -half, half))
        axes.scatter(*zip(*balls, strict=True), s=4, color="white")
        axes.set(title=task)
        axes.grid(False)
    env.close()
    figure.supxlabel("m from midline", fontsize="medium")
    figure.supylabel("m from the middle of the goal", fontsize="medium")
    figure.suptitle(f"Ball (white) at {STARTS} starts of each\ntask; goal in yellow")
    save_figure(figure, path)


def draw_mixed_pairs(path: Path) -> None:
    """Stored observations of the pendulum, and those of batches that mix random pairs and pairs of neighbours."""
    steps = pendulum_steps(ROWS)
    buffers = {
        "random pairs\n(recipes.mixup)": recipes.mixup(ROWS, DRAWN, seed=0),
        "pairs of neighbours\n(recipes.neighborhood_mixup)": recipes.neighborhood_mixup(ROWS, DRAWN, seed=0),
    }
    figure, panels = make_figure("mixed pairs", 1, 2, 3.4, NARROW_WIDTH, sharey=True)
    for axes, (name, replay) in zip(panels[0], buffers.items(), strict=True):
        stored, mixed = steps["observation"], mixed_observations(replay, steps)
        axes.scatter(*stored[:, :2].T, s=6, color="0.7", label=f"{ROWS:,} stored")
        axes.scatter(*mixed[:, :2].T, s=6, color=COLORS[1], label=f"{len(mixed)} mixed")
        axes.set(xlabel="cosine of the angle", aspect="equal")
        axes.set_title(name, fontsize="small")
    panels[0, 0].set_ylabel("sine of the angle")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, markerscale=2.5)
    figure.suptitle("Observations of Pendulum-v1 under\nrandom actions, one batch")
    save_figure(figure, path)


def draw_levels(folder: Path) -> None:
    """The level curriculum of a run on combination locks, and scores and staleness of the locks at its end."""
    warnings.filterwarnings("ignore", message=".*took the same level as the replay before")
    (locks_experiment,) = experiment.EXPERIMENTS
    settings = locks_experiment.settings_of(f"level replay, staleness weight {STALENESS_WEIGHT:g}")
    locks, player, levels = CombinationLocks(SEED), TabularActorCritic(), experiment.levels_of(settings, SEED)
    generator, env_steps, history = np.random.default_rng(SEED + 1_000_000), 0, []  # as in the experiment
    for _ in range(settings["updates"]):
        chosen = [levels.next_level(actor) for actor in range(experiment.EPISODES_PER_UPDATE)]
        env_steps += experiment.update(chosen, locks, player, levels, generator)
        found = levels.probabilities()
        difficulty = locks.difficulty[found["level_id"].numpy()]
        masses = np.bincount(difficulty, found["probability"].numpy())
        history.append((env_steps, {float(d): float(masses[d]) for d in np.unique(difficulty)}))
    draw_level_curriculum(history, folder / "level_curriculum.png")
    draw_score_against_staleness(levels.probabilities(), folder / "score_against_staleness.png")


def mixed_observations(replay: Replay, steps: TensorDict) -> torch.Tensor:
    """Observations of a batch, without the rows that a mixing recipe leaves as they are."""
    replay.extend(steps)
    batch = replay.sample()
    return batch["observation"][batch["mixup_coefficient"] < 1]


def pendulum_steps(count: int) -> TensorDict:
    """Random play."""
    env = gymnasium.make("Pendulum-v1")
    env.action_space.seed(0)
    observation, _ = env.reset(seed=0)
    rows = []
    for _ in range(count):
        action = env.action_space.sample()
        following, reward, terminated, truncated, _ = env.step(action)
        rows.append((observation, action, following, [reward], [terminated], [truncated], [terminated or truncated]))
        observation = env.reset()[0] if truncated else following
    env.close()
    columns = [torch.from_numpy(np.array(column)) for column in zip(*rows, strict=True)]
    names = ("observation", "reward", "terminated", "truncated", "done")
    following = dict(zip(names, columns[2:], strict=True)) | {"reward": columns[3].float()}
    return TensorDict({"observation": columns[0], "action": columns[1], "next": following}, [count])


def main() -> None:
    """Draws them all."""
    draw_half_field(IMAGES / "half_field_tasks.png")
    draw_mixed_pairs(IMAGES / "mixed_pairs.png")
    draw_levels(IMAGES)
    for name in ("half_field_tasks", "mixed_pairs", "level_curriculum", "score_against_staleness"):
        shrink(IMAGES / f"{name}.png")
        print(f"written: {IMAGES / name}.png")


if __name__ == "__main__":
    main()
