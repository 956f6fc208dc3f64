# SPDX-License-Identifier: Apache-2.0
"""Agents that write down what each process of a trainer has drawn, and the weights it ends with."""

from __future__ import annotations

import os
from typing import Any

import torch

from lightning_replay.agents import DQN, SAC


class RecordingDQN(DQN):
    """A small DQN that writes ``<rank>.pt`` into the folder of the trainer, ``default_root_dir``."""

    def __init__(self) -> None:
        super().__init__(observation_size=4, num_actions=2, hidden_sizes=(8,))
        self.drawn: list[torch.Tensor] = []

    def update(self, batch: Any) -> dict[str, torch.Tensor]:
        self.drawn.append(torch.stack([batch["index"], batch["generation"], batch["trajectory"]]))
        return super().update(batch)

    def on_fit_end(self) -> None:
        weights = torch.cat([weight.detach().flatten() for weight in self.parameters()])
        data = self.trainer.datamodule
        record = {
            "drawn": self.drawn,
            "weights": weights,
            "clocks": data.clocks,
            "explored": self._explored_steps,
            "local_steps": data.collection.env_steps,
        }
        torch.save(record, os.path.join(self.trainer.default_root_dir, f"{self.trainer.global_rank}.pt"))


class RecordingSAC(SAC):
    """A small SAC, which has several optimizers, that writes its weights as :class:`RecordingDQN`."""

    def __init__(self) -> None:
        super().__init__(hidden_sizes=(8,))

    def on_fit_end(self) -> None:
        weights = torch.cat([weight.detach().flatten() for weight in self.parameters()])
        record = {"weights": weights, "clocks": self.trainer.datamodule.clocks}
        torch.save(record, os.path.join(self.trainer.default_root_dir, f"{self.trainer.global_rank}.pt"))
