# SPDX-License-Identifier: Apache-2.0
"""Hindsight in bit flipping with DQN: the first figure of Hindsight Experience Replay."""

from __future__ import annotations

from collections.abc import Sequence

from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, last_of, mean_of
from tests.benchmarks.learning.recorder import Recorder


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the share of greedy episodes that reach their goal."""
    from tests.benchmarks.learning.learners.bits import Bits, centred, replay_of, with_goal
    from tests.benchmarks.learning.learners.stacked_dqn import StackedDQN

    bits = settings["bits"]
    names = ("learning_rate", "discount", "target_update_rate")
    agent = StackedDQN(
        (2 * bits, *settings["hidden_sizes"], bits), seeds, inputs=centred, **{name: settings[name] for name in names}
    )
    replays = [replay_of(settings, seed) for seed in seeds]
    players, judges = Bits(agent, bits, seeds), Bits(agent, bits, [10_000] * len(seeds))
    for number in range(1, settings["rounds"] + 1):
        rows, _ = players.play(settings["episodes"], settings["exploration"])
        for replay, stored in zip(replays, rows, strict=True):
            replay.extend(stored)
        agent.learn([with_goal(replay.sample()) for replay in replays], settings["updates_per_round"], in_turn=True)
        if number % settings["evaluate_every"] == 0:
            out.record(number * settings["episodes"], reached=judges.play(settings["judged"], 0.0)[1])


RELABELLED: Settings = {"share": 0.8}

EXPERIMENTS = (
    Experiment(
        name="bits",
        title="Bit flipping with 20 bits, DQN: hindsight",
        claim="DQN alone solves no more than 13 bits; with hindsight it solves up to 50 (Andrychowicz et al. 2017, "
        "https://arxiv.org/abs/1707.01495, figure 1).",
        task="Stacked double DQN that equals the library's; a network of 256 units sees bits and goal as -1 and 1. "
        "Rounds of 16 episodes of at most 20 steps, a fifth of the actions random, and 40 updates with batches of 128 "
        "rows, drawn at once. Every 25 rounds the greedy policy plays 100 episodes. Settings are those of the pilot "
        "seeds with hindsight, and the same for all arms.",
        length="{rounds:,} rounds of {episodes} episodes",
        arms={
            "uniform": {"share": 0.0, "strategy": "future"},
            "hindsight: future": RELABELLED | {"strategy": "future"},
            "hindsight: final": RELABELLED | {"strategy": "final"},
        },
        settings={
            "bits": 20,
            "rounds": 600,
            "episodes": 16,
            "updates_per_round": 40,
            "batch_size": 128,
            "capacity": 200_000,
            "hidden_sizes": [256],
            "learning_rate": 1e-3,
            "discount": 0.98,
            "target_update_rate": 0.05,
            "exploration": 0.2,
            "evaluate_every": 25,
            "judged": 100,
        },
        fast={"rounds": 4, "evaluate_every": 2},
        seeds=range(700, 705),
        pilot_seeds=range(5),
        measure=last_of("reached", 3, "share of goals reached in the last three evaluations", digits=2),
        also=(mean_of("reached", "share of goals reached over the run", digits=2),),
        panels=(Panel("reached", "share of goals reached"),),
        run=run,
        seeds_together=5,
        xlabel="episodes",
    ),
)
