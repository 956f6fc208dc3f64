# SPDX-License-Identifier: Apache-2.0
"""The same seed gives the draws that were recorded once, for every recipe in the three integrations.

A change of the code that should keep the draws fails here if it does not keep them. If a change alters draws on
purpose, ``python -m tests.unit.test_recorded_draws`` records them again, and the changelog names the recipes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from lightning_replay import recipes
from lightning_replay.lit import ReplayDataModule, UpdatePriorities
from lightning_replay.replay import Replay
from tests.recipe_options import ROW_RECIPES, built, fitting, required_options
from tests.transitions import numbered_steps

RECORD = Path(__file__).parents[1] / "fixtures" / "draws.json"
STEPS_AND_PREFETCH = {"n_steps": 3, "prefetch": 2}
#: RLlib assigns the tasks of a curriculum itself, takes goals from its environment, and forms sequences itself.
RLLIB_RECIPES = sorted(set(recipes.known()) - {"parallel_curriculum", "hindsight", "sequences"})


class Feedback(L.LightningModule):
    """Learns nothing; its TD errors follow from the slots of a batch, and it notes each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.draws: list[np.ndarray] = []

    def act(self, observation: torch.Tensor, explore: bool) -> torch.Tensor:
        return torch.zeros(len(observation), 2)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        self.draws.append(drawn(batch))
        return {"loss": self.weight.sum(), "td_error": errors_of(batch["index"])}

    def configure_callbacks(self) -> list[L.Callback]:
        return [UpdatePriorities()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def errors_of(index: torch.Tensor) -> torch.Tensor:
    rows = index.reshape(len(index), -1)[:, 0]
    return rows.remainder(5).float() + 1.0


def drawn(batch: Any) -> np.ndarray:
    """The slots of a batch, and its weights to four digits."""
    slots = batch["index"].reshape(len(batch), -1).double()
    weights = batch.get("priority_weight", None)
    if weights is not None:
        slots = torch.cat([slots, weights.reshape(len(batch), -1).double()], dim=1)
    return slots.numpy().round(4)


def filled(name: str, **options: Any) -> Replay:
    replay = built(name, capacity=64, batch_size=8, seed=7, **options)
    for first in range(0, 80, 16):
        replay.extend(fitting(replay, numbered_steps(first, 16, done_every=7)))
    return replay


def draws_of_torchrl(name: str, **options: Any) -> list[np.ndarray]:
    replay = filled(name, **options)
    found = []
    for first in range(80, 144, 16):
        for _ in range(3):
            batch = replay.sample()
            found.append(drawn(batch))
            if replay.takes_feedback:
                replay.update_priority(batch, errors_of(batch["index"]))
        replay.extend(fitting(replay, numbered_steps(first, 16, done_every=7)))
    return found


def draws_of_lightning(name: str, **options: Any) -> list[np.ndarray]:
    agent = Feedback()
    data = ReplayDataModule(None, filled(name, **options), updates=12, seed=7)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(agent, datamodule=data)
    return agent.draws


def draws_of_rllib(name: str, **options: Any) -> list[np.ndarray]:
    from rllib_ext import RecipeEpisodeReplayBuffer
    from tests.unit.rllib_ext.episodes import column, numbered

    arguments = required_options(name, 64) | options
    buffer = RecipeEpisodeReplayBuffer(name, seed=7, **arguments)
    found = []
    for turn in range(6):
        actions = [np.array([step, -step], dtype=np.float32) for step in range(13)]
        buffer.add([numbered(f"{turn}", 13, offset=100.0 * turn, terminated=True, actions=actions)])
        for _ in range(3):
            episodes = buffer.sample(num_items=8)
            found.append(column(episodes, "get_observations")[:, 0].astype(np.float64))
            buffer.update_priorities(1.0 + found[-1] % 5)
    return found


HOSTS: dict[str, Callable[..., list[np.ndarray]]] = {
    "torchrl": draws_of_torchrl,
    "lightning": draws_of_lightning,
    "rllib": draws_of_rllib,
}


def cases() -> Iterator[tuple[str, str, str]]:
    for host in HOSTS:
        for name in RLLIB_RECIPES if host == "rllib" else sorted(recipes.known()):
            yield host, name, "plain"
            if name in ROW_RECIPES and host != "rllib":
                yield host, name, "n_steps and prefetch"


def digest(host: str, name: str, variant: str) -> str:
    options = {} if variant == "plain" else STEPS_AND_PREFETCH
    draws = HOSTS[host](name, **options)
    assert len({draw.tobytes() for draw in draws}) > 1
    return hashlib.sha256(b"".join(draw.tobytes() for draw in draws)).hexdigest()[:16]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("host", "name", "variant"), [*cases()])
def test_the_draws_are_those_that_were_recorded(host: str, name: str, variant: str) -> None:
    recorded = json.loads(RECORD.read_text())
    assert digest(host, name, variant) == recorded[f"{host}, {name}, {variant}"]


if __name__ == "__main__":
    record = {", ".join(case): digest(*case) for case in cases()}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
