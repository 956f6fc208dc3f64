# SPDX-License-Identifier: Apache-2.0
"""Transitions that the tests store: numbered, so that a row is recognised wherever it turns up."""

from __future__ import annotations

import torch
from tensordict import TensorDict


def numbered_steps(first: int, count: int, *, done_every: int = 0, trajectory: int | None = None) -> TensorDict:
    """Transitions ``[count]``; row i has observation and reward ``first + i``, next observation one more."""
    number = torch.arange(first, first + count, dtype=torch.float32).unsqueeze(1)
    done = torch.zeros(count, 1, dtype=torch.bool)
    if done_every:
        done = (number + 1) % done_every == 0
    # Not from torch's default generator: a process forked while another thread holds its mutex would wait for ever.
    actions = torch.Generator().manual_seed(first)
    steps = TensorDict(
        {
            "observation": number.expand(-1, 3).clone(),
            "action": torch.rand(count, 2, generator=actions) * 2 - 1,
            "next": {
                "observation": number.expand(-1, 3) + 1,
                "reward": number.clone(),
                "terminated": done.clone(),
                "truncated": torch.zeros(count, 1, dtype=torch.bool),
                "done": done,
            },
        },
        [count],
    )
    if trajectory is not None:
        steps["trajectory"] = torch.full((count,), trajectory)
    return steps


def task_steps(tasks: list[int], first: int = 0) -> TensorDict:
    """Numbered steps of these tasks."""
    return numbered_steps(first, len(tasks)).set("task", torch.tensor(tasks))


def connected(steps: TensorDict) -> TensorDict:
    """The steps with next observations that are the observations of the next steps of their trajectories."""
    trajectory = steps.get("trajectory", steps.get(("collector", "traj_ids"), torch.zeros(len(steps))))
    newest: dict[int, int] = {}
    for place, name in enumerate(trajectory.flatten().tolist()):
        if name in newest:
            steps["next", "observation"][newest[name]] = steps["observation"][place]
        newest[name] = place
    return steps
