# SPDX-License-Identifier: Apache-2.0
"""Event tables in three rooms with a network: steps from the first goal to a near-optimal policy.

Arms: event tables, prioritized draws, badly chosen events and shaped rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_replay.envs.grids import ThreeRooms
from tests.benchmarks.learning.experiment import Experiment, Measure, Panel, Settings, last_of, mean_of, steps_to
from tests.benchmarks.learning.learners.room_walks import StackedWalks, agent_of
from tests.benchmarks.learning.learners.stacked_dqn import StackedDQN
from tests.benchmarks.learning.learners.three_rooms import ONE_HOT, Checks, Table, filled_replay
from tests.benchmarks.learning.recorder import Recorder


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the greedy episode at every check, and the steps from the first goal to the first near-optimal one."""
    table = Table.of(ThreeRooms())
    replays, walked = zip(*(filled_replay(table, settings, seed) for seed in seeds), strict=True)
    agent = agent_of(settings, seeds)
    learn(StackedWalks(agent, table, replays, seeds, settings), agent, table, settings, out)
    out.final(walked=np.array(walked))


def learn(walks: StackedWalks, agent: StackedDQN, table: Table, settings: Settings, out: Recorder) -> None:
    """Plays and learns to the end of the runs; records the greedy episode at every check."""
    checks = Checks(table, out)
    everywhere = ONE_HOT.repeat(len(out.seeds), 1, 1)
    per_draw, every = settings["steps_per_draw"], settings["check_every"]
    for step in range(per_draw, settings["env_steps"] + 1, per_draw):
        walks.advance()
        if step % every == 0:
            checks.add(step, agent.act(everywhere).numpy())
    out.final(**checks.final(settings["env_steps"]))


def greedy_panel(arms: Sequence[str], title: str = "") -> Panel:
    """Returns a panel of greedy returns of some arms, all if empty, means of four checks."""
    return Panel("greedy_return", "greedy return", arms, title, block=4)


SETTINGS = {
    "env_steps": 12_000,
    "episode_steps": 1_000,
    "check_every": 120,
    "inputs": "one-hot",
    "hidden_sizes": [64, 64],
    "learning_rate": 5e-4,
    "discount": 0.97,
    "target_update_rate": 0.1,
    "exploration": 0.3,
    "steps_per_draw": 8,
    "updates_per_draw": 8,
    "batch_size": 64,
    "capacity": 30_000,
    "table_capacity": 10_000,
    "table_min_size": 64,
}
FAST = {"env_steps": 360}
UNIFORM: Settings = {"replay": "uniform"}
EVENTS = {
    "replay": "event tables",
    "events": ["gap", "goal"],
    "history_length": 200,
    "correction": "none",
    "priority_exponent": 0.0,
    "importance_exponent": 0.0,
}
MEASURE = steps_to("steps_to_near_optimal", "steps from the first goal to near-optimal")
ALSO = (
    mean_of("greedy_return", "greedy return over the run", skip=0),
    Measure("share near-optimal at a check", lambda run: run.final["near_optimal"], digits=2),
    last_of("near_optimal", 10, "share of the last ten checks that are near-optimal", digits=2),
)
LENGTH = "{env_steps:,} steps after the first goal"
TASK = (
    "Reward 1 at a goal 23 steps away, x, y and direction as one-hot inputs of a double DQN with 64 and 64 units. A "
    "random walk until the first goal, the same for all arms of a seed, then 12,000 steps with 30 % random actions; "
    "every 8 steps 64 rows are drawn at once and dealt as 8 updates. Half of the rows come from event tables, if there "
    "are any; a table is drawn from once it holds 64 rows, and histories are 200 steps where nothing else is stated. A "
    "policy is near-optimal when the greedy episode from the start takes at most 26 steps, which is checked every 120 "
    "steps; a run that never got there counts with 12,000, a lower bound."
)
CLAIM = (
    "drawing from tables of the steps that led to events needs about half of the steps of uniform draws; a history of "
    "one step and badly chosen events do not help (Kompella et al. 2022, https://arxiv.org/abs/2211.00576). A "
    "mechanism experiment, not the headline."
)
ARMS: dict[str, Settings] = {
    "uniform": UNIFORM,
    "event table: goal": EVENTS | {"events": ["goal"]},
    "event tables: gap and goal": EVENTS,
    "history 60": EVENTS | {"history_length": 60},
    "history 30": EVENTS | {"history_length": 30},
    "history 8": EVENTS | {"history_length": 8},
    "history 1": EVENTS | {"history_length": 1},
    "history 1, drawn from its first row": EVENTS | {"history_length": 1, "table_min_size": 1},
    "badly chosen event: near the start": EVENTS | {"events": ["near start"]},
    "badly chosen event: gap": EVENTS | {"events": ["gap"]},
    "correction: mixture": EVENTS | {"correction": "mixture"},
    "event tables with priorities": EVENTS | {"priority_exponent": 0.6},
    "prioritized, β 0.4": {"replay": "prioritized", "importance_exponent": 0.4},
    "prioritized, β 0": {"replay": "prioritized", "importance_exponent": 0.0},
    "shaping: gap": {"replay": "shaping", "potential": "gap"},
    "shaping: distance to the goal": {"replay": "shaping", "potential": "distance"},
}
GAP_AND_GOAL = "event tables: gap and goal"
CONSECUTIVE = f"{GAP_AND_GOAL}, consecutive rows"
LIMITS: dict[str, Settings] = {
    "8 rows a step": {},
    "16 rows a step": {"batch_size": 128},
    "32 rows a step": {"batch_size": 256},
    "a quarter of an update a step": {"updates_per_draw": 2},
    "learning rate 1e-3, target rate 0.05": {"learning_rate": 1e-3, "target_update_rate": 0.05},
    "coordinates as inputs": {"inputs": "coordinates"},
}
HEADLINE = (
    *((arm, "uniform") for arm in ("event table: goal", GAP_AND_GOAL, "prioritized, β 0")),
    (GAP_AND_GOAL, "prioritized, β 0"),
)
OPTIONS = {
    "length": LENGTH,
    "fast": FAST,
    "pilot_seeds": range(4),
    "measure": MEASURE,
    "also": ALSO,
    "xlabel": "environment steps from the first goal",
    "run": run,
    "seeds_together": 16,
}

EXPERIMENTS = (
    Experiment(
        name="event-tables",
        title="Three rooms, double DQN: event tables",
        claim=CLAIM,
        task=TASK + " Settings are those of independent runs on the seeds 200 to 215; the pilot seeds here showed that "
        "this program learns as those did, and changed nothing.",
        arms=ARMS,
        settings=SETTINGS,
        seeds=range(300, 316),
        comparisons=(
            *((arm, "uniform") for arm in ARMS if arm != "uniform"),
            ("event table: goal", "prioritized, β 0"),
            (GAP_AND_GOAL, "prioritized, β 0"),
            ("event tables with priorities", GAP_AND_GOAL),
        ),
        headline=HEADLINE,
        panels=(
            greedy_panel(
                ("uniform", "event table: goal", GAP_AND_GOAL, "prioritized, β 0.4", "prioritized, β 0"),
                "event tables and priorities",
            ),
            greedy_panel(("uniform", GAP_AND_GOAL, "history 60", "history 30", "history 8", "history 1"), "histories"),
            greedy_panel(
                (
                    "uniform",
                    GAP_AND_GOAL,
                    "badly chosen event: near the start",
                    "correction: mixture",
                    "shaping: distance to the goal",
                ),
                "what does not help",
            ),
        ),
        **OPTIONS,
    ),
    Experiment(
        name="event-tables-limits",
        title="Three rooms, double DQN: where the gain of event tables ends",
        claim="none of the paper. Independent runs, seeds 200 to 215: the more rows are learned from in each step, the "
        "smaller the gain; with coordinates as inputs nobody learns.",
        task=TASK + " Each arm changes one setting, for uniform draws and for event tables of gap and goal.",
        arms={
            f"{draws}, {limit}": given | changed
            for limit, changed in LIMITS.items()
            for draws, given in (("uniform", UNIFORM), ("event tables", EVENTS))
        },
        settings=SETTINGS,
        seeds=range(320, 336),
        comparisons=tuple((f"event tables, {limit}", f"uniform, {limit}") for limit in LIMITS),
        panels=tuple(greedy_panel([f"{draws}, {limit}" for draws in ("uniform", "event tables")]) for limit in LIMITS),
        **OPTIONS,
    ),
    Experiment(
        name="event-tables-in-turn",
        title="Three rooms, double DQN: updates with rows of all tables",
        claim="none of the paper, whose every update has rows of all tables. A draw is ordered by table, and in "
        "event-tables an update gets consecutive rows, those of one or two tables. Here it gets every eighth row.",
        task=TASK + " An update gets every eighth row, except in the arm with consecutive rows. Arms and settings are "
        "those of event-tables; nothing was chosen.",
        arms={arm: ARMS[arm] for arm in ARMS if ARMS[arm]["replay"] in ("uniform", "event tables")}
        | {CONSECUTIVE: EVENTS | {"rows_in_turn": False}, "prioritized, β 0": ARMS["prioritized, β 0"]},
        settings=SETTINGS | {"rows_in_turn": True},
        seeds=range(360, 376),
        comparisons=(
            *((arm, "uniform") for arm in ARMS if ARMS[arm]["replay"] == "event tables"),
            ("prioritized, β 0", "uniform"),
            (CONSECUTIVE, "uniform"),
            (GAP_AND_GOAL, CONSECUTIVE),
            (GAP_AND_GOAL, "prioritized, β 0"),
            ("event tables with priorities", GAP_AND_GOAL),
        ),
        headline=HEADLINE,
        panels=(
            greedy_panel(("uniform", GAP_AND_GOAL, CONSECUTIVE, "event table: goal", "prioritized, β 0")),
            greedy_panel(("uniform", "badly chosen event: near the start", "badly chosen event: gap", "history 1")),
        ),
        **OPTIONS,
    ),
)
