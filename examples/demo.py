# SPDX-License-Identifier: Apache-2.0
"""TD3 with uniform replay and with neighbourhood mixup, side by side, on a MuJoCo task.

    python examples/demo.py                # two runs at a time: a table, a picture, checkpoints
    python examples/demo.py --seeds 5      # five paired seeds: areas under the learning curves and their ratio

Everything is written under runs/demo (runs/experiment with several seeds).
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the runs themselves are the parallel part

METHODS = ("uniform", "neighborhood_mixup")
WARMUP_STEPS = 1_000


class Run(NamedTuple):
    method: str
    seed: int
    curve: list[tuple[int, float]]
    checkpoint: str
    seconds: float

    @property
    def area(self) -> float:
        """Mean evaluation return over the run: the area under the learning curve per environment step."""
        pairs = list(zip(self.curve[:-1], self.curve[1:], strict=True))
        total = sum((after[0] - before[0]) * (after[1] + before[1]) / 2 for before, after in pairs)
        return total / (self.curve[-1][0] - self.curve[0][0])


def train(method: str, seed: int, env: str, env_steps: int, directory: Path) -> Run:
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_replay import recipes
    from lightning_replay.agents import TD3
    from lightning_replay.lit import Evaluate, ReplayDataModule

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    started = time.perf_counter()
    L.seed_everything(seed, verbose=False)  # before the agent: both methods start from the same networks
    # larger steps than usual: the task is small and the demo short
    agent = TD3.for_env(
        env, hidden_sizes=(64, 64), actor_learning_rate=2e-3, critic_learning_rate=2e-3, target_update_rate=0.02
    )
    replay = {
        "uniform": lambda: recipes.uniform(capacity=50_000, batch_size=128),
        "neighborhood_mixup": lambda: recipes.neighborhood_mixup(capacity=50_000, batch_size=128, num_neighbors=10),
    }[method]()
    data = ReplayDataModule(
        env, replay, env_steps, WARMUP_STEPS, updates_per_env_step=2, updates_per_epoch=1_000, seed=seed
    )
    evaluate = Evaluate(every_n_env_steps=500, episodes=5)
    best = ModelCheckpoint(
        directory / f"{method}-seed{seed}", "best", monitor="eval/return", mode="max", enable_version_counter=False
    )
    trainer = L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        callbacks=[evaluate, best],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(agent, datamodule=data)
    return Run(method, seed, evaluate.history, best.best_model_path, time.perf_counter() - started)


def train_all(seeds: int, env: str, env_steps: int, directory: Path) -> list[Run]:
    """All runs, as many at a time as there are cores."""
    workers = min(os.cpu_count() or 1, seeds * len(METHODS))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = [
            pool.submit(train, method, seed, env, env_steps, directory) for seed in range(seeds) for method in METHODS
        ]
        runs = []
        for job in jobs:
            run = job.result()
            returns = f"last return {run.curve[-1][1]:.0f}, mean {run.area:.0f}"
            print(f"  {run.method}, seed {run.seed}: {returns}, {run.seconds:.0f} s", flush=True)
            runs.append(run)
    return runs


def print_returns(runs: list[Run]) -> None:
    print("\nevaluation return, mean of 5 episodes\n")
    print(f"{'env steps':>9}" + "".join(f"{method:>20}" for method in METHODS))
    for row in range(max(len(run.curve) for run in runs)):
        points = [run.curve[row] for run in runs if row < len(run.curve)]
        print(f"{points[0][0]:>9}" + "".join(f"{value:>20.1f}" for _, value in points))


def print_areas(runs: list[Run]) -> None:
    """Mean return over the whole run of each paired seed, and the ratio of the means."""
    areas = {method: [run.area for run in runs if run.method == method] for method in METHODS}
    print("\nmean evaluation return over the run (area under the learning curve / environment steps)\n")
    print(f"{'seed':>9}" + "".join(f"{method:>20}" for method in METHODS) + f"{'ratio':>8}")
    for seed, (uniform, mixed) in enumerate(zip(*areas.values(), strict=True)):
        print(f"{seed:>9}{uniform:>20.1f}{mixed:>20.1f}{mixed / uniform:>8.2f}")
    uniform, mixed = (sum(values) / len(values) for values in areas.values())
    print(f"{'mean':>9}{uniform:>20.1f}{mixed:>20.1f}{mixed / uniform:>8.2f}")


def mean_curves(runs: list[Run]) -> dict[str, list[tuple[int, float]]]:
    curves = {}
    for method in METHODS:
        grouped = zip(*(run.curve for run in runs if run.method == method), strict=False)
        curves[method] = [(points[0][0], sum(value for _, value in points) / len(points)) for points in grouped]
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--env", default="InvertedPendulum-v5")
    parser.add_argument("--env-steps", type=int, default=6_000)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    directory = options.directory or Path("runs", "demo" if options.seeds == 1 else "experiment")
    print(f"TD3 on {options.env}, {options.env_steps} environment steps, {WARMUP_STEPS} of them random")
    started = time.perf_counter()
    runs = train_all(options.seeds, options.env, options.env_steps, directory)
    if options.seeds == 1:
        print_returns(runs)
    print_areas(runs)

    from lightning_replay.lit.callbacks import draw_learning_curves

    picture = directory / "learning_curve.png"
    draw_learning_curves(mean_curves(runs), picture, f"TD3 on {options.env}, {options.seeds} seed(s)")
    print(f"\n{time.perf_counter() - started:.0f} s; written:\n  {picture}")
    for run in runs:
        print(f"  {run.checkpoint}")


if __name__ == "__main__":
    main()
