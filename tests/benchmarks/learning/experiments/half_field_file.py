# SPDX-License-Identifier: Apache-2.0
"""Half-field soccer from the command line: the configuration file that comes with the library, and EXP3 in it."""

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
        "the settings of easy to hard in half-field, in the library's agent, environment and data module; EXP3 is the "
        "same run with this scheduler. Every 30,000 steps 50 greedy episodes of the target are played. The file "
        "before, [half-field-signals](half-field-signals.md), had EXP3 and signals after 25 episodes of a task, so "
        "that tasks of short episodes sent more of them; these are after 200 episodes of all tasks.",
        length="{content[data][init_args][env_steps]:,} steps",
        arms={"the file": {}, "EXP3": {"scheduler": [f"{SCHEDULER}=Exp3", f"{SCHEDULER}.init_args.exploration=0.2"]}},
        settings={"content": yaml.safe_load((config_directory() / FILE).read_text()), "scheduler": [], "arguments": []},
        fast={"arguments": ["--data.init_args.env_steps=2700"]},
        seeds=range(395, 400),
        pilot_seeds=(0,),
        measure=last_of("success", 7, "success on the target in the last quarter", digits=2),
        also=(
            last_of("success", 1, "at the end", digits=2),
            mean_of("success", "over the run", skip=0, digits=2),
        ),
        comparisons=(("the file", "EXP3"),),
        panels=(Panel("success", "greedy success on the target"),),
        run=run,
    ),
)
