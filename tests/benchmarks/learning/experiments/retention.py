# SPDX-License-Identifier: Apache-2.0
"""Retention by surprise and on-policyness with room for 500 of 32,000 transitions: MinAtar's Breakout, double DQN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay import Replay, recipes
from lightning_replay.envs.atari import MinAtarGame
from lightning_replay.writers import OldestLeaves, OnPolicynessOnly, RetentionWriter, SurpriseOnly, SurpriseOnPolicyness
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, final, last_of, mean_of
from tests.benchmarks.learning.learners.minatar_players import StackedPlayers
from tests.benchmarks.learning.learners.stacked_dqn import StackedDQN
from tests.benchmarks.learning.recorder import Recorder

RULES = {rule.__name__: rule for rule in (SurpriseOnPolicyness, SurpriseOnly, OnPolicynessOnly)}
FRAMES = {"frame_stack": 1, "image_key": "observation"}  # each observation is stored once


def replay_of(settings: Settings, seed: int, storage: Mapping[str, Any] = FRAMES) -> Replay:
    """Returns a replay with prioritized draws; the oldest row, or that of the lowest priority by a rule, is evicted."""
    names = ("priority_exponent", "importance_exponent", "n_steps", "discount")
    options = {name: settings[name] for name in names} | {**storage, "seed": seed}
    capacity, batch_size, rule = settings["capacity"], settings["batch_size"], settings["rule"]
    if rule is None:
        return recipes.prioritized(capacity, batch_size, **options)
    return recipes.surprise_retention(capacity, batch_size, rule=RULES[rule](), **options)


def newest_rows(steps: TensorDictBase, settings: Settings) -> TensorDictBase:
    """Returns the newest ``compared_rows`` of these steps as stored, with their returns over ``n_steps``."""
    options: dict[str, Any] = {"n_steps": settings["n_steps"], "discount": settings["discount"]}
    count = settings["compared_rows"]
    ring = recipes.surprise_retention(count, 1, rule=OldestLeaves(), priority_exponent=0.0, **options)
    ring.extend(steps)
    return ring.storage.get(torch.arange(count))


class Retention:
    """Surprise of new rows, feedback, and figures of the kept rows, of the runs of one arm by a rule."""

    def __init__(self, settings: Settings, agent: StackedDQN) -> None:
        self._settings, self._agent = settings, agent
        self._weighs = settings["rule"] != "SurpriseOnly"

    def prepare(self, run: int, replay: Replay) -> None:
        """Sets the function for the surprise of new rows."""
        if isinstance(replay.writer, RetentionWriter):
            replay.writer.initial_surprise = partial(self.surprise, run)

    def surprise(self, run: int, rows: TensorDictBase) -> Tensor:
        """Returns squared TD errors ``[M]`` of new rows."""
        return self._agent.surprise(run, rows)

    def feed(self, run: int, replay: Replay, batch: TensorDictBase, td_error: Tensor, values: Tensor) -> None:
        """Updates priorities by the TD errors of a batch, and by its action values where a rule reads them."""
        if isinstance(replay.writer, RetentionWriter) and self._weighs:
            signals = {"action_values": values, "action": batch["action"]}
            replay.update_priority(batch["index"], td_error, generation=batch["generation"], **signals)
        else:
            replay.update_priority(batch, td_error)

    def save(self, folder: Path) -> None:
        """Writes the state beside the replays, of which this rule has none."""

    def load(self, folder: Path) -> None:
        """Reads what :meth:`save` wrote."""

    def contents(self, players: StackedPlayers) -> dict[str, list[float]]:
        """Returns figures of the kept rows, some relative to the newest rows, each ``[R]``."""
        found = [self._contents(run, replay, players) for run, replay in enumerate(players.replays)]
        return {name: [numbers[name] for numbers in found] for name in found[0]}

    def _contents(self, run: int, replay: Replay, players: StackedPlayers) -> dict[str, float]:
        slots = torch.arange(len(replay))
        newest = newest_rows(players.rows[run].steps, self._settings)
        kept = newest
        if isinstance(replay.writer, RetentionWriter) or self._settings["n_steps"] == 1:  # rows as they are learned
            # At random: episodes of Breakout end at steps of one parity, which a stride would meet always or never.
            chosen = np.random.default_rng(players.env_steps).permutation(len(slots))[: len(newest)]
            kept = replay.storage.get(torch.from_numpy(np.sort(chosen)))
        ours, theirs = (float(self._agent.td_error(run, rows).abs().mean()) for rows in (kept, newest))
        return {
            "age": float(replay.writer.age_of(slots).float().mean()),
            "refused": replay.stats().get("refused", 0) / players.env_steps,
            "terminal_share": float(kept["next", "terminated"].float().mean()),
            "error_over_newest": ours / max(theirs, 1e-6),
        }


def players_of(
    settings: Settings, seeds: Sequence[int], kind: type[Retention] = Retention
) -> tuple[StackedPlayers, Retention]:
    """Returns the runs of one arm before their first step, and their retention."""
    game = partial(
        MinAtarGame,
        "breakout",
        sticky_action_probability=settings["sticky_action_probability"],
        max_steps=settings["max_steps"],
    )
    shape = game().observation_space.shape
    sizes = (int(np.prod(shape)), *settings["hidden_sizes"], int(game().action_space.n))
    names = ("learning_rate", "discount", "updates_per_target")
    agent = StackedDQN(sizes, seeds, **{name: settings[name] for name in names})
    retention = kind(settings, agent)
    replays = [replay_of(settings, seed) for seed in seeds]
    for number, replay in enumerate(replays):
        retention.prepare(number, replay)
    return StackedPlayers(agent, game, replays, seeds, settings, retention.feed), retention


def run(settings: Settings, seeds: Sequence[int], out: Recorder, kind: type[Retention] = Retention) -> None:
    """Records returns during the run and figures of the kept rows."""
    players, retention = players_of(settings, seeds, kind)
    if out.resume_from is not None:
        players.load(out.resume_from, retention.prepare)
        retention.load(out.resume_from)

    def save(folder: Path) -> None:
        players.save(folder)
        retention.save(folder)

    while players.env_steps < settings["env_steps"]:
        players.play(players.env_steps + settings["check_every"])
        out.record(players.env_steps, episode_return=players.episode_returns(), **retention.contents(players))
        out.checkpoint(save)
    out.final(nbytes=[replay.nbytes for replay in players.replays])


PAPER = (
    "a small buffer that keeps by surprise and on-policyness learns better than one of the same size that drops the "
    'oldest, in 39 of 52 games ("Memory-efficient reinforcement learning with priority based on surprise and '
    'on-policyness", 2022, https://openreview.net/forum?id=SPRHpBKzJE: Rainbow, Atari, 10,000 transitions of 1M '
    "steps). The mechanism, not the headline."
)
SETTINGS: Settings = {
    "env_steps": 32_000,
    "sticky_action_probability": 0.0,
    "max_steps": 1_000,
    "hidden_sizes": (64, 64),
    "capacity": 500,
    "rule": None,
    "n_steps": 1,
    "discount": 0.99,
    "batch_size": 32,
    "warmup_steps": 1_000,
    "steps_per_update": 2,
    "updates_per_target": 500,
    "learning_rate": 1e-3,
    "priority_exponent": 0.5,
    "importance_exponent": 0.4,
    "last_exploration": 0.05,
    "exploration_steps": 15_000,
    "check_every": 1_000,
    "compared_rows": 500,
}
FAST: Settings = {"env_steps": 2_000, "warmup_steps": 900}
ALSO = (
    last_of("episode_return", 8, "return in the last quarter", digits=2),
    last_of("age", 8, "mean age of kept rows, steps", digits=0),
    last_of("terminal_share", 8, "share of kept rows that end an episode", digits=3),
    last_of("error_over_newest", 8, "TD error of kept rows over that of the newest 500", digits=2),
    last_of("refused", 1, "share of rows refused", digits=3),
    final("nbytes", "bytes, frames stored once", higher_is_better=False, digits=0),
)
RETURN = mean_of("episode_return", "return over the run, means of the last 50 episodes", skip=0, digits=2)

EXPERIMENTS = (
    Experiment(
        name="retention-breakout",
        title="MinAtar's Breakout without sticky actions: retention with room for 500 of 32,000 transitions",
        claim=PAPER,
        task="Double DQN, networks of 64 and 64 units, one-step returns, prioritized draws; who leaves the full buffer "
        "is all that differs. All buffers store equal frames once. FIFO, same bytes holds "
        "the 700 transitions that took the bytes of 500 retained ones on pilot seeds (279,000, as retained frames "
        "repeat less). FIFO, 1,250 keeps rows of about the age of retained ones, 2.5 times that of FIFO. Pilots chose "
        "these two capacities and nothing else.",
        length="{env_steps:,} steps",
        arms={
            "FIFO": {},
            "retention": {"rule": "SurpriseOnPolicyness"},
            "surprise alone": {"rule": "SurpriseOnly"},
            "on-policyness alone": {"rule": "OnPolicynessOnly"},
            "FIFO, same bytes": {"capacity": 700},
            "FIFO, 1,250": {"capacity": 1_250},
            "FIFO, 32,000": {"capacity": 32_000},
        },
        settings=SETTINGS,
        fast=FAST,
        seeds=range(2_400, 2_420),
        pilot_seeds=(0, 1, 2),
        measure=RETURN,
        also=ALSO,
        comparisons=(
            ("retention", "FIFO"),
            ("surprise alone", "FIFO"),
            ("on-policyness alone", "FIFO"),
            ("FIFO, same bytes", "FIFO"),
            ("retention", "FIFO, same bytes"),
            ("retention", "FIFO, 1,250"),
            ("FIFO, 32,000", "FIFO"),
        ),
        headline=(
            *(("retention", other) for other in ("FIFO", "FIFO, same bytes", "FIFO, 1,250")),
            ("FIFO, 32,000", "FIFO"),
        ),
        panels=(
            Panel("episode_return", "mean return of the last 50 episodes"),
            Panel("age", "mean age of kept rows", ("FIFO", "retention", "surprise alone", "on-policyness alone")),
        ),
        run=run,
        seeds_together=10,
        notes="For FIFO, 1,250 and FIFO, 32,000 the share of kept rows that end an episode was read at every second or "
        "64th row. Episodes of Breakout end at steps of one parity, so it is 0 here although it is about that of FIFO; "
        "later runs read rows at random. The other arms were read whole.",
    ),
    Experiment(
        name="retention-sticky",
        title="MinAtar's Breakout with sticky actions and returns of five steps: where retention fails",
        claim=PAPER,
        task="As in the experiment `retention-breakout`, but a tenth of the actions stick and returns are of five "
        "steps without correction, so that a part of the TD error is chance that no training removes.",
        length="{env_steps:,} steps",
        arms={"FIFO": {}, "retention": {"rule": "SurpriseOnPolicyness"}, "surprise alone": {"rule": "SurpriseOnly"}},
        settings=SETTINGS | {"sticky_action_probability": 0.1, "n_steps": 5},
        fast=FAST,
        seeds=range(2_500, 2_520),
        pilot_seeds=(0, 1, 2),
        measure=RETURN,
        also=ALSO,
        panels=(
            Panel("episode_return", "mean return of the last 50 episodes"),
            Panel("terminal_share", "share of kept rows that end an episode"),
        ),
        run=run,
        seeds_together=10,
    ),
)
