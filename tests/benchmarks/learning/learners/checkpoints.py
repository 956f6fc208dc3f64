# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of an agent of several runs with the replay of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_replay import Replay, load_replay
from tests.benchmarks.learning.learners.stacked_networks import StackedAgent


def save_agent_and_replays(folder: Path, agent: StackedAgent, replays: Sequence[Replay]) -> None:
    """Writes ``agent.pt`` and the replays into a folder."""
    agent.save(folder / "agent.pt")
    for run, replay in enumerate(replays):
        replay.save(folder / f"replay_{run}")


def load_agent_and_replays(folder: Path, agent: StackedAgent, runs: int) -> list[Replay]:
    """Reads what :func:`save_agent_and_replays` wrote into the agent; returns the replays."""
    agent.load(folder / "agent.pt")
    return [load_replay(folder / f"replay_{run}", trust=["tests"], end_episodes=False) for run in range(runs)]
