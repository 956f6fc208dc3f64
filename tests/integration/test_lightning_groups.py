# SPDX-License-Identifier: Apache-2.0
"""Groups in a Lightning run: a file names the recipe, and a resume draws the groups of a run that did not stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_replay import recipes
from lightning_replay.lit import ReplayDataModule
from lightning_replay.lit.cli import main
from lightning_replay.options import config_directory
from tests.unit.lit.stopped_runs import RUN, Agent, CloseAt, fit
from tests.unit.lit.toys import Counting

pytestmark = pytest.mark.slow
OPTIONS: dict[str, Any] = {
    "group_size": 2,
    "fresh_share": 0.5,
    "replace": False,
    "priority_exponent": 0.6,
    "age": {"max_age": 20},
}


def data_of(env_steps: int) -> ReplayDataModule:
    """A group has the steps of two environments at the same time."""
    replay = recipes.groups(500, 8, seed=0, **OPTIONS)
    return ReplayDataModule(Counting, replay, **(RUN | {"env_steps": env_steps}))


def test_a_resumed_run_draws_the_groups_of_one_that_did_not_stop(tmp_path: Path) -> None:
    fit(tmp_path / "first", Agent(), data_of(44))
    path = tmp_path / "first" / "run" / "last.ckpt"
    update = torch.load(path)["ReplayDataModule"]["updates"]
    fit(tmp_path / "again", agent := Agent(), data_of(60), ckpt_path=path)
    fit(tmp_path / "whole", whole := Agent(), data_of(60), [CloseAt(update)])
    assert len(agent.seen) == 60 - 44 and agent.seen == whole.seen[update:]
    assert all(slots[1::2] == [slot + 1 for slot in slots[::2]] for slots in whole.seen)


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's use of jsonargparse
def test_a_file_names_the_recipe(tmp_path: Path) -> None:
    config = yaml.safe_load((config_directory() / "lightning/per_dqn_cartpole.yaml").read_text())
    of_recipe = {"capacity": 400, "batch_size": 16} | OPTIONS
    replay = {"class_path": "lightning_replay.recipes.groups", "init_args": of_recipe}
    config["data"]["init_args"] |= {"replay": replay, "num_envs": 2, "env_steps": 300, "warmup_steps": 100}
    config["trainer"] = {"accelerator": "cpu", "callbacks": [{"class_path": "ReplayCheckpoint"}]}
    Path("groups.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "-c=groups.yaml"])
    (saved,) = tmp_path.glob("lightning_logs/version_0/checkpoints/last.*.replay")
    loaded = recipes.groups(**of_recipe)
    loaded.load(saved)
    assert len(loaded) == 300 and loaded.stats()["groups_waiting"] < 150
