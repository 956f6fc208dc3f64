# SPDX-License-Identifier: Apache-2.0
"""A fit of Lightning in two processes whose batches are prompts: ``python -m tests.prompt_fit FOLDER [CHECKPOINT]``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_replay.levels import LevelBatchSampler
from tests.prompt_ranks import BATCH, BATCHES, PROMPTS, levels_of, outcomes_of

STOP_AT = 4


class Prompts(L.LightningModule):
    """Writes the batches of its process to ``<rank>.pt``, and a checkpoint after four of them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        # Seeds need not be equal: the processes take over the state of the first.
        self.levels = levels_of(seed=0)
        self.sampler = LevelBatchSampler(self.levels, BATCH // 2, BATCHES)
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(PROMPTS, batch_sampler=self.sampler, collate_fn=list)

    def training_step(self, batch: list[dict[str, Any]], _: int) -> torch.Tensor:
        level_ids = [item["level_id"] for item in batch]
        self.levels.record(level_ids, outcomes=outcomes_of(level_ids))
        self.seen.append(level_ids)
        return self.weight * len(level_ids)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == STOP_AT:
            self.trainer.save_checkpoint(self.folder / "stopped.ckpt")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["levels"] = self.levels.state_dict(), self.sampler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        of_levels, of_sampler = checkpoint["levels"]
        self.levels.load_state_dict(of_levels)
        self.sampler.load_state_dict(of_sampler)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_fit_end(self) -> None:
        torch.save(self.seen, self.folder / f"{self.trainer.global_rank}.pt")


def main() -> None:
    """Fits, or goes on from a checkpoint."""
    folder, *checkpoint = map(Path, sys.argv[1:])
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        use_distributed_sampler=False,
        default_root_dir=folder,
        **off,
    )
    trainer.fit(Prompts(folder), ckpt_path=checkpoint[0] if checkpoint else None, weights_only=False)


if __name__ == "__main__":
    main()
