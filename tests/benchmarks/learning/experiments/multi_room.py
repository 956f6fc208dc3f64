# SPDX-License-Identifier: Apache-2.0
"""Level replay on MultiRoom with 1 to 6 rooms: returns of PPO on levels that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lightning_replay.levels import LevelSelector
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, last_of, mean_of
from tests.benchmarks.learning.learners import level_choice
from tests.benchmarks.learning.recorder import Recorder


def levels_of(settings: Settings, seed: int) -> LevelSelector:
    """Returns uniform levels without a temperature, otherwise levels by the ranks of their scores."""
    options = {name: settings["ppo"][name] for name in ("discount", "gae_lambda")}
    options["replay_in_flight"] = settings["replay_in_flight"]
    return level_choice.levels_of(settings, settings["levels"], seed, **options)


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the return on held-out levels, rooms of a replayed level, and a level's largest share of a rollout."""
    from tests.benchmarks.learning.learners.multi_room_ppo import Collector, StackedPPO, held_out_returns
    from tests.benchmarks.learning.learners.vector_multi_room import training_and_held_out

    level_choice.ignore_repeat_warning()
    training, held_out = training_and_held_out(settings["levels"], settings["held_out"])
    training_rooms, held_out_rooms = training.rooms.numpy(), held_out.rooms.numpy()
    ppo = StackedPPO(seeds, **settings["ppo"])
    collector = Collector(training, [levels_of(settings, seed) for seed in seeds], seeds, settings["envs"])
    env_steps, shares = 0, []
    if out.resume_from is not None:
        collector.load(out.resume_from)
        kept = torch.load(out.resume_from / "run.pt")
        env_steps, shares = kept["env_steps"], kept["shares"]
        ppo.load_state_dict(kept["ppo"])

    def save(folder: Path) -> None:
        collector.save(folder)
        torch.save({"env_steps": env_steps, "shares": shares, "ppo": ppo.state_dict()}, folder / "run.pt")

    while env_steps < settings["env_steps"]:
        rollout = collector.rollout(ppo, settings["rollout_steps"])
        collector.score(rollout)
        ppo.learn(rollout)
        shares.append(collector.largest_shares())
        before, env_steps = env_steps, env_steps + settings["envs"] * settings["rollout_steps"]
        test = env_steps // settings["test_every"]
        if test > before // settings["test_every"]:
            returns = held_out_returns(ppo, held_out, [1_000 * seed + test for seed in seeds]).numpy()
            rooms = [level_choice.expected_difficulty(levels, training_rooms) for levels in collector.levels]
            out.record(env_steps, held_out=returns.mean(1), rooms=rooms, largest_share=np.mean(shares, axis=0))
            by_rooms = {count: returns[:, held_out_rooms == count].mean(1) for count in np.unique(held_out_rooms)}
            out.final(**{f"held_out_{count}_rooms": mean for count, mean in by_rooms.items()})
            shares.clear()
        out.checkpoint(save)


LOW, LOW_NOT_IN_FLIGHT = "level replay, temperature 0.1", "level replay, temperature 0.1, not in flight"

EXPERIMENTS = (
    Experiment(
        name="multi-room",
        title="MultiRoom with 1 to 6 rooms, PPO: level replay",
        claim="level replay learns faster than uniform levels; on MultiRoom-N4-Random the returns at the end are "
        "0.81 and 0.80 (Jiang et al. 2021, https://arxiv.org/abs/2010.03934).",
        task="4,000 training levels, and 500 held-out ones with first states that no training level has. The return is "
        "the mean over the held-out levels of one episode each, with actions drawn from the policy, every 50,000 "
        "steps. The agent sees the 9 x 9 cells around it, its direction and the sixteenths of the limit of 120 "
        "steps, on which the reward depends; the limit therefore terminates an episode. Levels are replayed by the "
        "ranks of their L1 value loss with a staleness weight of 0.3. `not in flight`: `replay_in_flight=False`, a "
        "replay by score leaves out levels that are being played. Of the pilot seeds, ten were run for 100,000 steps "
        "and two for 600,000 (uniform levels, temperature 1), to see that PPO learns; they changed no setting.",
        length="{env_steps:,} steps",
        arms={
            "uniform": {"score_temperature": None},
            "level replay, temperature 1": {"score_temperature": 1.0},
            LOW: {"score_temperature": 0.1},
            LOW_NOT_IN_FLIGHT: {"score_temperature": 0.1, "replay_in_flight": False},
        },
        settings={
            "levels": 4_000,
            "held_out": 500,
            "envs": 64,
            "rollout_steps": 128,
            "env_steps": 1_200_000,
            "test_every": 50_000,
            "staleness_weight": 0.3,
            "replay_in_flight": True,
            "ppo": {
                "hidden_size": 64,
                "epochs": 4,
                "minibatch": 1_024,
                "learning_rate": 7e-4,
                "discount": 0.999,
                "gae_lambda": 0.95,
                "clip": 0.2,
                "value_weight": 0.5,
                "entropy_weight": 0.01,
                "max_gradient_norm": 0.5,
            },
        },
        fast={"levels": 40, "held_out": 10, "envs": 4, "rollout_steps": 32, "env_steps": 512, "test_every": 128},
        seeds=range(300, 316),
        pilot_seeds=range(80, 90),
        measure=mean_of("held_out", "mean held-out return over the run", skip=0),
        also=(
            last_of("held_out", 3, "mean of the last three tests"),
            mean_of("largest_share", "largest share of a level in a rollout's episodes", skip=0),
        ),
        comparisons=(
            ("level replay, temperature 1", "uniform"),
            (LOW_NOT_IN_FLIGHT, "uniform"),
            (LOW, "uniform"),
            (LOW_NOT_IN_FLIGHT, LOW),
        ),
        panels=(
            Panel("held_out", "return on held-out levels"),
            Panel("rooms", "expected rooms of a replayed level"),
            Panel("largest_share", "share of one level in a rollout's episodes"),
        ),
        run=run,
        seeds_together=8,
        notes="An earlier experiment with 1 to 4 rooms, four actions, 80 steps a level and a critic that did not "
        "observe the time (three seeds) gave no verdict: [multi-room-4](multi-room-4.md).",
    ),
)
