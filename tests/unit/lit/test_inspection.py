# SPDX-License-Identifier: Apache-2.0
"""A look into the buffer while Lightning trains."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lightning_replay.lit import InspectBuffer, LogReplayStats
from tests.unit.lit import level_toys
from tests.unit.lit.toys import Tiny, make_data, make_replay, make_trainer


def test_figures_are_logged_and_the_page_has_them_over_the_run(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    inspect, data = InspectBuffer(every_n_updates=15), make_data(make_replay(prioritized=True))
    callbacks = [inspect, LogReplayStats(every_n_updates=15)]
    make_trainer(tmp_path, callbacks, logger=logger).fit(Tiny(), datamodule=data)
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    looked = [row for row in rows if row["replay/effective_share"]]
    assert [int(row["step"]) for row in looked] == [35, 50, 60]  # and at the end
    assert inspect.history["fill"] == ([35, 50, 60], [35 / 500, 50 / 500, 60 / 500])
    size = data.replay.stats()["effective_sample_size"]
    assert float(looked[-1]["replay/effective_sample_size"]) == pytest.approx(size, rel=1e-6)
    page = (Path(logger.log_dir) / "buffer.html").read_text()
    assert "Over the run" in page and "environment step 60" in page and "<svg" in page


def test_a_resumed_run_goes_on_with_the_figures(tmp_path: Path) -> None:
    first = InspectBuffer(every_n_updates=10, path=str(tmp_path / "page.html"))
    trainer = make_trainer(tmp_path, [first])
    trainer.fit(Tiny(), datamodule=make_data(env_steps=40))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = InspectBuffer(every_n_updates=10, path=str(tmp_path / "page.html"))
    make_trainer(tmp_path, [again]).fit(Tiny(), datamodule=make_data(), ckpt_path=tmp_path / "last.ckpt")
    assert again.history["size"][0] == [30, 40, 50, 60] and "update 40" in (tmp_path / "page.html").read_text()


class RecordingWandb(WandbLogger):
    """W&B's logger without its service, which the tests do not have: keeps what it is given."""

    name, version, save_dir, experiment = "wandb", "0", None, None  # type: ignore[assignment]

    def __init__(self) -> None:
        L.pytorch.loggers.Logger.__init__(self)
        self.images: list[tuple[str, np.ndarray, int]] = []

    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: Any) -> None:
        assert step is not None
        self.images += [(key, image, step) for image in images]

    def ignore(self, *args: Any, **kwargs: Any) -> None:
        pass

    log_metrics = log_hyperparams = save = finalize = after_save_checkpoint = ignore


def test_loggers_that_take_pictures_get_them(tmp_path: Path) -> None:
    board, wandb = TensorBoardLogger(tmp_path), RecordingWandb()
    data = level_toys.make_data()
    trainer = make_trainer(tmp_path, [InspectBuffer(every_n_updates=2)], logger=[board, wandb])
    trainer.fit(level_toys.Valuer(), datamodule=data)
    names = {name for name, _, _ in wandb.images}
    assert names == {"levels/score_by_level", "levels/staleness_by_level"}
    assert wandb.images[-1][1].dtype == np.uint8 and wandb.images[-1][2] == data.env_steps_done
    (events,) = Path(board.log_dir).glob("events.out.tfevents.*")
    content = events.read_bytes()
    assert b"levels/score_by_level" in content and b"\x89PNG" in content and b"levels/score_histogram" in content
    assert "Heat map of levels" in (Path(board.log_dir) / "buffer.html").read_text()
