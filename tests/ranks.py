# SPDX-License-Identifier: Apache-2.0
"""An agent that writes down what each process of a trainer has drawn, and the weights it ends with."""

from __future__ import annotations

import os
from typing import Any

import torch

from lightning_replay.agents import DQN


class RecordingDQN(DQN):
    """A small DQN that writes ``<rank>.pt`` into the folder of the environment variable ``RECORDS``."""

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
        torch.save(record, os.path.join(os.environ["RECORDS"], f"{self.trainer.global_rank}.pt"))
