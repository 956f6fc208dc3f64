# SPDX-License-Identifier: Apache-2.0
"""Groups of answers without a gradient: kept, drawn again, and refilled from a replay of groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, final, last_of, mean_of
from tests.benchmarks.learning.experiments.prompts import example
from tests.benchmarks.learning.experiments.prompts_rare import FAST, imitate, sums
from tests.benchmarks.learning.recorder import Recorder


def filling_of(settings: Settings, seed: int, example: Any) -> Callable[[Any], Any]:
    """Returns the part of the example that makes the batches of an arm."""
    if settings["filling"] == "refilled":
        return example.Refilled(settings["max_age"], settings["capacity"], seed)
    if settings["filling"] == "drawn again":
        return functools.partial(example.drawn_again, most_draws=settings["most_draws"])
    return example.Generator.__call__


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the held-out sums that are answered, by the number of generated groups.

    A point has the weights before the first update that needed more groups. So no arm has more groups than another.
    """
    import lightning as L

    from lightning_replay.levels import LevelSet, UniformLevels

    (seed,) = seeds
    lp = example()
    grpo = example("grpo_replay")
    asked, others = sums(settings["easy"], settings["hard"], settings["held_out"], seed)
    prompts = LevelSet(asked)
    judged = lp.encode(list(LevelSet(others)))

    L.seed_everything(seed, verbose=False)
    levels = UniformLevels(prompts, seed=seed)
    data = grpo.Prompts(prompts, levels, settings["batch_size"])
    model, before = (lp.Adder(levels, group_size=grpo.GROUP_SIZE, width=settings["width"]) for _ in range(2))
    imitate(model, lp.encode(list(prompts)), seed, settings)
    generate = grpo.Generator(model, iter(data.train_dataloader()))
    loop = grpo.learn(generate, filling_of(settings, seed, grpo), settings["learning_rate"], settings["updates"])

    shares: list[float] = []
    point = 0
    L.seed_everything(seed, verbose=False)
    while point <= settings["groups"]:
        before.load_state_dict(model.state_dict())
        num_updates = generate.version * settings["updates"]
        batch = next(loop)
        while point < generate.groups and point <= settings["groups"]:
            out.record(point, held_out=[before.success(judged)], learned=[sum(shares) / max(len(shares), 1)])
            out.final(num_updates=[num_updates])
            shares.clear()
            point += settings["evaluate_every"]
        shares.append(float(grpo.has_gradient(batch).float().mean()))


PLAIN: Settings = {"filling": "plain"}
EXPERIMENTS = (
    Experiment(
        name="prompts-refill",
        title="Sums of which few give a gradient, a small transformer: groups refilled from a replay",
        claim="if further groups are generated in place of those without a gradient, fewer updates are needed (dynamic "
        "sampling of DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476). The paper does not replay groups.",
        task="Sums, weights, and imitation are those of `prompts-rare`, and all prompts are uniform: 64 groups of 8 "
        "answers are generated at a time. `plain` learns from these. `drawn again` generates further groups until 64 "
        "have a gradient, at most 8 times. `refilled` puts replayed groups in the places of groups without a gradient. "
        "They are from the last 8 updates, each at most once in a batch, drawn in proportion to the mean magnitude of "
        "their advantages. Ratios to the policy that wrote an answer are clipped to [0.8, 1.2] in all arms. `plain, "
        "two updates` learns twice from each batch, which is another way to use a generated group more than once. All "
        "arms have the same number of generated groups. Pilot seeds chose the learning rate, which is the same for all "
        "arms.",
        length="{groups:,} generated groups",
        arms={
            "plain": PLAIN,
            "drawn again": {"filling": "drawn again"},
            "refilled": {"filling": "refilled"},
            "plain, two updates": {**PLAIN, "updates": 2},
        },
        settings={
            "easy": 1_400,
            "hard": 600,
            "shown": 10,
            "held_out": 500,
            "imitated": 0.995,
            "groups": 12_800,
            "batch_size": 64,
            "width": 48,
            "learning_rate": 2e-3,
            "updates": 1,
            "most_draws": 8,
            "max_age": 8,
            "capacity": 8_192,
            "evaluate_every": 640,
        },
        fast=FAST,
        seeds=range(830, 835),
        pilot_seeds=(2, 3),
        measure=mean_of("held_out", "share of held-out hard sums answered, over the run", digits=3),
        also=(
            last_of("held_out", 3, "share of held-out hard sums answered in the last three evaluations", digits=3),
            mean_of("learned", "share of a batch's groups with a gradient", digits=3),
            final("num_updates", "updates", digits=0),
        ),
        comparisons=(
            ("drawn again", "plain"),
            ("refilled", "plain"),
            ("refilled", "drawn again"),
            ("refilled", "plain, two updates"),
            ("plain, two updates", "plain"),
        ),
        headline=(
            ("drawn again", "plain"),
            ("refilled", "plain"),
            ("refilled", "drawn again"),
            ("refilled", "plain, two updates"),
        ),
        panels=(Panel("held_out", "held-out hard sums answered"), Panel("learned", "groups with a gradient")),
        run=run,
        xlabel="generated groups",
    ),
)
