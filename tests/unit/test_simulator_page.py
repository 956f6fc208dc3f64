# SPDX-License-Identifier: Apache-2.0
"""The lines of docs/simulators.md for each simulator give right rows with stand-ins of the simulators."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_replay import recipes
from lightning_replay.collecting import VectorSteps
from tests import simulator_stubs

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "simulators.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = {part.splitlines()[0]: BLOCK.findall(part) for part in PAGE.split("\n## ")[1:]}
NAMES = {  # the vectors that each section builds, and whether they give last observations
    "Isaac Lab": [False, True],
    "ManiSkill": [True],
    "mjlab": [False, True],
    "MuJoCo Playground and Brax": [True, True],
    "FastTD3's environments": [True],
}


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_steps_that_were_played(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulator_stubs.install(monkeypatch)
    namespace: dict[str, Any] = {"torch": torch, "VectorSteps": VectorSteps}
    gives_last = []
    for block in SECTIONS[name]:
        namespace["envs"] = None
        exec(compile(block.replace("4_096", "8"), name, "exec"), namespace)
        if namespace["envs"] is not None:
            gives_last.append(is_exact(namespace["envs"]))
    assert gives_last == NAMES[name]


def is_exact(envs: VectorSteps) -> bool:
    """Plays and checks rows; returns whether ended rows have the observation that followed."""
    replay = recipes.uniform(capacity=10_000, batch_size=8, n_steps=3, seed=0)
    envs.reset()
    for _ in range(40):
        envs.step(torch.zeros(8, 2))
        envs.store(replay)
    rows = replay[:]
    before, after = rows["observation"], rows["next", "observation"]
    ended, truncated = rows["next", "done"].flatten(), rows["next", "truncated"].flatten()
    assert len(rows) == 320 and truncated.sum() > 50 and rows["next", "terminated"].sum() >= 5
    for name in {"critic_observation"} & set(rows.keys()):
        assert torch.equal(rows[name], before + 0.25)
        assert torch.equal(rows["next", name], after + 0.25)
    assert torch.equal(before[:, 2] + 1, rows["next", "reward"].flatten())
    assert torch.equal(after[~ended][:, 2], before[~ended][:, 2] + 1)
    assert torch.equal(after[:, 0], before[:, 0])
    playing = rows["trajectory"].unique().tolist()
    assert playing == list(range(len(playing))) and len(playing) == 8 + int(ended[:-8].sum())
    if torch.equal(after[ended], before[ended]):  # no last observation
        assert rows["next", "terminated"].flatten()[ended].all()
        return False
    assert torch.equal(after[ended][:, 2], before[ended][:, 2] + 1)
    assert not (truncated & rows["next", "terminated"].flatten()).any()
    return True
