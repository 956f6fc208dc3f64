# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/levels-when.md; keeps the figures of it and of docs/prompts.md in results/.

python -m tests.benchmarks.level_pictures
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from lightning_replay.inspection.plotting import COLORS, make_figure, save_figure
from lightning_replay.levels import LevelBuffer, Rank, UniformLevels, scores
from lightning_replay.levels.selector import LevelSelector
from tests.benchmarks.learning.pictures import NARROW_WIDTH, shrink
from tests.benchmarks.page_pictures import IMAGES

FILE = Path(__file__).parent / "results" / "level-pictures.json"
LEVELS, BATCH, OUTCOMES, UPDATES = 2_000, 64, 8, 200
KINDS = ("ladder", "coin", "unsolvable")


class SimulatedLearner:
    """A skill that grows by practice: level i succeeds with probability ``1 / (1 + exp(2 (difficulty_i - skill)))``.

    Of the levels seven in ten are a ladder of difficulties from 0 to 10, one in ten is a coin, and two in ten are
    unsolvable. A batch adds its mean p (1 - p) on the ladder to the skill; the coins teach nothing.
    """

    def __init__(self, seed: int, coins: float = 0.1, unsolvable: float = 0.2) -> None:
        self._random = np.random.default_rng(seed)
        self.kind = self._random.choice(3, LEVELS, p=[1.0 - coins - unsolvable, coins, unsolvable])
        self._difficulty = self._random.uniform(0.0, 10.0, LEVELS)
        self.skill = 0.0

    def rates(self) -> np.ndarray:
        rate = 1.0 / (1.0 + np.exp(2.0 * (self._difficulty - self.skill)))
        return np.select([self.kind == 0, self.kind == 1], [rate, 0.5], 0.0)

    def attempts(self, level_ids: np.ndarray) -> np.ndarray:
        rate = self.rates()[level_ids]
        return (self._random.random((len(level_ids), OUTCOMES)) < rate[:, None]).astype(np.float64)

    def practise(self, level_ids: np.ndarray) -> np.ndarray:
        outcomes, rate = self.attempts(level_ids), self.rates()[level_ids]
        self.skill += float((rate * (1.0 - rate) * (self.kind[level_ids] == 0)).mean())
        return outcomes


def learn(levels: LevelSelector, seed: int = 0, measured: bool = False, **kinds: float) -> dict[str, np.ndarray]:
    """Skill, shares of a batch by kind, and the share of the ladder levels within reach whose score is still 0."""
    learner = SimulatedLearner(seed, **kinds)
    if measured:  # all of them, before anything is learned
        levels.record(range(LEVELS), outcomes=torch.from_numpy(learner.attempts(np.arange(LEVELS))))
    curves: dict[str, list] = {"skill": [], "shares": [], "solved": [], "stale": []}
    for _ in range(UPDATES):
        ids = levels.next_levels(BATCH)
        drawn, rates = ids.numpy(), learner.rates()
        curves["shares"].append(np.bincount(learner.kind[drawn], minlength=3) / BATCH)
        curves["solved"].append(float(((learner.kind[drawn] == 0) & (rates[drawn] > 0.95)).mean()))
        levels.record(ids, outcomes=torch.from_numpy(learner.practise(drawn)))
        found = levels.probabilities()
        own, learnable = found["level_id"].numpy(), learner.rates() * (1.0 - learner.rates()) > 0.1
        wrong = (found["score"].numpy() == 0.0) & learnable[own] & (learner.kind[own] == 0)
        curves["stale"].append(wrong.sum() / max((learnable & (learner.kind == 0)).sum(), 1))
        curves["skill"].append(learner.skill)
    return {name: np.array(curve) for name, curve in curves.items()}


def learnability(staleness_weight: float = 0.1, **options) -> LevelBuffer:
    return LevelBuffer(LEVELS, score=scores.Learnability(8), staleness_weight=staleness_weight, seed=0, **options)


def draw_spread() -> dict[str, dict[str, list[float]]]:
    """Effective levels and the share of a batch that is drawn twice, by temperature and staleness weight."""
    figure, panels = make_figure("spread", 2, 1, 6.0, NARROW_WIDTH)
    rates = np.random.default_rng(0).uniform(0.0, 1.0, LEVELS)
    temperatures = (0.1, 0.3, 1.0, 3.0)
    kinds: dict[str, dict] = {"by rank": {"prioritization": Rank()}, "in proportion": {}}
    found = {}
    for number, (kind, options) in enumerate(kinds.items()):
        for style, staleness_weight in (("-", 0.1), ("--", 0.3)):
            spread, twice = [], []
            for temperature in temperatures:
                levels = learnability(staleness_weight, score_temperature=temperature, replay_in_flight=True, **options)
                levels.record(range(LEVELS), rates * (1.0 - rates))
                spread.append(levels.stats()["effective_levels"])
                drawn = [levels.next_levels(BATCH, replace=True) for _ in range(40)]
                twice.append(sum(BATCH - len(batch.unique()) for batch in drawn) / (40 * BATCH))
            label = f"{kind}, staleness weight {staleness_weight:g}"
            panels[0, 0].plot(temperatures, spread, style, marker="o", color=COLORS[number], label=label)
            panels[1, 0].plot(temperatures, twice, style, marker="o", color=COLORS[number])
            found[label] = {"temperatures": list(temperatures), "effective levels": spread, "drawn twice": twice}
    panels[0, 0].set(xscale="log", yscale="log", xlabel="score_temperature", ylabel="effective levels")
    panels[1, 0].set(xscale="log", xlabel="score_temperature", ylabel="duplicates in a batch of 64")
    figure.legend(loc="outside lower center", fontsize="small")
    save_figure(figure, IMAGES / "levels_spread.png")
    return found


def draw_wrong_scores() -> dict[str, dict[str, float]]:
    """What the batches of uniform levels and of learnability consist of, and the skill that follows."""
    arms: dict[str, Callable[[], LevelSelector]] = {
        "uniform": lambda: UniformLevels(LEVELS, seed=0),
        "learnability": learnability,
    }
    figure, panels = make_figure("wrong scores", 3, 1, 8.0, NARROW_WIDTH)
    found: dict[str, dict[str, float]] = {}
    names = ("ladder, within reach or above", "ladder, solved", "coins", "unsolvable")
    for axes, (name, make) in zip(panels.flat, arms.items(), strict=False):
        curves = learn(make())
        ladder, coins, unsolvable = curves["shares"].T
        parts = [smooth(part) for part in (ladder - curves["solved"], curves["solved"], coins, unsolvable)]
        axes.stackplot(np.arange(UPDATES), parts, colors=COLORS[:4], labels=names)
        axes.set(title=name, xlabel="updates", ylabel="share of a batch", ylim=(0, 1))
        found[f"{name}: shares of the last 100 batches"] = {
            label: float(part[-100:].mean()) for label, part in zip(names, parts, strict=True)
        }
    for number, coins in enumerate((0.0, 0.1, 0.4)):
        for style, (name, make) in zip((":", "-"), arms.items(), strict=True):
            curves = learn(make(), coins=coins)
            panels[2, 0].plot(curves["skill"], style, color=COLORS[number], label=f"{name}, {coins:.0%} coins")
            found.setdefault(f"{name}: skill by share of coins", {})[f"{coins:g}"] = float(curves["skill"][-1])
    panels[2, 0].set(xlabel="updates", ylabel="skill", ylim=(-0.5, 18))
    panels[2, 0].legend(fontsize="x-small")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    save_figure(figure, IMAGES / "levels_wrong_scores.png")
    return found


def draw_staleness() -> dict[str, dict[str, float]]:
    """Levels that came within reach and still have the score 0 of their first outcomes, by staleness weight."""
    figure, panels = make_figure("staleness", 2, 1, 6.0, NARROW_WIDTH)
    found: dict[str, dict[str, float]] = {"learnable with a score of 0, updates 20 to 80": {}, "skill after 100": {}}
    stale_share, skill_after = found.values()
    for number, weight in enumerate((0.0, 0.1, 0.3, 0.6)):
        runs = [learn(learnability(weight), seed, measured=True, coins=0.0) for seed in range(2)]
        stale, skill = (np.mean([one[key] for one in runs], 0) for key in ("stale", "skill"))
        panels[0, 0].plot(smooth(stale), color=COLORS[number], label=f"staleness weight {weight:g}")
        panels[1, 0].plot(skill, color=COLORS[number])
        stale_share[f"{weight:g}"], skill_after[f"{weight:g}"] = float(stale[20:80].mean()), float(skill[99])
    runs = [learn(UniformLevels(LEVELS, seed=0), seed, measured=True, coins=0.0) for seed in range(2)]
    skill = np.mean([one["skill"] for one in runs], 0)
    panels[1, 0].plot(skill, ":", color="0.4", label="uniform levels")
    skill_after["uniform"] = float(skill[99])
    panels[0, 0].set(xlabel="updates", ylabel="learnable levels\nwith a score of 0")
    panels[1, 0].set(xlabel="updates", ylabel="skill")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    save_figure(figure, IMAGES / "levels_staleness.png")
    return found


def draw_prompts() -> dict[str, list[float]]:
    """20,000 prompts of uniform success rates in 40 batches of 64, with the options of the paper and those here."""
    found = {}
    of_paper = {"score_temperature": 0.1, "staleness_weight": 0.1, "replay_in_flight": True}
    kinds = {"options of the paper": {"prioritization": Rank(), **of_paper}}
    rates = np.random.default_rng(0).uniform(0.0, 1.0, 20_000)
    for name, options in (kinds | {"`Learnability`": {}}).items():
        for replace in (True, False):
            levels = LevelBuffer(20_000, score=scores.Learnability(8), seed=0, **options)
            levels.record(range(20_000), rates * (1.0 - rates))
            effective = levels.stats()["effective_levels"]
            drawn = torch.stack([levels.next_levels(64, replace=replace) for _ in range(40)])
            twice = sum(64 - len(batch.unique()) for batch in drawn)
            found[f"{name}, `replace=True`" if replace else name] = [effective, twice, len(drawn.unique())]
    return found


def smooth(curve: np.ndarray, width: int = 15) -> np.ndarray:
    padded = np.pad(curve, width // 2, mode="edge")
    return np.convolve(padded, np.ones(width) / width, "valid")


def main() -> None:
    """Draws them all and writes ``results/level-pictures.json``."""
    warnings.filterwarnings("ignore", message=".*took the same level as the replay before")
    content = {
        "command": "python -m tests.benchmarks.level_pictures",
        "prompts: effective levels, twice in their batch, different ones": draw_prompts(),
        "spread": draw_spread(),
        "wrong scores": draw_wrong_scores(),
        "staleness weight": draw_staleness(),
    }
    rounded = json.loads(json.dumps(content), parse_float=lambda text: round(float(text), 4))
    FILE.write_text(json.dumps(rounded, indent=1) + "\n")
    for name in ("levels_spread", "levels_wrong_scores", "levels_staleness"):
        shrink(IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
