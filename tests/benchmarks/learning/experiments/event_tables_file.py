# SPDX-License-Identifier: Apache-2.0
"""Event tables in three rooms from the command line: the configuration file that comes with the library."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import yaml

from lightning_replay.options import config_directory
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, final, mean_of, steps_to
from tests.benchmarks.learning.learners.shipped_files import evaluations, seeded
from tests.benchmarks.learning.recorder import Recorder

FILE = "lightning/sset_ddqn_three_rooms.yaml"


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the greedy episode at each evaluation, and the steps to the first that reached the goal."""
    (seed,) = seeds
    replay_seed = f"--data.init_args.replay.init_args.seed={seed}"
    found = evaluations(FILE, [*seeded(seed), *settings["arguments"], *settings["steps"], replay_seed])
    for step, greedy_return in found:
        out.record(step, greedy_return=[greedy_return])
    reached = [step for step, greedy_return in found if greedy_return == 1.0]
    out.final(steps_to_goal=np.array([min(reached, default=found[-1][0])]), reached=np.array([bool(reached)]))


CONTENT: Settings = yaml.safe_load((config_directory() / FILE).read_text())
REPLAY = CONTENT["data"]["init_args"]["replay"]["init_args"]
UNIFORM = ["--data.init_args.replay=uniform"] + [
    f"--data.init_args.replay.init_args.{name}={REPLAY[name]}" for name in ("capacity", "batch_size")
]

EXPERIMENTS = (
    Experiment(
        name="event-tables-file",
        title="Three rooms from the command line: the shipped file",
        claim="see event-tables; this one tests that what users run learns.",
        task="`lightning-replay fit -c configs/lightning/sset_ddqn_three_rooms.yaml` with a seed for everything: 5,000 "
        "random steps, then 15,000 with an update of 8 rows each. Every 1,000 steps a greedy episode is played, which "
        "ends after 100 steps; a run in which none reached the goal counts with 20,000 steps, a lower bound. Uniform "
        "draws are the same file with `--data.init_args.replay=uniform`.",
        length="{content[data][init_args][env_steps]:,} steps",
        arms={"uniform": {"arguments": UNIFORM}, "event tables": {"arguments": []}},
        settings={"content": CONTENT, "steps": []},
        fast={"steps": ["--data.init_args.env_steps=330", "--data.init_args.warmup_steps=300"]},
        seeds=range(380, 385),
        pilot_seeds=(0,),
        measure=steps_to("steps_to_goal", "steps to the first greedy episode that reached the goal"),
        also=(
            final("reached", "share that reached it", digits=2),
            mean_of("greedy_return", "greedy return over the run", skip=0, digits=2),
        ),
        panels=(Panel("greedy_return", "greedy return"),),
        run=run,
    ),
)
