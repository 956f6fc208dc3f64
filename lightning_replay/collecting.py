# SPDX-License-Identifier: Apache-2.0
"""Transitions of a vector of environments, for your training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Dict, Tuple
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from torch import Tensor

from lightning_replay.options import check_kind, checked_choice, checked_count, checked_flag
from lightning_replay.simulators import SimulatorVector
from lightning_replay.training_replay import TrainingReplay

__all__ = ["VectorSteps"]

Path = tuple[str, ...]
Key = str | Path
Columns = dict[Key, Any]  # arrays or tensors [N, ...]
FinalObservation = str | Sequence[str] | Callable[[Any, Any], Any]
_FINAL_OBSERVATIONS = ("final_obs", "final_observation")  # names that are known without an option
WITHOUT_FINAL_OBSERVATION = ("terminate", "drop")


class VectorSteps(VectorWrapper):
    """A vector of environments whose steps become rows of a replay, in every autoreset mode.

    Call :meth:`reset` and :meth:`step` as those of the vector, whose results they return unchanged, and :meth:`store`
    after each step. Rows have the observation that followed within the episode, also at its end, and ``trajectory``,
    the number of the episode. Everything is copied, so that vectors and agents may reuse their arrays. In
    ``AutoresetMode.DISABLED`` call ``reset(options={"reset_mask": terminated | truncated})`` after an end; the modes,
    and environments that return the same array at each step: docs/own-loop.md.

    A simulator with ``num_envs``, ``reset``, and ``step`` is accepted as it is, and its tensors stay on their device:
    docs/simulators.md. A step waits for the device only if an option below says so.

    Args:
        env: Vector, such as ``gymnasium.make_vec("CartPole-v1", num_envs=8)``, or a simulator, such as
            :class:`~lightning_replay.envs.pendulums.Pendulums`.
        first_trajectory: Number of the first episode; the others count on from there.
        autoreset_mode: Mode of a vector whose ``metadata`` do not name it. A simulator without one resets its
            environments in the step that ends their episodes, ``AutoresetMode.SAME_STEP``.
        observation_columns: Entry of the observations by the name of its column, such as
            ``{"observation": "policy", "critic_observation": "critic"}``. Other entries are left out.
        final_observation: Place of the last observations of ended episodes: a key of ``infos``, several for nested
            ones, or a function of observations and ``infos``. By default ``final_obs`` or ``final_observation``.
        without_final_observation: Treatment of ends whose last observation the simulator does not give.
            ``"terminate"`` marks a truncated row as terminated, so that no value is bootstrapped from the next episode.
            ``"drop"`` leaves truncated rows out, and reads the device once in each step. Terminated rows stay. In place
            of the missing observation such rows repeat their own. By default the first such end is an error.
        skip_invalid: Whether rows with NaN or infinity are left out, and the episode is cut there; reads the device
            once in each step.

    Attributes:
        columns: transitions of the last step by key, arrays or tensors ``[N, ...]`` in the order of the environments,
            for :meth:`Replay.extend_columns <lightning_replay.Replay.extend_columns>`: observation, action, trajectory
            int64 ``[N]``; ``("next", ...)`` observation, reward, terminated, truncated, done, the last four ``[N, 1]``.
            Floats are float32, other dtypes as they come; parts of Dict and Tuple spaces are nested columns. There are
            none after a reset, and no rows after a step in which all environments were reset.
        is_transition: bool ``[num_envs]``, the environments of these rows.
        num_skipped: Rows that were left out so far.
        cut_episodes: Numbers of the episodes that the last step cut, because their row was left out. :meth:`store`
            ends them in the replay.

    Raises:
        TypeError: something else than a vector of environments or a simulator.
        ValueError: a vector that does not name its autoreset mode; in a step a missing last observation, tensors of two
            devices, or another number of environments. Nothing is stored then.

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
        env: Any,
        *,
        first_trajectory: int = 0,
        autoreset_mode: AutoresetMode | None = None,
        observation_columns: Mapping[str, str] | None = None,
        final_observation: FinalObservation | None = None,
        without_final_observation: str | None = None,
        skip_invalid: bool = False,
    ) -> None:
        vector = env if isinstance(env, VectorEnv) else SimulatorVector(env)
        check_kind("autoreset_mode", autoreset_mode, AutoresetMode | None, "a gymnasium.vector.AutoresetMode, or None")
        super().__init__(vector)
        self._next: Any = checked_count("first_trajectory", first_trajectory, 0)
        self.num_skipped: int = 0
        self.cut_episodes: list[int] = []
        self._mode = autoreset_mode or _mode_of(vector)
        self._observation_columns = None if observation_columns is None else dict(observation_columns)
        self._final_observation = final_observation
        self._without_final = without_final_observation
        if without_final_observation is not None:
            checked_choice("without_final_observation", without_final_observation, WITHOUT_FINAL_OBSERVATION)
        self._skips_invalid = checked_flag("skip_invalid", skip_invalid)
        self._acts_in_parts = isinstance(getattr(vector, "single_action_space", None), Dict | Tuple)
        self._device: torch.device | None = None  # of the tensors; None for arrays
        self._everywhere: Any = np.ones(vector.num_envs, dtype=np.bool_)
        self._trajectory: Any = np.full(vector.num_envs, -1)
        self._nowhere: Any = ~self._everywhere
        self._is_reset_due: Any = self._nowhere  # The vector resets these environments in the next step.
        self._is_running: Any = self._nowhere  # The newest rows of these environments did not end their episodes.
        self._paths: list[Path] = []  # names of the parts of an observation, as columns of the row
        self._observation: list[Any] = []
        self.columns: Columns = {}
        self.is_transition: Any = self._nowhere

    @property
    def next_trajectory(self) -> int:
        """Number of the next episode that begins; a read waits for the device."""
        return int(self._next)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode in each environment, or in those of ``options["reset_mask"]``."""
        mask = (options or {}).get("reset_mask")  # Gymnasium's vectors remove it from the options
        # Gymnasium's vectors take a list of seeds; their base class declares a number.
        observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        named = dict(_leaves(self._named(observations)))
        device = next((part.device for part in named.values() if isinstance(part, Tensor)), None)
        if device is not None and device != self._device:
            self._move(device)
        self._paths = list(named)
        self._observation = self._parts(observations, "observations")
        began = self._everywhere if mask is None else self._flags("reset_mask", mask)
        self._is_reset_due = self._is_reset_due & ~began
        self._is_running = self._is_running & ~began
        self._number(began)
        self.columns = {}
        self.cut_episodes = []
        self.is_transition = self._nowhere
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Takes a step, whose transitions are in ``columns``."""
        if not self._paths:
            raise gymnasium.error.ResetNeeded("VectorSteps has no observation to step from; call its reset() first")
        if self._acts_in_parts or isinstance(actions, Mapping):
            columns: Columns = {_key("action", path): self._owned("action", part) for path, part in _leaves(actions)}
        else:
            columns = {"action": self._owned("action", actions)}
        results = observations, reward, terminated, truncated, infos = self.env.step(actions)
        # Columns of their own: a vector may return the same arrays at each step.
        rewards = self._rewards(reward)
        is_terminated = self._flags("terminated", terminated)
        is_truncated = self._flags("truncated", truncated)
        shapes = [tuple(part.shape) for part in (rewards, is_terminated, is_truncated)]
        if shapes.count((self.num_envs,)) < len(shapes):
            raise ValueError(
                f"{self.env} returned rewards, terminated and truncated of the shapes {shapes}; a vector returns one "
                f"of each for each of its environments, {[self.num_envs]}. Nothing was stored"
            )
        following = self._parts(observations, "observations")
        done = is_terminated | is_truncated
        last, is_lost = following, self._nowhere
        if self._mode is AutoresetMode.SAME_STEP and self._may_be_any(done):
            final = self._final(observations, infos, following, done)
            if final is None and self._without_final is not None:
                # The observation of the row itself takes the place, because no other belongs to the episode.
                final = self._observation
                is_lost = is_truncated & ~is_terminated
                is_terminated = done
            if final is not None:
                last = [_chosen(done, one, other) for one, other in zip(final, following, strict=True)]
        for path, before, after in zip(self._paths, self._observation, last, strict=True):
            columns[_key(path[0], path[1:])] = before
            columns["next", *path] = after
        columns |= {
            "trajectory": _copy(self._trajectory),
            ("next", "reward"): rewards[:, None],
            ("next", "terminated"): is_terminated[:, None],
            ("next", "truncated"): is_truncated[:, None],
            ("next", "done"): done[:, None],
        }
        self._observation = following
        self.is_transition = self._everywhere
        began = done
        self.cut_episodes = []
        if self._mode is AutoresetMode.NEXT_STEP:
            self.is_transition = ~self._is_reset_due
            self._is_reset_due = done
        elif self._mode is AutoresetMode.DISABLED:
            began = self._nowhere
        if self._skips_invalid or self._without_final == "drop":
            left_out = self._left_out(columns, is_lost)
            began = began | left_out
            self.is_transition = self.is_transition & ~left_out
            self._is_running = self.is_transition & ~done
        # Tensors on a device are read only if rows may have been left out.
        if self.is_transition is not self._everywhere and not bool(self.is_transition.all()):
            columns = {key: column[self.is_transition] for key, column in columns.items()}
        self.columns = columns
        if self._may_be_any(began):
            self._number(began)
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
        rows = len(self.columns["trajectory"]) if self.columns else 0
        slots = torch.empty(0, dtype=torch.int64, device="cpu")
        if rows:
            more = {name: self._given(name, column) for name, column in columns.items()}
            if rows < self.num_envs:
                more = {name: column[self.is_transition] for name, column in more.items()}
            slots = replay.extend_columns(self.columns | more)
        if self.cut_episodes:
            replay.end_episodes(self.cut_episodes)
        return slots

    def _move(self, device: torch.device) -> None:
        # Numbers and flags follow the tensors of the simulator, so that no step waits for its device.
        self._device = device
        self._next = torch.as_tensor(self._next, device=device)
        self._trajectory = torch.as_tensor(self._trajectory, device=device)
        self._everywhere = torch.ones(self.num_envs, dtype=torch.bool, device=device)
        self._nowhere = ~self._everywhere
        self._is_reset_due = self._is_running = self._nowhere

    def _number(self, began: Any) -> None:
        numbers = self._next + began.cumsum(0)
        where: Any = np.where if self._device is None else torch.where
        self._trajectory = where(began, numbers - 1, self._trajectory)
        self._next = numbers[-1]

    def _may_be_any(self, flags: Any) -> bool:
        """Returns whether a flag may be true; flags on a device are not read."""
        if self._device is None:
            return bool(np.count_nonzero(flags))
        return self._device.type != "cpu" or bool(flags.any())

    def _left_out(self, columns: Columns, is_lost: Any) -> Any:
        """Returns which rows are left out, bool ``[num_envs]``, and counts them; the one read of the device."""
        if self._without_final != "drop":
            is_lost = self._nowhere
        invalid = self._nowhere
        if self._skips_invalid:
            for column in columns.values():
                invalid = invalid | ~_finite_rows(column)
        left_out = (invalid | is_lost) & self.is_transition
        num_left_out = int(left_out.sum())
        if num_left_out:
            self.num_skipped += num_left_out
            self.cut_episodes = self._trajectory[left_out & invalid & self._is_running].tolist()
        return left_out

    def _given(self, name: str, value: Any) -> Any:
        """Returns an array, or a tensor on the device of the simulator."""
        if self._device is None:
            return value if type(value) is np.ndarray else np.asarray(value)
        tensor: Tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
        if tensor.device != self._device:
            raise ValueError(
                f"{name} is on {tensor.device}, and the first observations were on {self._device}; all tensors of a "
                f"simulator must be on one device. Move {name} there. Nothing was stored"
            )
        return tensor

    def _owned(self, name: str, value: Any) -> Any:
        """Returns a copy as it is stored: floats as float32."""
        given = self._given(name, value)
        if self._device is None:
            return given.astype(np.float32) if given.dtype.kind == "f" else given.copy()
        return given.to(torch.float32, copy=True) if given.is_floating_point() else given.clone()

    def _flags(self, name: str, value: Any) -> Any:
        given = self._given(name, value)
        return given.astype(np.bool_) if self._device is None else given.to(torch.bool, copy=True)

    def _rewards(self, value: Any) -> Any:
        given = self._given("reward", value)
        return given.astype(np.float32) if self._device is None else given.to(torch.float32, copy=True)

    def _named(self, observations: Any) -> dict[str, Any]:
        """Returns the columns of observations by name."""
        if self._observation_columns is None:
            return {"observation": observations}
        lacking = [entry for entry in self._observation_columns.values() if entry not in observations]
        if lacking:
            raise ValueError(
                f"observation_columns names the entries {lacking}, and observations of {self.env} have "
                f"{list(observations)}; name entries that they have. Nothing was stored"
            )
        return {name: observations[entry] for name, entry in self._observation_columns.items()}

    def _parts(self, observations: Any, what: str) -> list[Any]:
        """Returns copies of the parts of observations, in the order of the columns."""
        leaves = dict(_leaves(self._named(observations)))
        if leaves.keys() != {*self._paths}:
            raise ValueError(
                f"{what} of {self.env} have the parts {[*leaves]}; the first observations had {self._paths}. Nothing "
                "was stored"
            )
        parts = [self._owned(what, leaves[path]) for path in self._paths]
        lengths = [len(part) for part in parts if part.ndim]
        if lengths != [self.num_envs] * len(parts):
            raise ValueError(
                f"{what} of {self.env} are of the shapes {[tuple(part.shape) for part in parts]}; they must have one "
                f"row for each of its {self.num_envs} environments. Nothing was stored"
            )
        return parts

    def _final(self, observations: Any, infos: Any, following: list[Any], done: Any) -> list[Any] | None:
        """Returns the last observations of episodes that ended, ``[num_envs, ...]``; ``None`` if they are missing."""
        final = self._found_final(observations, infos)
        if isinstance(final, np.ndarray) and final.dtype == object:
            ended = np.flatnonzero(done)
            if not any(final[i] is None for i in ended):
                return self._scattered(final, following, ended)
            final = None
        if final is not None:
            parts = self._parts(final, "final observations")
            shapes = [part.shape for part in parts], [part.shape for part in following]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"final observations of {self.env} are of the shapes {shapes[0]}, and observations of {shapes[1]}; "
                    "both must be [num_envs, ...]. Nothing was stored"
                )
            return parts
        if self._without_final is None and bool(done.any()):
            raise ValueError(
                f"an episode of {self.env} ended, and infos['final_obs'] has no last observation of it: {final!r}. "
                "AutoresetMode.SAME_STEP gives one; use another mode, or put VectorSteps inside the wrapper that "
                "removes it"
            )
        return None

    def _found_final(self, observations: Any, infos: Any) -> Any:
        wanted = self._final_observation
        if wanted is None:
            return next((infos[name] for name in _FINAL_OBSERVATIONS if name in infos), None)
        if callable(wanted):
            return wanted(observations, infos)
        found = infos
        for name in (wanted,) if isinstance(wanted, str) else wanted:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def _scattered(self, final: np.ndarray, following: list[np.ndarray], ended: np.ndarray) -> list[np.ndarray]:
        # Gymnasium gives an object for each environment, so that only these objects are read one by one.
        last = [column.copy() for column in following]
        leaves = [dict(_leaves(self._named(final[i]))) for i in ended]
        for path, column in zip(self._paths, last, strict=True):
            column[ended] = [parts[path] for parts in leaves]
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


def _key(name: str, path: Path) -> Key:
    return (name, *path) if path else name


def _copy(column: Any) -> Any:
    return column.clone() if isinstance(column, Tensor) else column.copy()


def _chosen(mask: Any, one: Any, other: Any) -> Any:
    """Returns the rows of one column where the mask is true, and of the other column elsewhere."""
    if isinstance(other, Tensor):
        return torch.where(mask.reshape(-1, *[1] * (other.ndim - 1)), one, other)
    chosen = other.copy()
    chosen[mask] = one[mask]
    return chosen


def _finite_rows(column: Any) -> Any:
    finite = column.isfinite() if isinstance(column, Tensor) else np.isfinite(column)
    return finite.reshape(len(column), -1).all(1)


def _leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the arrays of a value of a space, each with its path."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(part, (*path, str(name)))
    elif isinstance(value, tuple):
        for place, part in enumerate(value):
            yield from _leaves(part, (*path, str(place)))
    else:
        yield path, value
