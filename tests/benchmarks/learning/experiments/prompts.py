# SPDX-License-Identifier: Apache-2.0
"""Prompts for a small language model, learned by a group-relative policy gradient: uniform, and by learnability."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, last_of, mean_of
from tests.benchmarks.learning.recorder import Recorder

EXAMPLES = Path(__file__).parents[4] / "examples"


def example(name: str = "lightning_prompts") -> ModuleType:
    """Returns an example's module, which has model, prompts, and loop. Later examples can import it."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the share of the held-out prompts that are answered, and what the batches were."""
    import lightning as L
    import torch

    from lightning_replay.levels import LevelBuffer, LevelSet, UniformLevels, scores

    (seed,) = seeds
    lp = example()
    prompts, held_out = lp.questions(settings["prompts"], seed, settings["held_out"])

    def levels_of(prompts: LevelSet) -> UniformLevels | LevelBuffer:
        if settings["levels"] == "uniform":
            return UniformLevels(prompts, seed=seed)
        return LevelBuffer(
            prompts,
            score=scores.Learnability(settings["window"]),
            staleness_weight=settings["staleness_weight"],
            replay_probability=settings["replay_probability"],
            seed=seed,
        )

    class Judge(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, model: Any, outputs: Any, batch: Any, number: int) -> None:
            if (number + 1) % settings["evaluate_every"] == 0:
                measure(number + 1)

    def measure(updates: int) -> None:
        out.record(
            updates,
            held_out=[model.success(judged)],
            trained=[model.success(trained)],
            informative=[sum(model.informative) / max(len(model.informative), 1)],
        )
        model.informative.clear()

    class Adder(lp.Adder):  # also notes how many groups had both successes and failures, which alone have a gradient
        informative: list[float]

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            record = self.levels.record

            def noted(level_id: torch.Tensor, *, outcomes: torch.Tensor) -> None:
                self.informative.append(float((outcomes.std(1) > 0).float().mean()))
                record(level_id, outcomes=outcomes)

            self.levels.record = noted
            try:
                return super().training_step(batch, number)
            finally:
                del self.levels.record

    L.seed_everything(seed, verbose=False)
    model = Adder(levels_of(prompts), settings["learning_rate"], settings["group_size"], settings["width"])
    model.informative = []
    trained, judged = (lp.encode(list(one)) for one in (prompts, held_out))
    model.imitate(trained, judged, settings["imitated"])  # the same for all arms of a seed
    torch.manual_seed(seed)
    measure(0)
    lp.train(model, prompts, settings["updates"], settings["batch_size"], [Judge()])


LEARNABLE: Settings = {"levels": "learnability", "window": 16, "replay_probability": 0.8}

EXPERIMENTS = (
    Experiment(
        name="prompts",
        title="Sums of two numbers, a small transformer: prompts by learnability",
        claim="Levels of high p (1 - p) learn faster than uniform ones and than those of regret scores (Rutherford et "
        "al. 2024, https://arxiv.org/abs/2408.15099); of language models the paper has nothing.",
        task="A transformer of one layer and 48 units, from random weights, writes the three digits of a sum. It "
        "imitates right answers until a tenth of 500 other questions is answered, then learns by a group-relative "
        "policy gradient in Lightning, 64 questions with 8 answers each in a batch, from a LevelBatchSampler. Every 20 "
        "updates it answers the 1,000 questions and the 500 others, greedily. Learning rate, sizes and the share of "
        "replays were chosen on pilot seeds, and are the same for all arms.",
        length="{updates:,} updates",
        arms={
            "uniform": {"levels": "uniform"},
            "learnability": LEARNABLE | {"staleness_weight": 0.0},
            "learnability, staleness weight 0.3": LEARNABLE | {"staleness_weight": 0.3},
        },
        settings={
            "prompts": 1_000,
            "held_out": 500,
            "imitated": 0.1,
            "updates": 200,
            "batch_size": 64,
            "group_size": 8,
            "width": 48,
            "learning_rate": 1e-3,
            "evaluate_every": 20,
        },
        fast={"prompts": 100, "held_out": 20, "imitated": 0.0, "updates": 4, "evaluate_every": 2},
        seeds=range(800, 805),
        pilot_seeds=range(5),
        measure=mean_of("held_out", "share of held-out questions answered, over the run", digits=3),
        also=(
            last_of("held_out", 3, "share of held-out questions answered in the last three evaluations", digits=3),
            last_of("trained", 3, "share of the trained questions answered in the last three evaluations", digits=3),
            mean_of("informative", "share of groups with successes and failures", digits=3),
        ),
        panels=(Panel("held_out", "held-out questions answered"), Panel("informative", "groups with a gradient")),
        run=run,
        xlabel="updates",
    ),
)
