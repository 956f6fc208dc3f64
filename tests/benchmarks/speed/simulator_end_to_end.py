# SPDX-License-Identifier: Apache-2.0
"""TD3 on 1,024 pendulums in one tensor: this library, in a bare loop and under Lightning, beside a single file.

    python tests/benchmarks/speed/simulator_end_to_end.py

``end_to_end/fast_td3.py`` is that file, written in FastTD3's way: rings of tensors, returns over three steps at the
draw. All have the same networks, batches, and updates, and take turns in one process: so many steps of all environments
each. The figures are medians over the turns, in milliseconds for a step of all environments with its updates. All is on
the CPU. ``--draws-on device`` runs there what a GPU would run.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch

from lightning_replay import recipes
from lightning_replay.agents import TD3
from lightning_replay.collecting import VectorSteps
from lightning_replay.envs.pendulums import Pendulums
from lightning_replay.lit import ReplayDataModule
from lightning_replay.replay import Replay

sys.path.insert(0, str(Path(__file__).parent / "end_to_end"))
from fast_td3 import FileLoop, Settings

STEPS_PER_TURN = 16


class PlainTD3(TD3):
    """The same updates outside a trainer, with torch's optimizers."""

    exact = True
    takes_plain_gradients = True

    def critic_and_other_optimizers(self):
        return self.plain_optimizers[0], self.plain_optimizers[1:]


def make_agent(kind: type[TD3], settings: Settings) -> TD3:
    torch.manual_seed(0)
    return kind(
        observation_size=3,
        action_low=[-2.0],
        action_high=[2.0],
        hidden_sizes=settings.hidden_sizes,
        actor_learning_rate=settings.learning_rate,
        critic_learning_rate=settings.learning_rate,
        discount=settings.discount,
        target_update_rate=settings.target_update_rate,
        policy_delay=settings.policy_delay,
        exploration_noise=settings.exploration_noise,
    )


def make_replay(recipe: str, settings: Settings, draws_on: str) -> Replay:
    return getattr(recipes, recipe)(
        capacity=settings.num_envs * settings.ring_length,
        batch_size=settings.batch_size,
        n_steps=settings.n_steps,
        discount=settings.discount,
        draws_on=draws_on,
        seed=0,
    )


def bare_loop(recipe: str, settings: Settings, draws_on: str) -> Callable[[int], None]:
    """A loop of one's own with this library's replay and agent."""
    agent = make_agent(PlainTD3, settings)
    agent.plain_optimizers = agent.configure_optimizers()
    replay = make_replay(recipe, settings, draws_on)
    envs = VectorSteps(Pendulums(settings.num_envs, staggered=True))
    state = {"observation": envs.reset(seed=0)[0], "steps": 0}

    def loop(steps: int) -> None:
        for _ in range(steps):
            with torch.no_grad():
                if state["steps"] < settings.warmup_steps:
                    action = torch.rand(settings.num_envs, 1) * 4 - 2
                else:
                    action = agent.act(state["observation"], explore=True)
            state["observation"] = envs.step(action)[0]
            envs.store(replay)
            state["steps"] += 1
            for _ in range(settings.updates_per_step if state["steps"] > settings.warmup_steps else 0):
                batch = replay.sample()
                outputs = agent.update(batch)
                replay.update_priority(batch, outputs["td_error"])

    return loop


class TakeTurns(L.Callback):
    """Times each epoch of Lightning, then as many steps of the others."""

    def __init__(self, others: dict[str, Callable[[int], None]], settings: Settings) -> None:
        self.others = others
        self.seconds: dict[str, list[float]] = {name: [] for name in (*others, "Lightning")}
        for loop in others.values():
            loop(settings.warmup_steps)

    def on_train_epoch_start(self, trainer, module) -> None:
        self.started = time.perf_counter()

    def on_train_epoch_end(self, trainer, module) -> None:
        self.seconds["Lightning"].append(time.perf_counter() - self.started)
        for name, loop in self.others.items():
            started = time.perf_counter()
            loop(STEPS_PER_TURN)
            self.seconds[name].append(time.perf_counter() - started)


def measure(recipe: str, settings: Settings, draws_on: str, turns: int) -> dict[str, float]:
    """Returns milliseconds of a step with its updates, by contender."""
    torch.manual_seed(0)
    file = FileLoop(Pendulums(settings.num_envs, staggered=True), settings)
    others = {
        "file": lambda steps: [file.step() for _ in range(steps)],
        "bare loop": bare_loop(recipe, settings, draws_on),
    }
    clock = TakeTurns(others, settings)
    data = ReplayDataModule(
        Pendulums,
        make_replay(recipe, settings, draws_on),
        env_steps=settings.num_envs * (settings.warmup_steps + STEPS_PER_TURN * (turns + 1)),
        warmup_steps=settings.num_envs * settings.warmup_steps,
        updates_per_env_step=settings.updates_per_step / settings.num_envs,
        updates_per_epoch=STEPS_PER_TURN * settings.updates_per_step,
        env_kwargs={"num_envs": settings.num_envs, "staggered": True},
        seed=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=-1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[clock],
        )
        trainer.fit(make_agent(TD3, settings), datamodule=data)
    # The first turn compiles kernels and grows the pools of memory.
    return {name: statistics.median(turns[1:]) / STEPS_PER_TURN * 1e3 for name, turns in clock.seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=Settings.batch_size)
    parser.add_argument("--hidden-sizes", type=int, nargs=2, default=Settings.hidden_sizes)
    parser.add_argument("--draws-on", choices=("cpu", "device"), default="cpu")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    settings = Settings(batch_size=options.batch_size, hidden_sizes=tuple(options.hidden_sizes))
    for recipe, limit in (("uniform", 1.1), ("prioritized", 1.2)):
        times = measure(recipe, settings, options.draws_on, options.turns)
        print(f"{recipe}: " + ", ".join(f"{name} {value:.2f} ms" for name, value in times.items()))
        for name in ("bare loop", "Lightning"):
            ratio = times[name] / times["file"]
            word = "met" if ratio <= limit else "NOT MET"
            print(f"  {word:>7}  {recipe}, {name}: {ratio:.2f} of the file's time (at most {limit})", flush=True)


if __name__ == "__main__":
    main()
