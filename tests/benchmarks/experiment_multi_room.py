# SPDX-License-Identifier: Apache-2.0
"""Prioritized levels in MultiRoom: does PPO reach a return on held-out levels sooner than with levels drawn alike?

    python tests/benchmarks/experiment_multi_room.py --save                   # 12 runs, within an hour on one core
    python tests/benchmarks/experiment_multi_room.py --device cuda --save     # 30 million steps each
    python tests/benchmarks/experiment_multi_room.py --fast                   # one seed, few steps: does it run?

Prioritized Level Replay (Jiang et al. 2021, https://arxiv.org/abs/2010.03934) on the paper's MultiRoom-N4-Random, 1 to
4 rooms, 4,000 levels; 500 more are held out. MiniGrid makes the grids, copies of them step on the device. Ranks of the
L1 value loss, staleness weight 0.3; TSCL with a window of 10 and epsilon 0.5. Other than in the paper: a far smaller
budget on a CPU, four actions for MiniGrid's seven, and a network that sees the grid from where the agent stands.

Chosen on seed 100. With uniform levels: the network (one of convolutions had learned nothing in 400,000 steps, one that
also turned with the agent all there is in 500,000), and that a time limit is an end, as in the paper's code, not a
state whose value follows (after 700,000 steps 0.65 and 0.50). With prioritized levels: the temperature. At the paper's
0.1 seven of ten replays in a rollout take the same level, and learning fell behind uniform levels (0.56 after 700,000
steps); 0.5 was no better (0.52), 1 was (0.62), which after two million had passed uniform (0.84 and 0.79). Both 0.1
and 1 are run. Temperature 2 (before the change of the time limit), 16 environments and another learning rate were
tried on that seed too; the network and the time limit were decided after PLR's runs had been seen as well. The seeds
run since (200 to 202) do not confirm the pilot: on average neither is ahead of uniform levels.

Fixed before these seeds were run: the return to reach is 0.6 on the held-out levels, actions drawn from the policy,
looked at 20 times a run; a run that does not reach it counts with all its steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment_pictures import draw_panels
from experiment_runs import Plan, run_experiment
from experiment_tables import (
    Runs,
    expect_narrow_replay,
    markdown_table,
    run_all,
    standard_error,
    with_error,
)
from multi_room_ppo import PPO, Collector, Settings, score, test_returns
from vector_multi_room import MAX_ROOMS, Grids, VectorMultiRoom

from lightning_replay.levels import LevelBuffer, LevelSelector, UniformLevels, scores, tscl

FIRST_SEED = 200  # settings were chosen on seed 100, with uniform levels
LEVELS, HELD_OUT, CHECKS = 4_000, 500, 20
RETURN_TO_REACH = 0.6
STALENESS_WEIGHT = 0.3
# By device: environments, steps of each between two updates, environment steps of a run.
SIZES = {"cpu": (64, 128, 2_000_000), "cuda": (2_048, 64, 30_000_000)}
UNIFORM = "uniform"


def prioritized(score_temperature: float) -> Callable[[Settings, int], LevelSelector]:
    """Levels by the ranks of their scores."""
    return lambda settings, seed: LevelBuffer(
        LEVELS,
        score=scores.L1ValueLoss(discount=settings.discount, gae_lambda=settings.gae_lambda),
        score_temperature=score_temperature,
        staleness_weight=STALENESS_WEIGHT,
        seed=seed,
    )


METHODS: dict[str, Callable[[Settings, int], LevelSelector]] = {
    UNIFORM: lambda settings, seed: UniformLevels(LEVELS, seed=seed),
    "PLR, temperature 1": prioritized(1.0),
    "PLR, temperature 0.1": prioritized(0.1),
    "TSCL": lambda settings, seed: tscl(range(LEVELS), seed=seed),
}


@cache
def all_grids() -> tuple[Grids, Grids]:
    """Of the training levels, whose rows are their ids, and of those held out."""
    return Grids.generate(range(LEVELS)), Grids.generate(range(LEVELS, LEVELS + HELD_OUT))


def expected_rooms(levels: LevelSelector, rooms: np.ndarray) -> float:
    """Of a level drawn from the replay distribution; of any level, where no level has a score."""
    distribution = levels.probabilities()
    if not len(distribution):
        return float(rooms.mean())
    return float(distribution["probability"].double().numpy() @ rooms[distribution["level_id"].numpy()])


def train(method: str, seed: int, settings: Settings, env_steps: int, device_name: str) -> dict[str, Any]:
    """One run: what was seen at every check and at the end, and the seconds it took."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    expect_narrow_replay()
    started = time.perf_counter()
    device = torch.device(device_name)
    grids, held_out = (each.to(device) for each in all_grids())
    rooms = grids.rooms.cpu().numpy()
    learner, levels = PPO(settings, seed, device), METHODS[method](settings, seed)
    env = VectorMultiRoom(grids, settings.envs)
    collector = Collector(env, settings.envs, levels, seed, device)
    run: dict[str, Any] = {"env_steps": [], "test_return": [], "expected_rooms": []}
    taken = 0
    while taken < env_steps:
        rollout = collector.rollout(learner.network, settings.rollout_steps)
        score(levels, rollout)
        learner.learn(rollout)
        taken += settings.steps
        if taken * CHECKS >= env_steps * (len(run["env_steps"]) + 1):
            run["env_steps"].append(taken)
            run["test_return"].append(float(test_returns(learner.network, held_out, seed).mean()))
            run["expected_rooms"].append(expected_rooms(levels, rooms))
    run["episodes"] = len(collector.returns)
    run["seconds"] = time.perf_counter() - started
    last = test_returns(learner.network, held_out, seed + 1)
    run["final_return"] = float(last.mean())
    run["by_rooms"] = [float(last[held_out.rooms == count].mean()) for count in range(1, MAX_ROOMS + 1)]
    run["training_return"] = float(test_returns(learner.network, grids, seed + 2).mean())
    return run


def steps_to_reach(run: dict[str, Any]) -> tuple[int, bool]:
    """Environment steps at the first check of a sufficient return, and whether there was one."""
    for env_steps, seen in zip(run["env_steps"], run["test_return"], strict=True):
        if seen >= RETURN_TO_REACH:
            return env_steps, True
    return run["env_steps"][-1], False


def columns_of(runs: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """By seed, the measures of a method."""
    rooms = np.array([run["expected_rooms"] for run in runs])
    quarter = max(1, rooms.shape[1] // 4)
    return {
        "steps": np.array([steps_to_reach(run)[0] for run in runs], dtype=np.float64),
        "final": np.array([run["final_return"] for run in runs]),
        "area": np.array([np.mean(run["test_return"]) for run in runs]),
        "training": np.array([run["training_return"] for run in runs]),
        "rooms_first": rooms[:, :quarter].mean(1),
        "rooms_last": rooms[:, -quarter:].mean(1),
    }


def verdict(columns: dict[str, dict[str, np.ndarray]]) -> str:
    """Paired differences to uniform."""
    lines = []
    for method in list(columns)[1:]:
        sooner, final, area = (columns[method][key] - columns[UNIFORM][key] for key in ("steps", "final", "area"))
        lines.append(
            f"- {method}: {with_error(float(sooner.mean()), standard_error(sooner), 0)} steps to {RETURN_TO_REACH}, "
            f"final return {with_error(float(final.mean()), standard_error(final))}, "
            f"over the run {with_error(float(area.mean()), standard_error(area))}."
        )
    return "Less those of uniform, seed by seed:\n\n" + "\n".join(lines)


def page_of(runs: Runs, seeds: range, env_steps: int, device: str, minutes: float) -> str:
    """What was seen, as Markdown."""
    columns = {method: columns_of(of_method) for method, of_method in runs.items()}
    header = [
        "method",
        f"steps to a test return of {RETURN_TO_REACH}",
        "reached",
        "final test return",
        "with 1, 2, 3, 4 rooms",
        "test return over the run",
        "return on training levels",
        "rooms replayed, first quarter",
        "last quarter",
        "s per run",
    ]
    digits = {"steps": 0, "rooms_first": 2, "rooms_last": 2}
    rows = []
    for method, column in columns.items():
        cells = {
            key: with_error(float(seen.mean()), standard_error(seen), digits.get(key, 3))
            for key, seen in column.items()
        }
        reached = sum(steps_to_reach(run)[1] for run in runs[method])
        by_rooms = np.mean([run["by_rooms"] for run in runs[method]], axis=0)
        rows.append(
            [
                method,
                cells["steps"],
                f"{reached} of {len(seeds)}",
                cells["final"],
                " ".join(f"{value:.2f}" for value in by_rooms),
                *(cells[key] for key in ("area", "training", "rooms_first", "rooms_last")),
                f"{np.mean([run['seconds'] for run in runs[method]]):.0f}",
            ]
        )
    return "\n\n".join(
        [
            "# MultiRoom with 1 to 4 rooms, PPO",
            f"Seeds {seeds[0]} to {seeds[-1]}, {env_steps:,} environment steps each on {device}, {minutes:.0f} minutes "
            f"in two processes. ± is one standard error over seeds. {LEVELS:,} training levels; the test return is the "
            f"mean over {HELD_OUT} others, actions drawn from the policy. Rooms are those of a level drawn from the "
            "replay distribution; 2.5 is about that of all levels alike. Runs that never reached the return count with "
            "all their steps, a lower bound.",
            markdown_table(header, rows),
            verdict(columns),
        ]
    )


def draw_runs(content: dict[str, Any], path: Path) -> None:
    """Return on held-out levels and expected rooms of a replayed one over the environment steps."""
    panels = {
        measure: {method: np.array([run[key] for run in runs]) for method, runs in content["runs"].items()}
        for measure, key in (
            (f"return on {HELD_OUT} held-out levels", "test_return"),
            ("expected rooms of a replayed level", "expected_rooms"),
        )
    }
    at = content["runs"][UNIFORM][0]["env_steps"]
    draw_panels(panels, at, path, "MultiRoom with 1 to 4 rooms, PPO", "environment steps")


def more_options(parser: argparse.ArgumentParser) -> None:
    """Adds the device and the size of the runs."""
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--envs", type=int, help="environments side by side")
    parser.add_argument("--env-steps", type=int, help="of a run")


def plan(options: argparse.Namespace) -> Plan:
    """Returns what is run, with ``--fast`` for two rollouts."""
    envs, rollout_steps, env_steps = SIZES[options.device]
    settings = Settings(envs=options.envs or envs, rollout_steps=rollout_steps)
    env_steps = 2 * settings.steps if options.fast else options.env_steps or env_steps
    return Plan(
        {"env_steps": env_steps},
        lambda seeds, kept: run_all(train, METHODS, seeds, settings, env_steps, options.device, kept=kept),
        lambda runs, seeds, minutes: page_of(runs, seeds, env_steps, options.device, minutes),
        name="multi_room" if options.device == "cpu" else f"multi_room_{options.device}",
    )


if __name__ == "__main__":
    run_experiment(
        "multi_room",
        __doc__,
        plan,
        draw_runs,
        seeds=3,
        first_seed=FIRST_SEED,
        fast="one seed and two rollouts",
        fast_seeds=1,
        more_options=more_options,
    )
