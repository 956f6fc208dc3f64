# SPDX-License-Identifier: Apache-2.0
"""Prioritized Level Replay on Procgen, whose games run in an environment of their own.

python examples/plr_procgen.py [--fast] [--game bigfish]

Procgen has no release for this Python; procgen-mirror has, for NumPy below 2. This example therefore builds
``.bench-procgen`` (once, 290 MB), steps the games there with procgen_worker.py, and trains here. A level is set by
restoring its first state. The loop is that of plr_any_gymnasium_env.py with a small network: it shows how to connect
the two, not the paper's run, which takes 25 million steps of a larger network on a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from plr_any_gymnasium_env import collect, improve, mean_return
from torch import Tensor, nn

from lightning_replay.levels import SequentialLevels, plr, scores, update_rollout
from lightning_replay.levels.environments import LevelVectorWrapper

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".bench-procgen"
PACKAGES = ("procgen-mirror==0.10.7", "numpy==1.26.4")
DISCOUNT, GAE_LAMBDA, ENVS = 0.999, 0.95, 32
TRAINING_LEVELS, HELD_OUT_LEVELS = range(200), range(1_000, 1_032)


def build() -> Path:
    """Returns the interpreter of the games' environment, which is built if it is missing."""
    python = FOLDER / "bin" / "python"
    if not (FOLDER / ".complete").exists():
        print(f"building {FOLDER.name} with {' and '.join(PACKAGES)} (once, 290 MB)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *PACKAGES], check=True
        )
        (FOLDER / ".complete").touch()
    return python


class Procgen(gymnasium.vector.VectorEnv):
    """Games in another process; the seed of a reset, from :class:`LevelVectorWrapper`, is the level.

    Procgen ends an episode at its time limit as if the game were over, and renders no frame after the last action: a
    step that ends an episode returns the frame before it.
    """

    def __init__(self, game: str, num_envs: int) -> None:
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": AutoresetMode.DISABLED}
        self.single_observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.single_action_space = gymnasium.spaces.Discrete(15)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        command = [str(build()), str(ROOT / "examples" / "procgen_worker.py"), game, str(num_envs)]
        self._worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._frames = np.zeros(self.observation_space.shape, np.uint8)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        level_ids = np.where((options or {}).get("reset_mask", np.ones(self.num_envs, bool)), seed, -1)
        _, _, frames = self._ask(b"L", level_ids)
        begun = level_ids >= 0
        self._frames[begun] = frames[begun]
        return self._frames.copy(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        rewards, ended, frames = self._ask(b"A", actions)
        self._frames[~ended] = frames[~ended]
        return self._frames.copy(), rewards, ended, np.zeros(self.num_envs, bool), {}

    def close_extras(self, **kwargs: Any) -> None:
        self._worker.communicate()

    def _ask(self, kind: bytes, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        requests, answers = self._worker.stdin, self._worker.stdout
        assert requests and answers
        requests.write(kind + numbers.astype(np.int64).tobytes())
        requests.flush()
        answer = answers.read(self.num_envs * (4 + 1 + 64 * 64 * 3))
        if len(answer) < self.num_envs:
            raise RuntimeError(f"the games' process ended with {self._worker.wait()}; what it wrote is above")
        rewards, ended, frames = np.split(np.frombuffer(answer, np.uint8), np.cumsum([4, 1]) * self.num_envs)
        return rewards.view(np.float32), ended.view(bool), frames.reshape(self._frames.shape)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        eyes = nn.Sequential(nn.Conv2d(3, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten())
        self.body = nn.Sequential(eyes, nn.Linear(32 * 6 * 6, 256), nn.ReLU())
        self.actor, self.critic = nn.Linear(256, 15), nn.Linear(256, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(observation.permute(0, 3, 1, 2) / 255)
        return self.actor(features), self.critic(features).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="20,000 steps instead of a million")
    parser.add_argument("--game", default="bigfish")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)

    levels = plr(TRAINING_LEVELS, score=scores.L1ValueLoss(DISCOUNT, GAE_LAMBDA), seed=options.seed)
    envs = LevelVectorWrapper(Procgen(options.game, ENVS), levels)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, eps=1e-5)
    observation, _ = envs.reset()
    updates, start = 20 if options.fast else 1_000, time.perf_counter()
    for update in range(1, updates + 1):
        rollout, observation = collect(envs, model, observation)
        update_rollout(levels, rollout, rollout["level_id"])
        improve(model, optimizer, rollout, DISCOUNT)
        if update % (updates // 5) == 0:
            steps, seconds = update * rollout.numel(), time.perf_counter() - start
            print(f"{steps:>9,} steps, {levels.episodes:>5} episodes, {len(levels):>3} levels scored, {seconds:.0f} s")
    envs.close()
    most = levels.probabilities().to_dict()
    likely = int(most["probability"].argmax())
    print(f"most likely replayed: level {most['level_id'][likely]} with {most['probability'][likely]:.2f}")
    tests = LevelVectorWrapper(Procgen(options.game, len(HELD_OUT_LEVELS)), SequentialLevels(HELD_OUT_LEVELS))
    print(f"return {mean_return(model, tests):.2f} on {tests.num_envs} held-out levels")
    tests.close()


if __name__ == "__main__":
    main()
