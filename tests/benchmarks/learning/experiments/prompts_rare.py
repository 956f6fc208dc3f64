# SPDX-License-Identifier: Apache-2.0
"""Prompts of which few give a gradient: uniform, drawn again, by learnability, and by the score of level replay."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, final, mean_of, steps_to
from tests.benchmarks.learning.experiments.prompts import example
from tests.benchmarks.learning.recorder import Recorder

# Weights by seed and settings. All arms of a seed begin with the same weights.
_IMITATED: dict[Any, dict[str, Any]] = {}


def sums(easy: int, hard: int, held_out: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Different prompts to learn from, and held-out hard prompts.

    Easy sums have a number of one digit. Both numbers of hard sums have two digits.
    """
    rng = random.Random(seed)
    simple = [(a, b) for a in range(100) for b in range(100) if a < 10 or b < 10]
    difficult = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    drawn = rng.sample(difficult, hard + held_out)
    asked = rng.sample(simple, easy) + drawn[:hard]
    return [prompt_of(*pair) for pair in asked], [prompt_of(*pair) for pair in drawn[hard:]]


def prompt_of(a: int, b: int) -> dict[str, Any]:
    """The prompt of one sum."""
    return {"question": f"{a:02}+{b:02}=", "answer": a + b}


def imitate(model: Any, trained: dict[str, Any], seed: int, settings: Settings) -> None:
    """Loads weights that imitate right answers, the same for all arms of a seed.

    They are to easy sums, until these are answered, and to a few hard sums.
    """
    key = seed, settings["easy"], settings["shown"], settings["imitated"]
    if key not in _IMITATED:
        shown = {name: column[: settings["easy"] + settings["shown"]] for name, column in trained.items()}
        easy = {name: column[: settings["easy"]] for name, column in trained.items()}
        model.imitate(shown, easy, settings["imitated"])
        _IMITATED[key] = copy.deepcopy(model.state_dict())
    model.load_state_dict(_IMITATED[key])


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records what is answered, by the number of generated groups, and the groups until a level is reached."""
    import lightning as L
    import torch

    from lightning_replay.levels import LevelBuffer, LevelSet, UniformLevels, scores

    (seed,) = seeds
    lp = example()
    asked, others = sums(settings["easy"], settings["hard"], settings["held_out"], seed)
    prompts = LevelSet(asked)

    def levels_of() -> UniformLevels | LevelBuffer:
        if settings["levels"] == "uniform":
            return UniformLevels(prompts, seed=seed)
        is_learnability = settings["levels"] == "learnability"
        return LevelBuffer(
            prompts,
            score=scores.Learnability(settings["window"]) if is_learnability else None,
            replay_in_flight=False,
            staleness_weight=settings["staleness_weight"],
            replay_probability=settings["replay_probability"],
            seed=seed,
        )

    class Adder(lp.Adder):
        """Counts generated groups, draws again if asked to, and gives scores if levels have no outcomes."""

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            parts = []
            num_informative = 0
            while True:
                parts.append(self.answered(batch))
                num_informative += int(parts[-1][3].sum())
                is_enough = num_informative >= settings["batch_size"] or len(parts) == settings["most_draws"]
                if not settings["draws_again"] or is_enough:
                    break
                level_ids = self.levels.next_levels(settings["batch_size"])
                batch = lp.encode([prompts[level_id] for level_id in level_ids.tolist()])
            question, written, outcome, has_gradient = (torch.cat(columns) for columns in zip(*parts, strict=True))
            if settings["draws_again"]:
                chosen = has_gradient.nonzero().flatten()[: settings["batch_size"]]
                question, written, outcome = (column[chosen] for column in (question, written, outcome))
            advantage = (outcome - outcome.mean(1, keepdim=True)) / (outcome.std(1, keepdim=True) + 1e-4)
            if not len(outcome):  # No group has a gradient.
                return 0.0 * self.head[1].bias.sum()
            log_probability = self.log_probability(question.flatten(0, 1), written.flatten(0, 1))
            return -(advantage.flatten() * log_probability).mean()

        def answered(self, batch: Any) -> tuple[torch.Tensor, ...]:
            """Returns questions, written answers, outcomes ``[G, K]``, and which groups give a gradient, ``[G]``."""
            question, answer = (batch[key].repeat_interleave(self.group_size, 0) for key in ("question", "answer"))
            written = self.write(question)
            outcome = (written == answer).all(1).float().view(-1, self.group_size)
            if settings["levels"] == "score":
                self.levels.record(batch["level_id"], (outcome - outcome.mean(1, keepdim=True)).abs().mean(1).double())
            else:
                self.levels.record(batch["level_id"], outcomes=outcome)
            self.groups += len(outcome)
            has_gradient = outcome.std(1) > 0
            self.informative.append(float(has_gradient.float().mean()))
            grouped = (column.view(len(outcome), self.group_size, -1) for column in (question, written))
            return *grouped, outcome, has_gradient

    class Judge(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, model: Any, *ignored: Any) -> None:
            while model.groups >= model.next_judged and model.next_judged <= settings["groups"]:
                measure(model.next_judged)
                model.next_judged += settings["evaluate_every"]
            trainer.should_stop = model.groups >= settings["groups"]

    def measure(groups: int) -> None:
        held_out = model.success(judged)
        out.record(
            groups,
            held_out=[held_out],
            informative=[sum(model.informative) / max(len(model.informative), 1)],
        )
        model.informative.clear()
        if held_out >= settings["level"]:
            reached.append(groups)

    L.seed_everything(seed, verbose=False)
    model: Any = Adder(levels_of(), settings["learning_rate"], settings["group_size"], settings["width"])
    model.informative = []
    model.groups = 0
    model.next_judged = settings["evaluate_every"]
    trained = lp.encode(list(prompts))
    judged = lp.encode(list(LevelSet(others)))
    reached: list[int] = []
    imitate(model, trained, seed, settings)
    torch.manual_seed(seed)
    measure(0)
    lp.train(model, prompts, settings["groups"], settings["batch_size"], [Judge()])
    out.final(groups_to_level=[reached[0] if reached else settings["groups"] + settings["evaluate_every"]])
    out.final(share_reached=[float(np.sign(len(reached)))])


LEARNABLE: Settings = {"levels": "learnability", "window": 16}
FAST: Settings = {
    "easy": 60,
    "hard": 40,
    "held_out": 20,
    "imitated": 0.0,
    "groups": 256,
    "evaluate_every": 128,
    "shown": 2,
}
EXPERIMENTS = (
    Experiment(
        name="prompts-rare",
        title="Sums of which few give a gradient, a small transformer: prompts by learnability",
        claim="levels of high p (1 - p) learn faster than uniform ones and than those of regret scores (Rutherford et "
        "al. 2024, https://arxiv.org/abs/2408.15099); groups without a gradient are drawn again (DAPO, Yu et al. 2025, "
        "https://arxiv.org/abs/2503.14476). In `prompts` half of the uniform groups give a gradient; here few do.",
        task="As `prompts`, with 1,400 sums in which one number is a digit, and 600 of two numbers of two digits. The "
        "transformer imitates right answers to the former, and to ten of the latter, until 99.5 % of the former are "
        "answered: then hardly any of the former and few of the latter give a gradient. 64 groups of 8 answers in a "
        "batch. `drawn again` draws further prompts until 64 groups with a gradient are there, at most 8 times. "
        "`score` replays by rank of the mean distance of the outcomes from their mean, which is the L1 value loss if "
        "the mean is the value. All level buffers leave levels in flight out and replay with probability 0.8. Each "
        "generated group counts. Settings were chosen on one pilot run of uniform prompts.",
        length="{groups:,} generated groups",
        arms={
            "uniform": {"levels": "uniform"},
            "uniform, drawn again": {"levels": "uniform", "draws_again": True},
            "learnability": LEARNABLE,
            "learnability, staleness weight 0.3": {**LEARNABLE, "staleness_weight": 0.3},
            "level replay's score, staleness weight 0.3": {"levels": "score", "staleness_weight": 0.3},
        },
        settings={
            "easy": 1_400,
            "hard": 600,
            "shown": 10,
            "held_out": 500,
            "imitated": 0.995,
            "groups": 12_800,
            "level": 0.1,
            "batch_size": 64,
            "group_size": 8,
            "width": 48,
            "learning_rate": 1e-3,
            "evaluate_every": 640,
            "replay_probability": 0.8,
            "staleness_weight": 0.0,
            "draws_again": False,
            "most_draws": 8,
        },
        fast=FAST,
        seeds=range(820, 828),
        pilot_seeds=(0, 1),
        measure=steps_to("groups_to_level", "generated groups until 10 % of the held-out hard sums are answered"),
        also=(
            mean_of("held_out", "share of held-out hard sums answered, over the run", digits=3),
            mean_of("informative", "share of groups with successes and failures", digits=3),
            final("share_reached", "share of runs that reached the level", digits=2),
        ),
        panels=(Panel("held_out", "held-out hard sums answered"), Panel("informative", "groups with a gradient")),
        run=run,
        xlabel="generated groups",
    ),
)
