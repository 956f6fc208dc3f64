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
from lightning_replay.step_columns import ArrayColumns, TensorColumns
from lightning_replay.training_replay import TrainingReplay

__all__ = ["VectorSteps"]

Path = tuple[str, ...]
Key = str | Path
Columns = dict[Key, Any]  # arrays or tensors [N, ...]
FinalObservation = str | Sequence[str] | Callable[[Any, Any], Any]
FINAL_OBSERVATIONS = ("final_obs", "final_observation")  #: Names in the infos of a vector, of Gymnasium 1 and 0.29.


def check_step_options(
    observation_columns: object, final_observation: object, without_final_observation: object, skip_invalid: object
) -> None:
    """Refuses options of :class:`VectorSteps` that are not of their kind."""
    entries = "a mapping such as {'observation': 'policy'}, or None"
    check_kind("observation_columns", observation_columns, Mapping | None, entries)
    place = "a key of infos, a sequence of keys for nested ones, a function of observations and infos, or None"
    check_kind("final_observation", final_observation, str | Sequence | Callable | None, place)
    if without_final_observation is not None:
        checked_choice("without_final_observation", without_final_observation, ["terminate", "drop"])
    checked_flag("skip_invalid", skip_invalid)


class VectorSteps(VectorWrapper):
    """A vector of environments whose steps become rows of a replay, in every autoreset mode.

    Call :meth:`reset` and :meth:`step` as you would on the vector, whose results they return unchanged, and
    :meth:`store` after each step. Rows have the observation that followed within the episode, also at its end, and
    ``trajectory``, the number of the episode. Everything is copied, so that vectors and agents may reuse their arrays.
    In ``AutoresetMode.DISABLED`` call ``reset(options={"reset_mask": terminated | truncated})`` after an end. The
    modes, and environments that return the same array at each step: docs/own-loop.md.

    A simulator with ``num_envs``, ``reset``, and ``step`` is accepted as it is, and its tensors stay on their device:
    docs/simulators.md. A step waits for the device only with options below that name a wait.

    Args:
        env: Vector, such as ``gymnasium.make_vec("CartPole-v1", num_envs=8)``, or a simulator, such as
            :class:`~lightning_replay.envs.pendulums.Pendulums`.
        first_trajectory: Number of the first episode. The numbers of later episodes count on from there.
        autoreset_mode: Mode of a vector whose ``metadata`` do not name it. A simulator without one resets its
            environments in the step that ends their episodes, ``AutoresetMode.SAME_STEP``. With
            ``AutoresetMode.NEXT_STEP``, each step of a simulator reads the device once.
        observation_columns: Entry of the observations by the name of its column, such as
            ``{"observation": "policy", "critic_observation": "critic"}``. Other entries are left out. By default, all
            entries are nested columns of ``observation``.
        final_observation: Place of the last observations of ended episodes: a key of ``infos``, several for nested
            ones, or a function of observations and ``infos``. By default ``final_obs`` or ``final_observation``.
        without_final_observation: Treatment of ends whose last observation the simulator does not give.
            ``"terminate"`` marks a truncated row as terminated, so that no value is bootstrapped from the next episode.
            ``"drop"`` leaves truncated rows out, and reads the device once in each step. Terminated rows stay. In place
            of the missing observation such rows repeat their own. A recipe that forms returns before it stores rows
            keeps the steps before a left-out row back until ``replay.end_episodes()``: prefer ``"terminate"`` there.
            By default the first such end is an error.
        skip_invalid: Whether rows with NaN or infinity are left out. The episode is cut there. With this option, each
            step reads the device once.

    Attributes:
        columns: transitions of the last step by key, arrays or tensors ``[N, ...]`` in the order of the environments,
            for :meth:`Replay.extend_columns <lightning_replay.Replay.extend_columns>`: observation, action, trajectory
            int64 ``[N]``; ``("next", ...)`` observation, reward, terminated, truncated, done, the last four ``[N, 1]``.
            Floats are float32, other dtypes as they come. Parts of Dict and Tuple spaces are nested columns. There are
            none after a reset, and no rows after a step in which all environments were reset.
        is_transition: bool ``[num_envs]``, the environments of these rows.
        num_skipped: Rows that were left out so far.
        cut_episodes: Numbers of the episodes that the last step cut, because their row was left out. :meth:`store`
            ends them in the replay.

    Raises:
        TypeError: something else than a vector of environments or a simulator.
        ValueError: a vector that does not name its autoreset mode, or in a step a missing last observation, tensors of
            two devices, or another number of environments. Nothing is stored then.

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
        check_step_options(observation_columns, final_observation, without_final_observation, skip_invalid)
        super().__init__(vector)
        self._next: Any = checked_count("first_trajectory", first_trajectory, 0)
        self.num_skipped: int = 0
        self.cut_episodes: list[int] = []
        self._mode = autoreset_mode or _mode_of(vector)
        self._observation_columns = observation_columns
        self._final_observation: Any = final_observation
        self._without_final = without_final_observation
        self._skips_invalid = skip_invalid
        self._acts_in_parts = isinstance(getattr(vector, "single_action_space", None), Dict | Tuple)
        self._kind: ArrayColumns = ArrayColumns(np.ones(vector.num_envs, dtype=np.bool_))
        self._trajectory: Any = np.full(vector.num_envs, -1)
        self._is_reset_due: Any = self._kind.nowhere  # The vector resets these environments in the next step.
        self._is_running: Any = self._kind.nowhere  # The newest rows of these environments did not end their episodes.
        # Keys of the parts of an observation in the row and under "next", by the names from the column on.
        self._keys: dict[Path, tuple[Key, Key]] = {}
        self._is_plain = False  # Observations have one part, and are that part.
        self._observation: list[Any] = []
        self.columns: Columns = {}
        self.is_transition: Any = self._kind.nowhere

    @property
    def next_trajectory(self) -> int:
        """Number of the next episode that begins. A read waits for the device."""
        return int(self._next)

    @next_trajectory.setter
    def next_trajectory(self, number: int) -> None:
        number = checked_count("next_trajectory", number, 0)
        self._next = torch.full_like(self._next, number) if isinstance(self._next, Tensor) else number

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode in each environment, or in the environments of ``options["reset_mask"]``."""
        mask = (options or {}).get("reset_mask")  # Gymnasium's vectors remove it from the options
        # Gymnasium's vectors take a list of seeds. Their base class declares a number.
        observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        if not self._keys:
            self._begin(dict(_leaves(self._named(observations))))
        self._observation = self._parts(observations, "observations")
        began = self._kind.everywhere if mask is None else self._kind.flags("reset_mask", mask)
        self._is_reset_due = self._is_reset_due & ~began
        self._is_running = self._is_running & ~began
        self._number(began)
        self.columns = {}
        self.cut_episodes = []
        self.is_transition = self._kind.nowhere
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Takes a step, whose transitions are in ``columns``."""
        if not self._keys:
            raise gymnasium.error.ResetNeeded("VectorSteps has no observation to step from; call its reset() first")
        kind = self._kind
        if self._acts_in_parts or isinstance(actions, dict):
            columns: Columns = {_key("action", path): kind.owned("action", part) for path, part in _leaves(actions)}
        else:
            columns = {"action": kind.owned("action", actions)}
        if any([column.shape[:1] != kind.everywhere.shape for column in columns.values()]):
            raise ValueError(
                f"actions are of the shapes {[tuple(column.shape) for column in columns.values()]}; they must have one "
                f"row for each of the {self.num_envs} environments of {self.env}. No step was taken"
            )
        results = observations, reward, terminated, truncated, infos = self.env.step(actions)
        # Separate columns: a vector may return the same arrays at each step.
        rewards = kind.numbers("reward", reward)
        is_terminated = kind.flags("terminated", terminated)
        is_truncated = kind.flags("truncated", truncated)
        shapes = [rewards.shape, is_terminated.shape, is_truncated.shape]
        if shapes.count(kind.everywhere.shape) < len(shapes):
            raise ValueError(
                f"{self.env} returned rewards, terminated and truncated of the shapes {[*map(tuple, shapes)]}; a "
                f"vector returns one of each for each of its environments, {[self.num_envs]}. Nothing was stored"
            )
        following = self._parts(observations, "observations")
        done = is_terminated | is_truncated
        may_have_ended = kind.may_be_any(done)
        is_lost = kind.nowhere
        last: Any = following
        if may_have_ended and self._mode is AutoresetMode.SAME_STEP:
            last = self._last(observations, infos, following, done)
            if last is None:  # The observation of the row repeats, because no other belongs to the episode.
                last = self._merged(done, self._observation, following)
                is_lost = is_truncated & ~is_terminated
                is_terminated = done
        for (key, next_key), before, after in zip(self._keys.values(), self._observation, last, strict=True):
            columns[key] = before
            columns[next_key] = after
        # A dictionary of these columns would take 0.3 µs more.
        columns["trajectory"] = kind.owned("trajectory", self._trajectory)
        columns["next", "reward"] = rewards[:, None]
        columns["next", "terminated"] = is_terminated[:, None]
        columns["next", "truncated"] = is_truncated[:, None]
        columns["next", "done"] = done[:, None]
        self._observation = following
        self.is_transition = kind.everywhere
        self.cut_episodes = []
        began = done
        if self._mode is AutoresetMode.NEXT_STEP:
            if kind.may_be_any(self._is_reset_due):
                self.is_transition = ~self._is_reset_due
            self._is_reset_due = done
        elif self._mode is AutoresetMode.DISABLED:
            began = kind.nowhere
        if self._skips_invalid or self._without_final == "drop":
            left_out = self._left_out(columns, is_lost)
            if left_out is not None:
                began = began | left_out
                self.is_transition = self.is_transition & ~left_out
            self._is_running = self.is_transition & ~done
        # Without such an option nothing is read.
        if self.is_transition is not kind.everywhere and not bool(self.is_transition.all()):
            columns = {key: column[self.is_transition] for key, column in columns.items()}
        self.columns = columns
        if may_have_ended or began is not done:
            self._number(began)
        return results

    def store(self, replay: TrainingReplay, **columns: Any) -> Tensor:
        """Stores the transitions of the last step. Call it once after each step.

        Args:
            replay: a :class:`~lightning_replay.Replay`, or a sharded one.
            columns: further ones by name, arrays or tensors ``[num_envs, ...]``, of which the rows of
                ``is_transition`` are stored.

        Returns:
            int64, the slots, none if all environments were reset in the step.

        Raises:
            TypeError, ValueError: as ``extend_columns`` of the replay.
        """
        rows = len(next(iter(self.columns.values()))) if self.columns else 0
        if rows:
            more = {name: self._kind.given(name, column) for name, column in columns.items()}
            if rows < len(self._trajectory):
                more = {name: column[self.is_transition] for name, column in more.items()}
            slots = replay.extend_columns(self.columns | more)
        else:
            slots = torch.empty(0, dtype=torch.int64, device="cpu")
        if self.cut_episodes:
            replay.end_episodes(self.cut_episodes)
        return slots

    def _begin(self, named: dict[Path, Any]) -> None:
        """Reads from the first observations which columns there are, and of which kind."""
        device = next((part.device for part in named.values() if isinstance(part, Tensor)), None)
        if device is not None:
            # Numbers and flags follow the tensors of the simulator, so that no step waits for its device.
            self._kind = TensorColumns(torch.ones(self.num_envs, dtype=torch.bool, device=device))
            self._next = torch.as_tensor(self._next, device=device)
            self._trajectory = torch.as_tensor(self._trajectory, device=device)
            self._is_reset_due = self._is_running = self._kind.nowhere
        self._is_plain = [*named] == [("observation",)] and self._observation_columns is None
        self._keys = {path: (_key(path[0], path[1:]), ("next", *path)) for path in named}

    def _number(self, began: Any) -> None:
        self._trajectory, self._next = self._kind.numbered(began, self._next, self._trajectory)

    def _left_out(self, columns: Columns, is_lost: Any) -> Any:
        """Returns which rows are left out, bool ``[num_envs]``, or ``None``. It reads the device once."""
        invalid = self._kind.nowhere
        if self._skips_invalid:
            for column in columns.values():
                invalid = invalid | ~self._kind.finite_rows(column)
        left_out = invalid & self.is_transition
        if self._without_final == "drop":
            left_out = left_out | is_lost
        num_left_out = int(left_out.sum())
        if not num_left_out:
            return None
        self.num_skipped += num_left_out
        self.cut_episodes = self._trajectory[left_out & invalid & self._is_running].tolist()
        return left_out

    def _named(self, observations: Any) -> dict[str, Any]:
        """Returns the columns of observations by name."""
        if self._observation_columns is None:
            return {"observation": observations}
        entries = observations.keys() if isinstance(observations, Mapping) else ()
        lacking = [entry for entry in self._observation_columns.values() if entry not in entries]
        if lacking:
            raise ValueError(
                f"observation_columns names the entries {lacking}, and observations of {self.env} have "
                f"{[*entries] or 'none'}; name entries that they have. Nothing was stored"
            )
        return {name: observations[entry] for name, entry in self._observation_columns.items()}

    def _parts(self, observations: Any, what: str) -> list[Any]:
        """Returns copies of the parts of observations, in the order of the columns."""
        if self._is_plain:  # A step takes 1 µs less.
            parts = [self._kind.owned(what, observations)]
        else:
            leaves = dict(_leaves(self._named(observations)))
            if leaves.keys() != self._keys.keys():
                raise ValueError(
                    f"{what} of {self.env} have the parts {[*leaves]}; the first observations had {[*self._keys]}. "
                    "Nothing was stored"
                )
            parts = [self._kind.owned(what, leaves[path]) for path in self._keys]
        shape = self._kind.everywhere.shape
        if any([part.shape[:1] != shape for part in parts]):
            raise ValueError(
                f"{what} of {self.env} are of the shapes {[tuple(part.shape) for part in parts]}; they must have one "
                f"row for each of its {self.num_envs} environments. Nothing was stored"
            )
        return parts

    def _last(self, observations: Any, infos: Any, following: list[Any], done: Any) -> list[Any] | None:
        """Returns the observations that followed within the episodes, or ``None`` if options allow none."""
        final = self._final(observations, infos)
        if isinstance(final, np.ndarray) and final.dtype == object:
            ended = np.flatnonzero(done).tolist()
            if not any(final[i] is None for i in ended):
                return self._with_objects(final, following, ended)
            final = None
        if final is not None:
            parts = self._parts(final, "final observations")
            shapes = [[tuple(part.shape) for part in each] for each in (parts, following)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"final observations of {self.env} are of the shapes {shapes[0]}, and observations of {shapes[1]}; "
                    "both must have the same. Nothing was stored"
                )
            return self._merged(done, parts, following)
        if self._without_final is not None:
            return None
        if bool(done.any()):
            place = self._final_observation or "infos['final_obs']"
            raise ValueError(
                f"an episode of {self.env} ended, and {place} has no last observation of it: {final!r}. infos have "
                f"{[*infos]}. If one of these holds the last observations, name it with final_observation=. If the "
                "simulator gives none, choose without_final_observation='terminate' or 'drop'. AutoresetMode.SAME_STEP "
                "of Gymnasium gives them; put VectorSteps inside the wrapper that removes them. If the vector has "
                "another mode, give it as autoreset_mode=. Nothing was stored"
            )
        return following

    def _final(self, observations: Any, infos: Any) -> Any:
        wanted = self._final_observation
        if wanted is None:
            return next((infos[name] for name in FINAL_OBSERVATIONS if name in infos), None)
        if callable(wanted):
            return wanted(observations, infos)
        for name in [wanted] if isinstance(wanted, str) else wanted:
            infos = infos.get(name) if isinstance(infos, Mapping) else None
        return infos

    def _merged(self, done: Any, last: list[Any], following: list[Any]) -> list[Any]:
        return [self._kind.chosen(done, one, other) for one, other in zip(last, following, strict=True)]

    def _with_objects(self, final: np.ndarray, following: list[np.ndarray], ended: list[int]) -> list[np.ndarray]:
        last = [column.copy() for column in following]
        # Gymnasium gives an object for each environment. A loop over arrays takes a third of the time of a stack.
        if self._is_plain:  # A step of 64 CartPoles takes 15 µs in place of 35.
            for i in ended:
                last[0][i] = final[i]
            return last
        for i in ended:
            # The path is compared, because an environment may order the entries in another way than the vector.
            parts = dict(_leaves(self._named(final[i])))
            for path, column in zip(self._keys, last, strict=True):
                column[i] = parts[path]
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
