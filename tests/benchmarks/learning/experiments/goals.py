# SPDX-License-Identifier: Apache-2.0
"""Hindsight with SAC in PointMaze_UMaze with a reward at the goal alone."""

from __future__ import annotations

from collections.abc import Sequence

from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, last_of, mean_of
from tests.benchmarks.learning.recorder import Recorder

ENV = "PointMaze_UMaze-v3"
FIRST_EVALUATION_SEED = 10_000


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the mean return of greedy episodes: of 300 steps, those at the goal."""
    import gymnasium
    import gymnasium_robotics
    from gymnasium.wrappers import FlattenObservation

    from lightning_replay import recipes
    from tests.benchmarks.learning.learners.stacked_runs import StackedRuns, quiet_mujoco
    from tests.benchmarks.learning.learners.stacked_sac import StackedSAC

    quiet_mujoco()
    gymnasium.register_envs(gymnasium_robotics)
    wrapped = FlattenObservation(gymnasium.make(ENV)).spec  # goals are the first four of eight numbers
    names = ("hidden_sizes", "learning_rate", "discount", "target_update_rate")
    agent = StackedSAC(8, 2, seeds, **{name: settings[name] for name in names})
    size = {"capacity": settings["capacity"], "batch_size": settings["batch_size"]}
    replays = [
        recipes.hindsight(**size, env=ENV, strategy=settings["strategy"], share=settings["share"], seed=seed)
        for seed in seeds
    ]
    runs = StackedRuns(agent, wrapped, replays, seeds, settings["warmup_steps"], 1, 1)
    if out.resume_from is not None:
        runs.load(out.resume_from)
    every = settings["evaluate_every"]
    for env_steps in range(runs.env_steps + every, settings["env_steps"] + 1, every):
        runs.play(env_steps)
        out.record(env_steps, **{"return": runs.evaluate(settings["episodes"], FIRST_EVALUATION_SEED)})
        out.checkpoint(runs.save)


EXPERIMENTS = (
    Experiment(
        name="goals",
        title="PointMaze_UMaze-v3 with sparse rewards, SAC: hindsight",
        claim="with sparse rewards, agents without hindsight hardly learn, and with it they do (Andrychowicz et al. "
        "2017, https://arxiv.org/abs/1707.01495, figure 2: pushing, sliding, pick-and-place with DDPG).",
        task="Stacked SAC that equals the library's, 64 and 64 units, batches of 128 rows, learning rate 1e-3; 1,000 "
        "random steps, then an update for each step. Starts and goals are drawn anew for each episode of 300 steps; "
        "the reward is 1 for each step at the goal, 0 elsewhere. Both arms are recipes.hindsight, one with share 0. "
        "Every 3,000 steps ten greedy episodes are played from the same first states and goals.",
        length="{env_steps:,} steps",
        arms={"uniform": {"share": 0.0}, "hindsight": {"share": 0.8}},
        settings={
            "env_steps": 30_000,
            "warmup_steps": 1_000,
            "evaluate_every": 3_000,
            "episodes": 10,
            "hidden_sizes": [64, 64],
            "learning_rate": 1e-3,
            "discount": 0.99,
            "target_update_rate": 0.005,
            "batch_size": 128,
            "capacity": 30_000,
            "strategy": "future",
        },
        fast={"env_steps": 700, "warmup_steps": 600, "evaluate_every": 350, "episodes": 1},
        seeds=range(710, 715),
        pilot_seeds=range(5),
        measure=mean_of("return", "mean number of steps at the goal over the run", digits=0),
        also=(last_of("return", 3, "mean number of steps at the goal in the last three evaluations", digits=0),),
        panels=(Panel("return", "steps at the goal, of 300"),),
        run=run,
        seeds_together=5,
    ),
)
