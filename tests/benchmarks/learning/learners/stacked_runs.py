# SPDX-License-Identifier: Apache-2.0
"""Agents of several seeds at once in a plain loop: an environment and a replay for each run.

Runs share nothing but the time they take: each has its own weights, noise, environment and replay, all by its seed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.mujoco import MujocoEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RescaleAction
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import Replay
from tests.benchmarks.learning.learners.checkpoints import load_agent_and_replays, save_agent_and_replays
from tests.benchmarks.learning.learners.stacked_sac import StackedSAC
from tests.benchmarks.learning.learners.stacked_td3 import StackedTD3

_NEXT = tuple(("next", name) for name in ("observation", "reward", "terminated"))
_LEARNED = ("observation", "action", *_NEXT, "priority_weight")  # the last of prioritized draws alone


class StackedRuns:
    """An agent of R runs with an environment and a replay for each.

    Args:
        agent: of all runs.
        env: Gymnasium id of an environment with a bounded action space.
        replays: one for each run; a batch holds the rows of ``updates_per_draw`` updates.
        seeds: of the environments and the random actions, one for each run. Runs of one seed start with equal rows.
        warmup_steps: steps with random actions before the first update.
        updates_per_env_step: replay ratio.
        updates_per_draw: updates whose rows are drawn together, which divides the replay ratio and the replays' batch
            size. More than 1 makes no difference to uniform draws; priorities are then updated once a draw.
        env_kwargs: further arguments of the environment.
        num_envs: environments of each run, which take a step together; the replay ratio times their number is whole.
    """

    def __init__(
        self,
        agent: StackedTD3 | StackedSAC,
        env: str,
        replays: Sequence[Replay],
        seeds: Sequence[int],
        warmup_steps: int,
        updates_per_env_step: float,
        updates_per_draw: int,
        env_kwargs: dict[str, Any] | None = None,
        num_envs: int = 1,
    ) -> None:
        self.agent = agent
        self.replays = list(replays)
        self.env_steps = 0
        self._env, self._env_kwargs = env, env_kwargs or {}
        self._warmup_steps = warmup_steps
        self._num_envs = num_envs
        self._draws = round(updates_per_env_step * num_envs) // updates_per_draw
        self._updates_per_draw = updates_per_draw
        self._environments = self._make(len(seeds) * num_envs)
        self._generators = [np.random.default_rng(seed) for seed in seeds]
        own = [seed + 10_000 * number for seed in seeds for number in range(num_envs)]
        self._observation, _ = self._environments.reset(seed=own)
        self._trajectory = np.tile(1_000_000 * np.arange(num_envs), len(seeds))

    def play(self, env_steps: int) -> None:
        """Plays and learns until so many steps of each run's environment have been taken."""
        waiting: list[tuple[np.ndarray, ...]] = []
        while self.env_steps < env_steps:
            waiting.append(self._step())
            self.env_steps += self._num_envs
            if self.env_steps >= self._warmup_steps or self.env_steps == env_steps:
                self._store([self._in_order(column) for column in zip(*waiting, strict=True)])
                waiting.clear()
            if self.env_steps > self._warmup_steps:
                for _ in range(self._draws):
                    self._learn()

    def evaluate(self, episodes: int, seed: int) -> np.ndarray:
        """Mean return ``[R]`` of episodes without exploration; their first states are the same for every run."""
        environments = self._make(episodes * len(self.replays))
        count = environments.num_envs
        observation, _ = environments.reset(seed=[seed + number % episodes for number in range(count)])
        returns, is_playing = np.zeros(count), np.ones(count, dtype=bool)
        while is_playing.any():
            rows = _floats(observation).view(-1, episodes, observation.shape[-1])
            action = self.agent.act(rows, explore=False).flatten(0, 1).numpy()
            observation, reward, terminated, truncated, _ = environments.step(action)
            returns += reward * is_playing
            is_playing &= ~(terminated | truncated)
        environments.close()
        return returns.reshape(-1, episodes).mean(1)

    def save(self, folder: Path) -> None:
        """Writes agent, replays, random generators and environments; MuJoCo's go on exactly where they are."""
        save_agent_and_replays(folder, self.agent, self.replays)
        kept = {
            "env_steps": self.env_steps,
            "generators": [generator.bit_generator.state for generator in self._generators],
            "observation": self._observation,
            "trajectory": self._trajectory,
            "environments": [mujoco_state(env) for env in self._environments.envs],
        }
        torch.save(kept, folder / "runs.pt")

    def load(self, folder: Path) -> None:
        """Reads what :meth:`save` wrote. Environments other than MuJoCo's begin a new episode."""
        self.replays = load_agent_and_replays(folder, self.agent, len(self.replays))
        kept = torch.load(folder / "runs.pt", weights_only=False)
        self.env_steps, self._trajectory = kept["env_steps"], kept["trajectory"]
        for generator, state in zip(self._generators, kept["generators"], strict=True):
            generator.bit_generator.state = state
        states = kept["environments"]
        if None in states:
            steps = self.env_steps
            self._observation, _ = self._environments.reset(seed=[steps + run for run in range(len(states))])
            self._trajectory += 1
            return
        self._observation = kept["observation"]
        for env, state in zip(self._environments.envs, states, strict=True):
            restore_mujoco_state(env, state)

    def _step(self) -> tuple[np.ndarray, ...]:
        observation = self._observation
        if self.env_steps < self._warmup_steps:
            shape = self._environments.single_action_space.shape
            drawn = [generator.uniform(-1.0, 1.0, (self._num_envs, *shape)) for generator in self._generators]
            action = np.concatenate(drawn, dtype=np.float32, casting="same_kind")
        else:
            rows = _floats(observation).view(len(self.replays), self._num_envs, -1)
            action = self.agent.act(rows, explore=True).flatten(0, 1).numpy()
        following, reward, terminated, truncated, infos = self._environments.step(action)
        done = terminated | truncated
        last = following.copy()
        if done.any():
            last[done] = np.stack(list(infos["final_obs"][done]))
        row = (observation, action, last, reward, terminated, truncated, self._trajectory.copy())
        self._trajectory += done
        self._observation = following
        return row

    def _in_order(self, column: Sequence[np.ndarray]) -> np.ndarray:
        """Returns steps of all environments as ``[R, N, ...]``, those of one time beside each other."""
        runs = len(self.replays)
        steps = np.stack(column, 1)
        steps = steps.reshape(runs, self._num_envs, *steps.shape[1:]).swapaxes(1, 2)
        return steps.reshape(runs, -1, *steps.shape[3:])

    def _learn(self) -> None:
        """Makes the updates of one draw; TD errors go back to replays that draw by them."""
        batches = [replay.sample() for replay in self.replays]
        rows = [self._dealt(batch.select(*_LEARNED, strict=False)) for batch in batches]
        td_errors = self._joined(self.agent.learn(torch.stack(rows)))
        for replay, batch, td_error in zip(self.replays, batches, td_errors, strict=True):
            if replay.awaits_priorities:
                replay.update_priority(batch, td_error)

    def _dealt(self, batch: TensorDict) -> TensorDict:
        """Deals the rows of a draw to its updates ``[updates, B]``."""
        return batch.view(self._updates_per_draw, -1)

    def _joined(self, td_errors: Tensor) -> Tensor:
        """Returns TD errors ``[R, updates, B]`` in the order of the draws, ``[R, updates * B]``."""
        return td_errors.flatten(1)

    def _store(self, columns: Sequence[np.ndarray]) -> None:
        """Stores steps ``[R, N]`` of all runs, each in its replay."""
        observation, action, following, reward, terminated, truncated, trajectory = columns
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        rows = TensorDict(
            {
                "observation": _floats(observation),
                "action": _floats(action),
                "next": {
                    "observation": _floats(following),
                    "reward": _floats(reward).unsqueeze(-1),
                    **{name: torch.from_numpy(flag).unsqueeze(-1) for name, flag in flags.items()},
                },
                "trajectory": torch.from_numpy(trajectory),
            },
            reward.shape,
        )
        for replay, steps in zip(self.replays, rows.unbind(0), strict=True):
            replay.extend(steps)

    def _make(self, count: int) -> SyncVectorEnv:
        """Environments with actions in [-1, 1]; those of one run in succession."""

        def build() -> gymnasium.Env:
            return RescaleAction(gymnasium.make(self._env, **self._env_kwargs), -1, 1)

        return SyncVectorEnv([build] * count, autoreset_mode=AutoresetMode.SAME_STEP)


class DealtRuns(StackedRuns):
    """Runs whose draws have the rows of one table after those of another: each update gets its share of every table."""

    def _dealt(self, batch: TensorDict) -> TensorDict:
        return batch.view(-1, self._updates_per_draw).transpose(0, 1)

    def _joined(self, td_errors: Tensor) -> Tensor:
        return td_errors.transpose(1, 2).flatten(1)


def mujoco_state(env: gymnasium.Env) -> dict[str, Any] | None:
    """Returns all that decides how a MuJoCo environment goes on, or ``None`` for another environment."""
    if not isinstance(env.unwrapped, MujocoEnv):
        return None
    import mujoco

    model, data = env.unwrapped.model, env.unwrapped.data
    physics = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
    mujoco.mj_getState(model, data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
    elapsed, random = env.get_wrapper_attr("_elapsed_steps"), env.unwrapped.np_random.bit_generator.state
    return {"physics": physics, "elapsed": elapsed, "random": random}


def restore_mujoco_state(env: gymnasium.Env, state: dict[str, Any]) -> None:
    """Puts a MuJoCo environment into a state of :func:`mujoco_state`."""
    import mujoco

    env.reset()
    model, data = env.unwrapped.model, env.unwrapped.data
    mujoco.mj_setState(model, data, state["physics"], mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_forward(model, data)  # derived quantities, which some rewards read
    mujoco.mj_setState(model, data, state["physics"], mujoco.mjtState.mjSTATE_INTEGRATION)
    env.set_wrapper_attr("_elapsed_steps", state["elapsed"])
    env.unwrapped.np_random.bit_generator.state = state["random"]


def quiet_mujoco() -> None:
    """Silences a deprecation in Gymnasium's model files, which MuJoCo prints for every environment."""
    import mujoco

    mujoco.set_mju_user_warning(lambda text: None if "settotalmass" in text else print(text, file=sys.stderr))


def _floats(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))
