# SPDX-License-Identifier: Apache-2.0
"""Transitions of a vector environment, for your training loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Dict, Tuple
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from torch import Tensor

from lightning_replay.options import check_kind, checked_count
from lightning_replay.training_replay import TrainingReplay

__all__ = ["VectorSteps"]

Key = str | tuple[str, ...]
Columns = dict[Key, np.ndarray]


class VectorSteps(VectorWrapper):
    """A vector of environments whose steps become rows of a replay, in every autoreset mode.

    Call :meth:`reset` and :meth:`step` as those of the vector, whose results they return unchanged, and :meth:`store`
    after each step. Rows have the observation that followed within the episode, also at its end, and ``trajectory``,
    the number of the episode. Everything is copied, so that vectors and agents may reuse their arrays. In
    ``AutoresetMode.DISABLED`` call ``reset(options={"reset_mask": terminated | truncated})`` after an end; the modes,
    and environments that return the same array at each step: docs/own-loop.md.

    Args:
        env: the vector, such as ``gymnasium.make_vec("CartPole-v1", num_envs=8)``.
        first_trajectory: number of the first episode; the others count on from there.
        autoreset_mode: of a vector whose ``metadata`` do not name it.

    Attributes:
        columns: transitions of the last step by key, arrays ``[N, ...]`` in the order of the environments, for
            :meth:`Replay.extend_columns <lightning_replay.Replay.extend_columns>`: observation, action, trajectory
            int64 ``[N]``; ``("next", ...)`` observation, reward, terminated, truncated, done, the last four ``[N, 1]``.
            Floats are float32, other dtypes as they come; parts of Dict and Tuple spaces are nested columns. There are
            none after a reset, and no rows after a step in which all environments were reset.
        is_transition: bool ``[num_envs]``, the environments of these rows.
        next_trajectory: number of the next episode that begins.

    Raises:
        TypeError: something else than a vector of environments.
        ValueError: a vector that does not name its autoreset mode; in a step a vector that resets in the same step
            and gives no ``final_obs``.

    Example:
        >>> from lightning_replay import recipes
        >>> replay = recipes.uniform(capacity=1_000, batch_size=32, seed=0)
        >>> envs = VectorSteps(gymnasium.make_vec("CartPole-v1", num_envs=4))
        >>> observations, _ = envs.reset(seed=0)
        >>> for _ in range(50):
        ...     observations, rewards, terminated, truncated, infos = envs.step(np.array([0, 1, 0, 1]))
        ...     slots = envs.store(replay)
        >>> int(replay[:]["next", "done"].sum()), len(replay)  # 17 of 200 were resets
        (18, 183)
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        *,
        first_trajectory: int = 0,
        autoreset_mode: AutoresetMode | None = None,
    ) -> None:
        accepted = 'a vector of environments, such as gymnasium.make_vec("CartPole-v1", num_envs=1)'
        check_kind("env", env, VectorEnv, accepted)
        check_kind("autoreset_mode", autoreset_mode, AutoresetMode | None, "a gymnasium.vector.AutoresetMode, or None")
        super().__init__(env)
        self.next_trajectory: int = checked_count("first_trajectory", first_trajectory, 0)
        self._mode = autoreset_mode or _mode_of(env)
        self._everywhere = np.ones(env.num_envs, dtype=np.bool_)
        self._acts_in_parts = isinstance(env.single_action_space, Dict | Tuple)
        self._keys: list[tuple[Key, Key]] = []  # Keys of each observation array in the row and under "next".
        self._observation: list[np.ndarray] = []
        self._trajectory = np.full(env.num_envs, -1)
        self._is_reset_due = ~self._everywhere  # The vector resets these environments in the next step.
        self.columns: Columns = {}
        self.is_transition: np.ndarray = ~self._everywhere

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode in each environment, or in those of ``options["reset_mask"]``."""
        mask = (options or {}).get("reset_mask")  # Gymnasium's vectors remove it from the options
        began = self._everywhere if mask is None else np.asarray(mask).copy()
        # Gymnasium's vectors take a list of seeds; their base class declares a number.
        observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        self._keys = [(_key("observation", path), ("next", "observation", *path)) for path, _ in _leaves(observations)]
        self._observation = [_owned_array(part) for part in _arrays(observations)]
        self._is_reset_due = self._is_reset_due & ~began
        self._number(np.flatnonzero(began))
        self.columns = {}
        self.is_transition = ~self._everywhere
        return observations, infos

    def step(  # type: ignore[override]  # Gymnasium's wrapper returns type variables that nothing binds
        self, actions: Any
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Takes a step, whose transitions are in ``columns``."""
        if not self._keys:
            raise gymnasium.error.ResetNeeded("VectorSteps has no observation to step from; call its reset() first")
        if self._acts_in_parts:
            columns: Columns = {_key("action", path): _owned_array(part) for path, part in _leaves(actions)}
        else:
            columns = {"action": _owned_array(actions)}
        results = observations, reward, terminated, truncated, infos = self.env.step(actions)
        # Columns of their own: a vector may return the same arrays at each step.
        rewards = np.asarray(reward).astype(np.float32)
        is_terminated = np.asarray(terminated).copy()
        is_truncated = np.asarray(truncated).copy()
        shapes = [rewards.shape, is_terminated.shape, is_truncated.shape]
        if shapes.count(self._everywhere.shape) < len(shapes):
            raise ValueError(
                f"{self.env} returned rewards, terminated and truncated of the shapes {shapes}; a vector returns one "
                f"of each for each of its environments, {list(self._everywhere.shape)}. Nothing was stored"
            )
        following = [_owned_array(part) for part in _arrays(observations)]
        done = np.logical_or(is_terminated, is_truncated)
        ended = np.flatnonzero(done).tolist() if np.count_nonzero(done) else []
        last = following
        if ended and self._mode is AutoresetMode.SAME_STEP:
            last = self._last_observation(following, infos, ended)
        for (key, next_key), before, after in zip(self._keys, self._observation, last, strict=True):
            columns[key] = before
            columns[next_key] = after
        columns |= {
            "trajectory": self._trajectory.copy(),
            ("next", "reward"): rewards[:, None],
            ("next", "terminated"): is_terminated[:, None],
            ("next", "truncated"): is_truncated[:, None],
            ("next", "done"): done[:, None],
        }
        self._observation = following
        self.is_transition = self._everywhere
        if self._mode is AutoresetMode.NEXT_STEP:
            self.is_transition = ~self._is_reset_due
            if np.count_nonzero(self._is_reset_due):
                columns = {key: column[self.is_transition] for key, column in columns.items()}
            self._is_reset_due = done
        self.columns = columns
        if ended and self._mode is not AutoresetMode.DISABLED:
            self._number(ended)
        return results

    def store(self, replay: TrainingReplay, **columns: Any) -> Tensor:
        """Stores the transitions of the last step; call it once after each step.

        Args:
            replay: a :class:`~lightning_replay.Replay`, or a sharded one.
            columns: further ones by name, arrays or tensors ``[num_envs, ...]``, of which the rows of
                ``is_transition`` are stored.

        Returns:
            int64, the slots; none if all environments were reset in the step.

        Raises:
            TypeError, ValueError: as ``extend_columns`` of the replay.
        """
        if not self.is_transition.any():
            return torch.empty(0, dtype=torch.int64, device="cpu")
        more = {name: np.asarray(column)[self.is_transition] for name, column in columns.items()}
        return replay.extend_columns(self.columns | more)

    def _number(self, began: Iterable[int]) -> None:
        for i in began:
            self._trajectory[i] = self.next_trajectory
            self.next_trajectory += 1

    def _last_observation(
        self, following: list[np.ndarray], infos: dict[str, Any], ended: list[int]
    ) -> list[np.ndarray]:
        # Where an episode ended, the environment has returned the first observation of the next one.
        final: Any = infos.get("final_obs")
        is_each = isinstance(final, np.ndarray) and final.dtype == object  # else arrays as those of the observations
        if final is None or (is_each and any(final[i] is None for i in ended)):
            raise ValueError(
                f"an episode of {self.env} ended, and infos['final_obs'] has no last observation of it: {final!r}. "
                "AutoresetMode.SAME_STEP gives one; use another mode, or put VectorSteps inside the wrapper that "
                "removes it"
            )
        whole = {} if is_each else dict(_leaves(final))
        last = [column.copy() for column in following]
        for i in ended:  # faster than stacking them
            parts = dict(_leaves(final[i])) if is_each else {path: part[i] for path, part in whole.items()}
            # The path is compared, because an environment may order the entries in another way than the vector.
            for column, (_, next_key) in zip(last, self._keys, strict=True):
                column[i] = parts[tuple(next_key[2:])]
        return last


def _mode_of(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode")
    if env.metadata is env.unwrapped.metadata:
        # All vectors of one environment class share the metadata, which holds the mode of the one built last.
        mode = getattr(env.unwrapped, "autoreset_mode", mode)
    if not isinstance(mode, AutoresetMode):
        raise ValueError(
            f"the metadata of {env} have the autoreset_mode {mode!r}; it must be a gymnasium.vector.AutoresetMode. "
            "Give VectorSteps the one it follows, autoreset_mode=AutoresetMode.NEXT_STEP, SAME_STEP or DISABLED"
        )
    return mode


def _key(name: str, path: tuple[str, ...]) -> Key:
    return (name, *path) if path else name


def _arrays(value: object) -> list[np.ndarray]:
    return [value] if type(value) is np.ndarray else [np.asarray(part) for _, part in _leaves(value)]


def _owned_array(array: object) -> np.ndarray:
    """Returns a copy as it is stored: floats as float32."""
    if type(array) is not np.ndarray:
        array = np.asarray(array)
    return array.astype(np.float32) if array.dtype.kind == "f" else array.copy()


def _leaves(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the arrays of a value of a space, each with its path."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(part, (*path, str(name)))
    elif isinstance(value, tuple):
        for place, part in enumerate(value):
            yield from _leaves(part, (*path, str(place)))
    else:
        yield path, value
