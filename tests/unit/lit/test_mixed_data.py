# SPDX-License-Identifier: Apache-2.0
"""A replay of two buffers in the data module: its batches, its checkpoints, and what is refused."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_replay import MixedReplay, load_replay, recipes
from lightning_replay.lit import InspectBuffer
from lightning_replay.mixed_replay import OFFLINE_INDEX
from tests.unit.lit.toys import Counting, Tiny, make_data, make_replay, make_trainer

FEW = {"env_steps": 60, "warmup_steps": 20}


def offline_rows() -> recipes.Replay:
    """Rows that a run without an agent has collected."""
    replay = recipes.uniform(capacity=5_000, batch_size=4)
    rows = make_replay()
    make_trainer(".").fit(Tiny(), datamodule=make_data(rows))
    replay.extend(rows[:50])
    replay.extend(torch.cat([rows[:50]] * 60))
    return replay


def mixed(rows: recipes.Replay, **options) -> MixedReplay:
    return recipes.mixed(online=make_replay(prioritized=True), offline=rows, share=0.3, batch_size=8, **options)


class SaveAndDraw(L.Callback):
    def __init__(self, update: int, path: Path) -> None:
        self.update, self.path = update, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.datamodule.updates_done == self.update:
            trainer.save_checkpoint(self.path)


class Peek(L.Callback):
    def on_train_start(self, trainer, pl_module) -> None:
        copied = mixed(recipes.uniform(capacity=5_000, batch_size=4))
        copied.load_state_dict(trainer.datamodule.replay.state_dict())
        self.draws = [copied.sample()["index"].tolist() for _ in range(5)]


def test_a_run_draws_from_both_and_resumes_with_equal_draws(tmp_path: Path) -> None:
    rows = offline_rows()
    agent, replay, path = Tiny(), mixed(rows, seed=3), tmp_path / "at_17.ckpt"
    make_trainer(tmp_path, [SaveAndDraw(17, path), SaveAndDraw(30, tmp_path / "at_30.ckpt")]).fit(
        agent, datamodule=make_data(replay, **FEW)
    )
    assert len(agent.seen) == 40
    of_offline = np.array([sum(index >= OFFLINE_INDEX for index in batch) for batch in agent.seen])
    assert set(of_offline.tolist()) == {2, 3}
    assert len(replay.online) == 60
    assert len(replay.offline) == 3_050
    (saved,) = tmp_path.glob("at_17.*.replay")
    loaded = load_replay(saved, end_episodes=False)
    peek = Peek()
    resumed = mixed(recipes.uniform(capacity=5_000, batch_size=4))
    make_trainer(tmp_path, [peek]).fit(Tiny(), datamodule=make_data(resumed, **FEW), ckpt_path=path)
    assert [loaded.sample()["index"].tolist() for _ in range(5)] == peek.draws
    assert len(resumed.online) == 60


def test_before_the_warm_up_ends_rows_are_offline(tmp_path: Path) -> None:
    agent = Tiny()
    replay = recipes.mixed(online=make_replay(), offline=offline_rows(), batch_size=8, seed=0)
    make_trainer(tmp_path).fit(agent, datamodule=make_data(replay, env_steps=12, warmup_steps=1))
    of_offline = [sum(index >= OFFLINE_INDEX for index in batch) for batch in agent.seen]
    assert of_offline == [8, 8, *[4] * 9]


def test_rows_of_another_environment_are_named(tmp_path: Path) -> None:
    rows = recipes.uniform(capacity=100, batch_size=4)
    row = offline_rows()[:4]
    row["observation"] = row["observation"].double()
    rows.extend(row.exclude("action"))
    named = r"'action': stored no such column.*'observation': stored \(torch.float64, \(2,\)\), of the env.*float32"
    with pytest.raises(ValueError, match=named):
        make_trainer(tmp_path).fit(Tiny(), datamodule=make_data(mixed(rows), env=Counting))


class Recording(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}

    def log_metrics(self, metrics, step=None) -> None:
        self.metrics |= metrics


def test_the_page_of_contents_shows_both_sides(tmp_path: Path) -> None:
    inspect, logger = InspectBuffer(every_n_updates=10, path=str(tmp_path / "page.html")), Recording()
    replay = mixed(offline_rows(), seed=0)
    trainer = make_trainer(tmp_path, [inspect], logger=logger)
    trainer.fit(Tiny(), datamodule=make_data(replay, **FEW))
    page = (tmp_path / "page.html").read_text()
    for side, rows in (("online", 60), ("offline", 3_050)):
        assert f"<h2>{side}</h2>" in page
        assert f"<b>{rows:,}</b><span>transitions" in page
        fill = rows / replay._sides[side].capacity
        assert logger.metrics[f"replay/{side}/fill"] == inspect.history[f"{side}/fill"][1][-1] == fill
        assert len(inspect.history[f"{side}/fill"][0]) == 4
    assert not {"replay/fill", "fill"} & {*logger.metrics, *inspect.history}
