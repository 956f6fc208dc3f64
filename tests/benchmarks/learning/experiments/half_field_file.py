# SPDX-License-Identifier: Apache-2.0
"""Half-field soccer from the command line: the configuration file that comes with the library; easy to hard in it."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from lightning_replay.envs.half_field import GOAL_REWARD
from lightning_replay.options import config_directory
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, last_of, mean_of
from tests.benchmarks.learning.learners.shipped_files import evaluations, seeded
from tests.benchmarks.learning.recorder import Recorder

FILE = "lightning/dpcer_mpdqn_half_field.yaml"
SCHEDULER = "--data.init_args.replay.init_args.scheduler"


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the share of goals at each evaluation."""
    (seed,) = seeds
    for step, greedy_return in evaluations(FILE, [*seeded(seed), *settings["scheduler"], *settings["arguments"]]):
        out.record(step, success=[greedy_return / GOAL_REWARD])


EXPERIMENTS = (
    Experiment(
        name="half-field-file",
        title="Half-field soccer from the command line: the shipped file",
        claim="see half-field; this one tests that what users run learns the target, and whether easy to hard is "
        "better than EXP3 with the library's agent as well.",
        task="`lightning-replay fit -c configs/lightning/dpcer_mpdqn_half_field.yaml` with a seed for everything: "
        "the settings of EXP3 in half-field, but for signals and shared draws, in the library's agent, environment and "
        "data module. Easy to hard is the same run with the scheduler of that arm; a stage ends after 30 signals, "
        "there 15,000 updates, here about 6,000 episodes. Every 30,000 steps 50 greedy episodes of the target are "
        "played. The file before, [half-field-signals](half-field-signals.md), sent a signal after 25 episodes of a "
        "task, so that tasks of short episodes sent more of them; this one after 200 episodes of all tasks.",
        length="{content[data][init_args][env_steps]:,} steps",
        arms={
            "the file": {},
            "easy to hard": {
                "scheduler": [
                    f"{SCHEDULER}=EasyToHard",
                    f"{SCHEDULER}.init_args.order=[goal_mouth,near,far,target]",
                    f"{SCHEDULER}.init_args.advance_at=0.6",
                    f"{SCHEDULER}.init_args.max_signals=30",
                ]
            },
        },
        settings={"content": yaml.safe_load((config_directory() / FILE).read_text()), "scheduler": [], "arguments": []},
        fast={"arguments": ["--data.init_args.env_steps=2700"]},
        seeds=range(400, 405),
        pilot_seeds=(0, 395, 396, 397, 398, 399),
        measure=last_of("success", 7, "success on the target in the last quarter", digits=2),
        also=(
            last_of("success", 1, "at the end", digits=2),
            mean_of("success", "over the run", skip=0, digits=2),
        ),
        comparisons=(("easy to hard", "the file"),),
        panels=(Panel("success", "greedy success on the target"),),
        run=run,
        notes="EXP3 was chosen for the file after both schedulers had run on [seeds 395 to 399](half-field-choice.md). "
        "The seeds of this page are fresh: fixed after that choice, in the same files.",
    ),
)
