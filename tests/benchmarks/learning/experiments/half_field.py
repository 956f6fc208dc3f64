# SPDX-License-Identifier: Apache-2.0
"""Distributed Parallel Curriculum Experience Replay on half-field soccer: curricula against none."""

from __future__ import annotations

from tests.benchmarks.learning.experiment import Experiment, Panel, last_of, mean_of
from tests.benchmarks.learning.learners.curriculum_learning import TASKS, learn

UPDATES, TESTS = 120_000, 24
LAST_QUARTER = TESTS // 4
NONE, UNIFORM, EXP3, EASY_TO_HARD, REVERSE = (
    "no curriculum",
    "uniform schedule",
    "EXP3",
    "easy to hard",
    "reverse curriculum",
)
# Which of the two makes the difference between EXP3 and easy to hard: the batches, or what the actors play.
EASY_ACTORS, EASY_BATCHES = "EXP3, actors of easy to hard", "easy to hard, actors of EXP3"


EXPERIMENTS = (
    Experiment(
        name="half-field",
        title="Half-field soccer, one player and no keeper: curricula",
        claim="with batches from several tasks the target is learned, without a curriculum it is not (Distributed "
        "Parallel Curriculum Experience Replay, Li & Ji 2021, https://openreview.net/forum?id=EiW3FLYBiP: 99.5 % goals "
        "in Half Field Offense after a million updates); the adaptive schedule, EXP3, is better than the others.",
        task="MP-DQN with a reward of 5 for a goal and none else; twelve fields in lock-step, two updates for each of "
        "their steps. Greedy success from 100 starts of each task, the target being the farthest, 24 times. EXP3, easy "
        "to hard and the reverse curriculum get a progress signal of each task, the mean success of its last 100 "
        "episodes with exploration, every 500 updates; the last two go on to the next task at 0.6, or after an eighth "
        "of the updates. The pilot seeds, two or three for each setting, chose by the success on `far` and `near` "
        "after 10,000 and 15,000 updates. Networks of 64 and 64 units, uniform schedule: actions held for four cycles "
        "(one or two: fewer goals), returns over three steps (five: fewer), learning rates of 1e-3 and 1e-4 (5e-4 for "
        "the values, or 1e-3 for the parameters: fewer; 2e-3 for the values, or 24 fields: no difference); 128 and 64 "
        "units bring more goals with as many updates. Of signals of EXP3 every 100, 500, 2,000 and 8,000 updates, "
        "those every 500 brought most goals. Two arms, added when the others had been run, take the batches of one "
        "schedule and the actors of the other.",
        length="{updates:,} updates",
        arms={
            NONE: {"scheduler": "one task"},
            UNIFORM: {"scheduler": "uniform"},
            EXP3: {"scheduler": "exp3"},
            EASY_TO_HARD: {"scheduler": "easy to hard"},
            REVERSE: {"scheduler": "reverse curriculum"},
            EASY_ACTORS: {"scheduler": "exp3", "actors": "easy to hard"},
            EASY_BATCHES: {"scheduler": "easy to hard", "actors": "exp3"},
        },
        settings={
            "updates": UPDATES,
            "updates_per_round": 2,
            "updates_per_draw": 4,
            "fields": 12,
            "frame_skip": 4,
            "batch_size": 64,
            "capacity_per_task": 60_000,
            "n_steps": 3,
            "discount": 0.97,
            "time_outs_terminate": True,
            "warmup_rounds": 200,
            "rounds_per_extend": 10,
            "scheduler_exploration": 0.2,
            "advance_at": 0.6,
            "max_signals": UPDATES // 8 // 500,
            "updates_per_signal": 500,
            "updates_per_test": UPDATES // TESTS,
            "test_episodes": 100,
            "hidden_sizes": (128, 64),
            "value_learning_rate": 1e-3,
            "parameter_learning_rate": 1e-4,
            "learning_rate_end": 0.05,
            "target_update_rate": 0.005,
            "gradient_clip": 1.0,
            "exploration_end": 0.1,
            "exploration_rounds": 3_000,
            "parameter_noise": 0.1,
        },
        fast={
            "updates": 40,
            "warmup_rounds": 100,
            "updates_per_test": 20,
            "updates_per_signal": 20,
            "test_episodes": 1,
            "exploration_rounds": 40,
        },
        seeds=range(300, 308),
        pilot_seeds=(100, 101, 102),
        measure=last_of("target", LAST_QUARTER, "success on the target in the last quarter", digits=2),
        also=(
            mean_of("target", "over the run", skip=0, digits=2),
            last_of("target", 1, "at the end", digits=2),
            *(last_of(task, LAST_QUARTER, f"{task} in the last quarter", digits=2) for task in TASKS[1:]),
        ),
        comparisons=(
            *((arm, NONE) for arm in (UNIFORM, EXP3, EASY_TO_HARD, REVERSE)),
            *((arm, UNIFORM) for arm in (EXP3, EASY_TO_HARD, REVERSE)),
            *((arm, EXP3) for arm in (EASY_TO_HARD, EASY_ACTORS, EASY_BATCHES)),
            *((EASY_TO_HARD, arm) for arm in (EASY_ACTORS, EASY_BATCHES)),
        ),
        headline=((EXP3, NONE), (EASY_TO_HARD, NONE), (EXP3, UNIFORM), (EASY_TO_HARD, EXP3)),
        panels=[
            *(Panel(task, "greedy success", title=f"task {task}") for task in TASKS),
            Panel("chance of target", "chance of the target", title="next batch or actor"),
        ],
        xlabel="updates",
        seeds_together=8,
        run=learn,
    ),
)
