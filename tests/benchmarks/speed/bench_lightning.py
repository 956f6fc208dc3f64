# SPDX-License-Identifier: Apache-2.0
"""T13: what Lightning adds to the same loop in plain Python, bar and logger off, in microseconds per update.

    python tests/benchmarks/speed/bench_lightning.py

Both loops draw from the same kind of replay and make the same update; only who calls it differs. They take turns,
one of Lightning's epochs and then as many updates in plain Python, within one process; the figures are medians of the
CPU time over all turns, so that other work on the machine weighs on both alike. The first two rows are Lightning
without this library's data module and callbacks: batches from a list and no callback but the clock, with nothing to do
in a step, then with the draw of the plain loop in it, which takes longer between Lightning's code. Nothing is below.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median

import lightning as L
import torch
from tensordict import TensorDict

from lightning_replay import recipes
from lightning_replay.agents import DQN
from lightning_replay.lit import ReplayDataModule, UpdatePriorities
from lightning_replay.replay import Replay

BATCH = 128
# name: agent, updates per training step (None for the default), target in microseconds
CASES: dict[str, tuple[str, int | None, float | None]] = {
    "Lightning's own loop, empty step": ("bare", 1, None),
    "Lightning's own loop, same draw": ("drawing", 1, None),
    "empty step": ("empty", 1, 120.0),
    "DQN update": ("dqn", 1, 300.0),
    "DQN update, 8 per training_step": ("dqn", 8, 60.0),
    "DQN update, as by default": ("dqn", None, 60.0),
}


class Empty(L.LightningModule):
    """A training step that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.outputs = {"loss": torch.zeros(()), "td_error": torch.zeros(BATCH)}

    def act(self, observation: torch.Tensor, explore: bool) -> torch.Tensor:
        raise AssertionError("nothing is collected here")

    def update(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        return self.outputs

    def training_step(self, batch: TensorDict, batch_idx: int) -> dict[str, torch.Tensor]:
        return self.outputs

    def configure_callbacks(self) -> list[L.Callback]:
        return [UpdatePriorities()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Bare(L.LightningModule):
    """A training step that calls a function, outside this library's data module."""

    def __init__(self, step: Callable[[int], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.step = step

    def training_step(self, batch: int, batch_idx: int) -> None:
        self.step(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PlainDQN(DQN):
    """The same update outside a trainer, with torch's optimiser."""

    exact = True
    takes_plain_gradients = True

    def critic_and_other_optimizers(self):
        return self.plain_optimizer, []


def filled_replay() -> Replay:
    replay = recipes.uniform(capacity=20_000, batch_size=BATCH, seed=0)
    size = 20_000
    flags = {key: torch.zeros(size, 1, dtype=torch.bool) for key in ("terminated", "truncated", "done")}
    following = {"observation": torch.randn(size, 4), "reward": torch.randn(size, 1), **flags}
    columns = {"observation": torch.randn(size, 4), "action": torch.randint(2, (size,))}
    replay.extend(TensorDict({**columns, "next": TensorDict(following, [size])}, [size]))
    return replay


def make_agent(kind: str) -> L.LightningModule:
    torch.manual_seed(0)
    return Empty() if kind == "empty" else DQN(4, 2, hidden_sizes=(128, 128))


def plain_loop(kind: str) -> Callable[[int], None]:
    """A function that makes a number of updates without Lightning."""
    if kind == "bare":
        return lambda updates: None
    replay = filled_replay()
    if kind in ("empty", "drawing"):
        agent = Empty()
    else:
        agent = PlainDQN(4, 2, hidden_sizes=(128, 128))
        agent.plain_optimizer = agent.configure_optimizers()

    def loop(updates: int) -> None:
        for update in range(updates):
            replay.advance(env_steps=20_000, updates=update)
            batch = replay.sample()
            outputs = agent.update(batch)
            replay.update_priority(batch["index"], outputs["td_error"], generation=batch["generation"])

    return loop


class TakeTurns(L.Callback):
    """Times each epoch, then as many updates of the plain loop."""

    def __init__(self, plain: Callable[[int], None], updates: int) -> None:
        self.plain = plain
        self.updates = updates
        self.turns: list[tuple[float, float]] = []

    def on_train_epoch_start(self, trainer, module) -> None:
        self.started = time.process_time()

    def on_train_epoch_end(self, trainer, module) -> None:
        ended = time.process_time()
        self.plain(self.updates)
        plain = time.process_time() - ended
        self.turns.append((plain / self.updates * 1e6, (ended - self.started) / self.updates * 1e6))


def measure(kind: str, updates_per_step: int | None, updates: int, turns: int) -> list[tuple[float, float]]:
    clock = TakeTurns(plain_loop(kind), updates)
    trainer = L.Trainer(
        max_epochs=turns + 1 if kind in ("bare", "drawing") else -1,
        accelerator="cpu",
        logger=False,
        callbacks=[clock],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tempfile.gettempdir(),
    )
    if kind in ("bare", "drawing"):
        trainer.fit(Bare(plain_loop(kind)), train_dataloaders=list(range(updates)))
        return clock.turns[1:]
    total = updates * (turns + 1)
    data = ReplayDataModule(
        "CartPole-v1",
        filled_replay(),
        env_steps=total + 1,
        warmup_steps=1,
        updates_per_training_step=updates_per_step,
        updates_per_epoch=updates,
    )
    data.collection.env_steps = total + 1  # everything is collected: only the updates are timed
    trainer.fit(make_agent(kind), datamodule=data)
    assert data.updates_done == total
    return clock.turns[1:]  # the first warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200, help="per turn")
    parser.add_argument("--turns", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"T13, microseconds of CPU per update, medians of {options.turns} turns of {options.updates} updates")
    print(f"{'':34}{'plain':>8}{'Lightning':>11}{'adds':>8}{'target':>8}")
    for name, (kind, per_step, target) in CASES.items():
        turns = measure(kind, per_step, options.updates, options.turns)
        plain, ours = median(turn[0] for turn in turns), median(turn[1] for turn in turns)
        adds = median(turn[1] - turn[0] for turn in turns)
        verdict = "" if target is None else f"{target:8.0f}  {'met' if adds <= target else 'MISSED'}"
        print(f"{name:34}{plain:8.0f}{ours:11.0f}{adds:8.0f}{verdict}", flush=True)


if __name__ == "__main__":
    main()
