# SPDX-License-Identifier: Apache-2.0
"""Everything that is logged, by whomever, is logged against environment steps."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_replay.lit import Evaluate, LogReplayStats
from tests.unit.lit import toys
from tests.unit.lit.toys import make_trainer

LOG_EVERY = {"log_every_n_steps": 4}


class Logging(L.LightningModule):
    """A user's module: automatic optimization, a learning rate that changes, metrics by ``self.log``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5]))

    def act(self, observation, explore):
        return self.weight.expand(len(observation), 1)

    def training_step(self, batch, batch_idx):
        loss = (self.weight * batch["observation"]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("eval/return", batch["return"], batch_size=1)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-4)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5), "interval": "step"}]


class Failing(L.Callback):
    def __init__(self, error: BaseException, in_setup: bool = False) -> None:
        self.error = error
        self.in_setup = in_setup

    def setup(self, trainer, pl_module, stage) -> None:
        if self.in_setup:
            raise self.error

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == 3:
            raise self.error


# update u is due after environment step 20 + 2 u
make_data = partial(toys.make_data, updates_per_env_step=0.5)


def read(logger: CSVLogger) -> list[dict[str, str]]:
    return list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))


def moments(rows: list[dict[str, str]], metric: str) -> list[tuple[int, int]]:
    """(environment steps, updates) of the rows that have a metric."""
    return [(int(row["step"]), int(row["updates"])) for row in rows if row[metric]]


def is_plain(*loggers) -> bool:
    return not any("log_metrics" in vars(logger) for logger in loggers)


def test_whoever_logs_the_axis_is_environment_steps(tmp_path: Path) -> None:
    logger, board = CSVLogger(tmp_path), TensorBoardLogger(tmp_path, "board")
    seen = []

    class Look(L.Callback):
        def on_train_start(self, trainer, pl_module) -> None:
            seen.append((trainer.loggers == [logger, board], trainer.log_dir == logger.log_dir))

    checkpoint = ModelCheckpoint(tmp_path / "run", "{step}", every_n_train_steps=10, save_top_k=-1)
    callbacks = [Evaluate(20, 1), LogReplayStats(8), LearningRateMonitor("step"), checkpoint, Look()]
    trainer = make_trainer(tmp_path, callbacks, logger=[logger, board], **LOG_EVERY)
    trainer.fit(Logging(), datamodule=make_data())
    rows = read(logger)
    assert moments(rows, "loss_step") == [(28, 4), (36, 8), (44, 12), (52, 16), (60, 20)]
    assert moments(rows, "loss_epoch") == [(22, 1), (40, 10), (60, 20)]  # at each evaluation but that of the start
    assert moments(rows, "lr-SGD") == [(28, 4), (36, 8), (44, 12), (52, 16), (60, 20)]
    assert moments(rows, "replay/nbytes") == [(36, 8), (52, 16)]
    assert moments(rows, "eval/return") == [(0, 0), (22, 1), (40, 10), (60, 20)]
    every = [(int(row["step"]), int(row["updates"])) for row in rows]
    assert every == sorted(every)
    assert {path.name for path in (tmp_path / "run").glob("*.ckpt")} == {"step=10.ckpt", "step=20.ckpt"}
    assert seen == [(True, True)] and is_plain(logger, board)


def test_several_batches_per_training_step_have_one_moment(tmp_path: Path) -> None:
    class Several(Logging):
        def training_step(self, batch, batch_idx):
            return torch.stack([super(Several, self).training_step(drawn, batch_idx) for drawn in batch]).sum()

    logger = CSVLogger(tmp_path)
    trainer = make_trainer(tmp_path, logger=logger, log_every_n_steps=1)
    trainer.fit(Several(), datamodule=make_data(updates_per_training_step=5))
    assert moments(read(logger), "loss_step") == [(30, 5), (40, 10), (50, 15), (60, 20)]


def test_validation_is_logged_where_training_stands(tmp_path: Path) -> None:
    data, agent, logger = make_data(), Logging(), CSVLogger(tmp_path)
    trainer = make_trainer(tmp_path, logger=logger, **LOG_EVERY)
    trainer.fit(agent, datamodule=data)
    trainer.validate(agent, datamodule=data, verbose=False)
    assert moments(read(logger), "eval/return") == [(60, 20)] and is_plain(logger)


def test_each_fit_has_the_clocks_of_its_own_data_module(tmp_path: Path) -> None:
    logger, agent = CSVLogger(tmp_path), Logging()
    for env_steps in (28, 44):
        trainer = make_trainer(tmp_path, logger=logger, **LOG_EVERY)
        trainer.fit(agent, datamodule=make_data(env_steps=env_steps))
    assert moments(read(logger), "loss_step") == [(28, 4), (28, 4), (36, 8), (44, 12)]


def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(Logging(), datamodule=make_data(env_steps=44))
    trainer.save_checkpoint(tmp_path / "run" / "end.ckpt")
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(tmp_path, [LearningRateMonitor("step")], logger=logger, log_every_n_steps=1)
    trainer.fit(Logging(), datamodule=make_data(), ckpt_path=tmp_path / "run" / "end.ckpt")
    every = [(int(row["step"]), int(row["updates"])) for row in read(logger)]
    assert every[0] == (46, 13) and every[-1] == (60, 20) and every == sorted(every)


@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize(
    ("failing", "raised"),
    [
        (Failing(OSError("full")), OSError),
        (Failing(KeyboardInterrupt()), SystemExit),
        (Failing(OSError("full"), in_setup=True), OSError),
    ],
    ids=["error", "Ctrl-C", "setup"],
)
def test_loggers_are_given_back_after_an_error(failing: Failing, raised: type, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    with pytest.raises(raised):
        make_trainer(tmp_path, [failing], logger=logger).fit(Logging(), datamodule=make_data())
    assert is_plain(logger)


def test_a_method_that_a_user_replaced_is_kept(tmp_path: Path) -> None:
    logger, steps = CSVLogger(tmp_path), []
    replaced = logger.log_metrics = lambda metrics, step=None: steps.append((step, metrics["updates"]))
    make_trainer(tmp_path, logger=logger, **LOG_EVERY).fit(Logging(), datamodule=make_data(env_steps=36))
    assert steps == [(28, 4), (36, 8), (36, 8)] and logger.log_metrics is replaced
