# SPDX-License-Identifier: Apache-2.0
"""Simulators that step many environments in one tensor: collection and evaluation without NumPy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pydoc import locate
from typing import Any, Protocol

import gymnasium
import lightning as L
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, Space
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from torch import Tensor

from lightning_replay.agents.agent import SizedAgent
from lightning_replay.agents.spaces import spaces_of_sizes
from lightning_replay.collecting import VectorSteps
from lightning_replay.envs.building import bounds_of, build
from lightning_replay.lit.collection import Collection, Episode, InformationColumns
from lightning_replay.lit.rollouts import Successes, act_on, acting, drawing_from, refusal_of, states_of
from lightning_replay.simulators import MEMBERS, SimulatorVector

_STEPS_PER_READ = 64  # Episodes that ended are read from the device once in so many steps.


class Simulator(Protocol):
    """Steps ``num_envs`` environments in one tensor, see :class:`~lightning_replay.collecting.VectorSteps`."""

    num_envs: int

    def reset(self) -> Any:
        """Returns the first observations, tensors ``[num_envs, ...]``, and infos."""

    def step(self, action: Any, /) -> Any:
        """Returns observation, reward, terminated, truncated, and infos."""


def is_simulator(env: object) -> bool:
    """Returns whether ``env`` is an object with ``num_envs``, ``reset``, and ``step``, and not Gymnasium's vector."""
    if isinstance(env, type | SyncVectorEnv | AsyncVectorEnv):
        return False
    base = getattr(env, "unwrapped", env)  # Wrappers of Gymnasium do not pass on attributes.
    # One environment of Gymnasium may have a number of this name, and has no such space.
    is_batched = not isinstance(env, gymnasium.Env) or hasattr(base, "single_observation_space")
    return is_batched and all(hasattr(base, name) for name in MEMBERS)


def simulator_class(path: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a function that builds a simulator, from its ``class_path`` and ``init_args`` in a file."""
    named: Any = locate(str(path.get("class_path")))
    if not callable(named) or not path.keys() <= {"class_path", "init_args"}:
        raise ValueError(
            f"env is {dict(path)}; of a simulator give class_path, a class such as "
            "lightning_replay.envs.pendulums.Pendulums, and its init_args. env_kwargs override these"
        )
    return partial(named, **dict(path.get("init_args") or {}))


def simulator_spaces(simulator: SimulatorVector, agent: object) -> tuple[Any, Box | Discrete[Any]]:
    """Returns the spaces of one environment. Spaces that a simulator lacks come from its tensors and the agent."""
    observation = getattr(simulator, "single_observation_space", None)
    if not isinstance(observation, Space):
        observation = _space_of(simulator.reset()[0])
    own = action = getattr(simulator, "single_action_space", None)
    is_open = own is None or (isinstance(own, Box) and not own.is_bounded("both"))
    if is_open and isinstance(agent, SizedAgent):  # Such simulators leave the bounds to the agent.
        action = spaces_of_sizes(agent.hparams)[1]
    if not isinstance(action, Box | Discrete) or (action is own and is_open):
        raise ValueError(
            f"simulator {simulator} has the single_action_space {own}; it must be a bounded Box, or Discrete. If it "
            "has no bounds, give the agent bounds, such as TD3(action_low=[-1.0] * 29, action_high=[1.0] * 29)"
        )
    return observation, action


def _space_of(observation: Any) -> Space[Any]:
    if isinstance(observation, Mapping):
        return Dict({str(name): _space_of(part) for name, part in observation.items()})
    return Box(-math.inf, math.inf, tuple(observation.shape[1:]))


class Simulators:
    """The simulators of a run, for training and evaluations. A given instance is the only one, and stays open."""

    action_space: Box | Discrete[Any]

    def __init__(
        self,
        env: Any,
        built: Any,
        env_kwargs: dict[str, Any],
        evaluation_env_kwargs: dict[str, Any],
        observation_columns: dict[str, str] | None,
        agent: L.LightningModule | None,
    ) -> None:
        self.is_single: bool = built is env
        self._env = env
        self._env_kwargs = {False: env_kwargs, True: evaluation_env_kwargs}
        self._open = {False: SimulatorVector(built)}
        self._columns = observation_columns or {}
        space, self.action_space = simulator_spaces(self._open[False], agent)
        entries = [*space] if isinstance(space, Dict) else []
        lacking = [name for name in self._columns.values() if name not in entries]
        if lacking:
            raise ValueError(
                f"observation_columns names the entries {lacking}, and observations of the simulator have {entries}. "
                "Name entries of a dictionary of observations, or leave observation_columns out"
            )
        self.observation_space: Space[Any] = self.seen(space)
        self.column_spaces: dict[str, Space[Any]] = {column: space[name] for column, name in self._columns.items()}

    def get(self, for_evaluation: bool = False) -> SimulatorVector:
        """Returns a simulator, which is built when it is first needed."""
        key = for_evaluation and not self.is_single
        if key not in self._open:
            self._open[key] = SimulatorVector(build(self._env, self._env_kwargs[key]))
        return self._open[key]

    def seen(self, observation: Any) -> Any:
        """Returns the part of an observation that agents act on."""
        return observation[self._columns["observation"]] if self._columns else observation

    def close(self) -> None:
        """Closes the simulators that were built here."""
        if not self.is_single:
            for simulator in self._open.values():
                simulator.close()
            self._open.clear()


class TensorActions:
    """Reads and draws actions ``[N, ...]``, tensors on the device of the observations."""

    def __init__(self, space: Box | Discrete[Any], device: torch.device) -> None:
        self._space, self._device = space, device
        self._dtype = torch.float32 if isinstance(space, Box) else torch.int64
        low, high = bounds_of(space)
        self._low = torch.as_tensor(low, dtype=self._dtype, device=device)
        self._range = torch.as_tensor(high - low + isinstance(space, Discrete), dtype=torch.float32, device=device)

    def __call__(self, returned: object, count: int, source: str) -> Tensor:
        """Returns actions that ``source``, a method, returned for ``count`` observations. Their values are not read."""
        if not isinstance(returned, Tensor):
            raise TypeError(refusal_of(returned, self._space, count, source))
        if returned.shape != (count, *self._low.shape):
            raise ValueError(refusal_of(returned, self._space, count, source))
        return returned.detach().to(self._device, self._dtype)

    def random(self, count: int, seed: int) -> Tensor:
        """Draws actions from a generator on the device."""
        generator = torch.Generator(self._device).manual_seed(seed)
        share = torch.rand((count, *self._low.shape), generator=generator, device=self._device)
        return self._low + (share * self._range).to(self._dtype)


class TensorInformation(InformationColumns):
    """Reads some keys of a simulator's infos, tensors ``[N]``, as float32 ``[N]``, 0 in steps without the key."""

    def read(self, infos: dict[str, Any], done: Tensor) -> dict[str, Tensor]:
        """Returns a column ``[N]`` for each key. If there is a ``final_info``, it holds infos of last steps."""
        sources = (infos, ~done), (infos.get("final_info", infos), done)
        self._offered |= {key for source, _ in sources for key in source}
        columns = {key: torch.zeros(done.shape, device=done.device) for key in self.keys}
        for key in self.keys:
            for source, where in sources:
                if key in source:
                    self.missing.discard(key)
                    columns[key] = torch.where(where, _figures(key, source[key], done.shape), columns[key])
        return columns


def _figures(key: str, values: Any, shape: torch.Size) -> Tensor:
    if not isinstance(values, Tensor) or values.numel() != shape.numel():
        given = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"info {key!r} of the simulator is {given}; info_keys takes tensors with one number or flag per "
            f"environment, {list(shape)}. Leave it out, or put such a tensor into the info"
        )
    return values.reshape(shape).float()


class SimulatorCollection(Collection):
    """Fills a replay from a simulator by tensors, which stay on its device.

    The device is waited for once in 64 steps, for the returns of the episodes that ended.

    Args:
        simulators: Simulators of the run.
        options: Options of :class:`~lightning_replay.collecting.VectorSteps`.
        collection: Collection that has not begun, whose place this one takes.
    """

    recent_episodes = 100
    rows_per_write = 0  # The columns of a step are stored before the next step replaces them.

    def __init__(self, simulators: Simulators, options: dict[str, Any], collection: Collection) -> None:
        vars(self).update(vars(collection))  # replay, share, clocks, and generator
        self._environments = simulators.get
        self._information = TensorInformation(self._information.keys)
        self._simulators = simulators
        self._options = options
        self._skipped = 0  # rows that earlier vectors left out
        self._unread: list[tuple[int, Tensor]] = []  # clock, and return, length, and end of each environment

    @property
    def num_skipped(self) -> int:
        """Number of rows that were left out by ``skip_invalid`` or ``without_final_observation``."""
        return self._skipped + (0 if self._vector is None else self._vector.num_skipped)

    def _start(self, agent: Any) -> VectorSteps:
        simulator = self._environments()
        self._num_envs = simulator.num_envs
        self._states = states_of(agent, self._num_envs)
        self._begin_episodes(self._num_envs)
        vector = VectorSteps(simulator, first_trajectory=self._next_trajectory, **self._options)
        observation, _ = vector.reset(seed=int(self._generator.integers(2**31)))
        self._observation = self._simulators.seen(observation)
        device = _device_of(self._observation)
        self._read_actions = TensorActions(self._simulators.action_space, device)
        self._totals = torch.zeros(2, self._num_envs, device=device)  # return and length of each running episode
        self._vector = vector
        return vector

    def _random_actions(self) -> Tensor:
        # The seed comes from the generator that a checkpoint holds. Seeding waits for no device.
        return self._read_actions.random(self._num_envs, int(self._generator.integers(2**63)))

    def _step(self, vector: VectorSteps, action: Any) -> None:
        observation, reward, terminated, truncated, infos = vector.step(action)
        self._observation = self._simulators.seen(observation)
        done = self._done = torch.logical_or(terminated, truncated)
        self._further: dict[Any, Tensor] = {
            ("next", key): column[:, None] for key, column in self._information.read(infos, done).items()
        }
        if self._states is not None:
            self._further["recurrent_state"] = self._states.current
            self._states.advance(done)
        self._count_ends(reward, done)

    def _store(self) -> None:
        assert self._vector is not None
        row = self._vector.columns
        kept = slice(None) if len(row["trajectory"]) == self._num_envs else self._vector.is_transition
        row |= {key: column[kept] for key, column in self._further.items()}
        if self._has_single_stream:
            del row["trajectory"]
        self._vector.store(self._replay)
        self._stored_steps = self.env_steps

    def _count_ends(self, reward: Tensor, done: Tensor) -> None:
        self._totals += torch.stack([reward.reshape(-1), torch.ones_like(done)])
        self._unread.append((self.env_steps, torch.cat([self._totals, done[None]])))
        self._totals.masked_fill_(done, 0.0)
        if len(self._unread) == _STEPS_PER_READ or self.env_steps >= self._last_step:
            self._read_ends()

    def _read_ends(self) -> None:
        clocks = [clock for clock, _ in self._unread]
        returned, lengths, done = torch.stack([figures for _, figures in self._unread], 1).cpu().numpy()
        self._unread.clear()
        self.episodes.extend(
            Episode(clocks[step], float(returned[step, i]), int(lengths[step, i]))
            for step, i in np.argwhere(done * np.isfinite(returned)).tolist()
        )

    def close(self) -> None:
        """Interrupts the episodes. The simulator stays open."""
        if self._vector is not None:
            self._unread.clear()
            self._skipped = self.num_skipped
            self._interrupt(self._vector)
            self._vector = None


def _device_of(observation: Any) -> torch.device:
    if isinstance(observation, Mapping):
        return _device_of(next(iter(observation.values())))
    if not isinstance(observation, Tensor):
        raise TypeError(
            f"the simulator returned observations of {type(observation).__name__}; env of ReplayDataModule may be a "
            "simulator whose values are tensors. Convert them, or give an id or a function that builds one environment"
        )
    return observation.device


def simulator_returns(
    agent: L.LightningModule,
    simulators: Simulators,
    episodes: int,
    seed: int,
    max_episode_steps: int,
    before_step: Callable[[], None],
    successes: Successes | None = None,
) -> Generator[float, None, None]:
    """Plays episodes in all environments at once, without exploration, and yields the returns of ``episodes`` of them.

    Of each environment, its share of the episodes counts, from the first one on. So short episodes are not preferred.
    ``successes`` gets the flags of the same episodes.
    """
    policy: Any = agent
    simulator = simulators.get(for_evaluation=True)
    with acting(policy), drawing_from(seed, policy):
        observation, _ = simulator.reset(seed=seed)
        device = _device_of(observation)
        count = simulator.num_envs
        read = TensorActions(simulators.action_space, device)
        states = states_of(agent, count)
        place = torch.arange(count, device=device)  # number of each running episode, over all environments
        total = torch.zeros(count, device=device)
        returns = torch.full((episodes + 1,), math.nan, device=device)  # The last entry takes what does not count.
        flags = returns.clone()
        for _ in range(max_episode_steps * math.ceil(episodes / count)):
            before_step()
            action = act_on(policy, simulators.seen(observation), False, read, states)
            observation, reward, terminated, truncated, infos = simulator.step(action)
            done = torch.logical_or(terminated, truncated)
            total += reward.reshape(-1)
            ended = torch.where(done, place, episodes).clamp_(max=episodes)
            returns[ended] = total
            if successes is not None:
                flags[ended] = successes.read(total, infos.get("final_info", infos))
            total.masked_fill_(done, 0.0)
            place += count * done
            if states is not None:
                states.advance(done)
            if bool((place >= episodes).all()):
                break
        else:
            warnings.warn(
                f"evaluation episodes in {simulator} had not ended after {max_episode_steps:,} steps; they count up to "
                "there. Limit episodes in the simulator, or raise max_episode_steps of Evaluate",
                stacklevel=2,
            )
            returns[place.clamp(max=episodes)] = total
    is_played = ~returns[:episodes].isnan()
    if successes is not None:
        successes.flags += flags[:episodes][is_played].tolist()
    yield from returns[:episodes][is_played].tolist()
