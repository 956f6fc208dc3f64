# SPDX-License-Identifier: Apache-2.0
"""Fits of agents on given batches, without a data module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tensordict import TensorDict

from lightning_replay.agents import DQN, MPDQN


class Batches:
    """A train loader of given batches; with a seed, all its passes begin with the same random numbers."""

    def __init__(self, batches: list[TensorDict], seed: int | None = None) -> None:
        self.batches, self.seed = batches, seed

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[TensorDict]:
        if self.seed is not None:
            torch.manual_seed(self.seed)
        return iter([batch.clone() for batch in self.batches])


class Record(L.Callback):
    """Outputs of the training steps, over which it iterates, and what a function of the agent returned after each."""

    def __init__(self, look: Callable[[Any], Any] = lambda agent: None) -> None:
        self.outputs: list[Any] = []
        self.seen: list[Any] = []
        self.look = look

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.outputs.append(outputs)
        self.seen.append(self.look(pl_module))

    def __getitem__(self, step: int) -> Any:
        return self.outputs[step]


def fit(
    agent: L.LightningModule,
    batches: list[TensorDict],
    directory: Path,
    look: Callable[[Any], Any] = lambda agent: None,
    ckpt_path: Path | None = None,
    epochs: int = 1,
    callbacks: Sequence[L.Callback] = (),
    seed: int | None = None,
    precision: Any = None,
    **options: Any,
) -> tuple[L.Trainer, Record]:
    record = Record(look)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    options |= {"accelerator": "cpu", "callbacks": [record, *callbacks], "default_root_dir": directory} | quiet
    trainer = L.Trainer(max_epochs=epochs, precision=precision, **options)
    trainer.fit(agent, Batches(batches, seed), ckpt_path=ckpt_path)
    return trainer, record


def flags(size: int) -> dict[str, torch.Tensor]:
    """Neither terminated nor truncated."""
    return {key: torch.zeros(size, 1, dtype=torch.bool) for key in ("terminated", "truncated", "done")}


def make_actions(agent: L.LightningModule, size: int) -> Any:
    """Random actions for an agent of two actions, of one number, or of both."""
    if isinstance(agent, MPDQN):
        return {"discrete": torch.randint(2, (size,)), "parameters": torch.rand(size, 2)}
    return torch.randint(2, (size,)) if isinstance(agent, DQN) else torch.rand(size, 1)


def make_rows(action: Any, **columns: Any) -> TensorDict:
    """Random rows of three observations, which do not end, with these actions and other columns."""
    (size,) = (action["discrete"] if isinstance(action, dict) else action).shape[:1]
    following = {"observation": torch.randn(size, 3), "reward": torch.randn(size, 1), **flags(size)}
    return TensorDict({"observation": torch.randn(size, 3), "action": action, "next": following} | columns, [size])
