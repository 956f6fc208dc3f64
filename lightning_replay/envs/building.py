# SPDX-License-Identifier: Apache-2.0
"""Builds Gymnasium environments from ids or callables, checks what they return, and sets their tasks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from numbers import Real
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import TimeLimit

import lightning_replay.envs  # noqa: F401, the import registers the ids of this library with Gymnasium
from lightning_replay.options import MissingExtraError, check_kind, checked_choice, checked_entries, missing_extra_of


class UnknownEnvironmentError(gymnasium.error.UnregisteredEnv):
    """An id that is not registered with Gymnasium, or an id of a module that does not exist."""


Step = tuple[Any, Any, bool, bool, dict[str, Any]]
MAX_EPISODE_STEPS = 50_000  # Evaluation stops there. An Atari game of 108,000 frames has 27,000 steps.


def check_env(env: object) -> None:
    """Raises ``TypeError`` for anything but an id, or a callable that builds an environment."""
    if isinstance(env, gymnasium.Env | VectorEnv) or not (isinstance(env, str) or callable(env)):
        raise TypeError(
            f"env is {env!r}; it must be a Gymnasium id, or a callable that builds one environment, such as "
            "lambda: MyEnv(size=5), because collection and evaluation build environments of their own. "
            "ReplayDataModule also accepts a simulator with num_envs, reset, and step"
        )


def build(env: str | Callable[..., Any], env_kwargs: Mapping[str, Any]) -> Any:
    """Builds from an id or a callable, which may return anything.

    Raises:
        MissingExtraError: An optional dependency is not installed.
        UnknownEnvironmentError: The id is not registered, or its module does not exist.
    """
    try:
        return gymnasium.make(env, **env_kwargs) if isinstance(env, str) else env(**env_kwargs)
    except MissingExtraError:
        raise
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        missing = missing_extra_of(f"environment {env!r}", error)
        if missing is not None:
            raise missing from error
        cause = error.__cause__
        # The module in the id may be missing, or another module that it imports.
        if (
            isinstance(env, str)
            and isinstance(cause, ModuleNotFoundError)
            and f"{env.partition(':')[0]}.".startswith(f"{cause.name}.")
        ):
            raise _unknown(env, cause) from error
        raise
    except gymnasium.error.UnregisteredEnv as error:
        raise _unknown(env, error) from error


def build_environment(
    env: str | Callable[..., gymnasium.Env[Any, Any]], env_kwargs: Mapping[str, Any]
) -> gymnasium.Env[Any, Any]:
    """Builds an environment from an id or a callable, with the errors of :func:`build`.

    Raises:
        TypeError: The callable returns no environment, or the environment lacks a space.
    """
    return checked_environment(build(env, env_kwargs), env)


def checked_environment(made: Any, env: object) -> gymnasium.Env[Any, Any]:
    """Returns what ``env`` built, or raises ``TypeError`` unless it is an environment with spaces."""
    if not isinstance(made, gymnasium.Env):
        given = "None" if made is None else f"a {type(made).__module__}.{type(made).__qualname__}"
        raise TypeError(
            f"env is {env!r}, which returned {given}; it must build and return one gymnasium.Env. num_envs steps "
            "several of them, and the package shimmy converts environments of OpenAI's gym. ReplayDataModule also "
            "accepts a simulator with num_envs, reset, and step"
        )
    for name in ("observation_space", "action_space"):
        if not isinstance(getattr(made, name, None), Space):
            raise TypeError(
                f"environment {env!r} has no {name}; set it in its __init__, such as "
                f"self.{name} = gymnasium.spaces.Box(-1.0, 1.0, shape=(3,))"
            )
    return made


def _unknown(env: object, error: BaseException) -> UnknownEnvironmentError:
    reason = str(error)
    if not reason.endswith((".", "?")):
        reason += "."
    return UnknownEnvironmentError(
        f"environment {env!r}: {reason} Give a registered id, such as 'CartPole-v1'. 'my_module:MyEnv-v0' imports the "
        "module that registers your id"
    )


def parts_of(space: Space[Any]) -> dict[str, Space[Any]] | None:
    """Returns the spaces in a Dict or Tuple by the names of their columns, or ``None`` for another space."""
    if isinstance(space, Dict):
        return {str(name): part for name, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return {str(place): part for place, part in enumerate(space.spaces)}
    return None


_ARRAYS = Box | Discrete | MultiDiscrete | MultiBinary  # Values of these spaces are arrays.


def leaf_spaces(space: Space[Any], key: tuple[str, ...] = ()) -> dict[tuple[str, ...], Space[Any]]:
    """Returns the spaces of the columns in which values of a space are stored, by key.

    Example:
        >>> leaf_spaces(Dict(a=Tuple([Box(0, 1), Discrete(2)])), ("observation",)).keys()
        dict_keys([('observation', 'a', '0'), ('observation', 'a', '1')])
    """
    parts = parts_of(space)
    if not parts:
        return {key: space}
    return {path: leaf for name, part in parts.items() for path, leaf in leaf_spaces(part, (*key, name)).items()}


def refused_entries(space: Space[Any], is_accepted: Callable[[Space[Any]], bool] = lambda array: True) -> str:
    """Returns a text for a message: the entries of an observation space that are not accepted. It may be empty."""
    entries = leaf_spaces(space).items()
    refused = [(path, part) for path, part in entries if not (isinstance(part, _ARRAYS) and is_accepted(part))]
    return "; ".join(f"observation{''.join(f'[{name!r}]' for name in path)}, {part}" for path, part in refused)


def bounds_of(space: Space[Any]) -> tuple[Any, Any]:
    """Returns the smallest and the largest value of a space, as numbers or arrays of its shape.

    Raises:
        ValueError: The values of the space are no arrays of numbers.
    """
    if isinstance(space, Discrete):
        return int(space.start), int(space.start) + int(space.n) - 1
    if isinstance(space, MultiDiscrete):
        low = space.start.astype(np.int64)
        return low, low + space.nvec.astype(np.int64) - 1
    if isinstance(space, MultiBinary):
        return 0, 1
    if isinstance(space, Box):
        wide = np.float64 if space.low.dtype.kind == "f" else np.int64
        return space.low.astype(wide), space.high.astype(wide)
    raise ValueError(
        f"actions of the space {space} are not supported; Box, Discrete, MultiDiscrete, MultiBinary, and Dict and "
        "Tuple of them are"
    )


_ROUNDING = 1e-5  # float32 values may be out of bounds by this share of the bound.


def outside_bounds(column: np.ndarray, space: Space[Any], name: str) -> str:
    """Returns a clause on the rows of a column ``[N, ...]`` that are no values of the space. It may be empty."""
    low, high = bounds_of(space)
    advice = "number them as the space does"
    if column.dtype.kind == "f":
        low = low - _ROUNDING * np.abs(low)
        high = high + _ROUNDING * np.abs(high)
        advice = "rescale them"
    inside = (column >= low) & (column <= high)  # NaN is not inside.
    if inside.all():
        return ""
    rows = len(inside) - int(inside.reshape(len(inside), -1).all(1).sum())
    return (
        f"{name} is out of the bounds of {space} in {rows} of {len(column)} rows: the values go from {column.min()} to "
        f"{column.max()} ({advice})"
    )


def integer_bounds_of(space: Space[Any]) -> tuple[Any, Any] | None:
    """Returns :func:`bounds_of` for a space of whole numbers, or ``None`` for another space."""
    return bounds_of(space) if isinstance(space, Discrete | MultiDiscrete | MultiBinary) else None


def _checked_parts_of(space: Space[Any]) -> Any:
    parts = parts_of(space)
    if parts is not None:
        return {name: _checked_parts_of(part) for name, part in parts.items()}
    return (space, space.shape, integer_bounds_of(space)) if isinstance(space, _ARRAYS) else None


def with_checked_steps(make: Callable[[], gymnasium.Env[Any, Any]]) -> CheckedSteps:
    """Builds an environment with :class:`CheckedSteps`. Another process can import this function by its name."""
    return CheckedSteps(make())


class CheckedSteps(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Checks what the environment returns, and copies the last observation of an episode."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._parts = _checked_parts_of(env.observation_space)
        # Only the first two observations of an episode are checked for their dtypes, because the check takes time.
        self._checks_dtypes = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode, or raises ``TypeError`` or ``ValueError`` for another interface or observation."""
        returned = checked_reset(self.env.reset(seed=seed, options=options), self.env)
        self._checks_dtypes = True
        self._check(returned[0], "reset")
        return returned

    def step(self, action: object) -> Step:
        """Takes one step, with the checks of :meth:`reset`."""
        returned = checked_step(self.env.step(action), self.env)
        self._check(returned[0], "step")
        self._checks_dtypes = False
        if not (returned[2] or returned[3]):
            return returned
        observation, reward, terminated, truncated, info = returned
        # The vector resets the environment in this step. The reset may write into the same array and dictionary.
        return deepcopy(observation), reward, terminated, truncated, copied_info(info)

    def _check(self, observation: object, method: str) -> None:
        if wrong := self._wrong(self._parts, observation, "observation"):
            raise ValueError(
                f"{method} of {self.env} returned an {'; an '.join(wrong)}. Return observations of the space, or "
                "correct it"
            )

    def _wrong(self, expected: Any, observation: Any, entry: str) -> list[str]:
        if type(expected) is dict:
            given = dict(enumerate(observation)) if isinstance(observation, tuple) else observation
            entries = {str(name): part for name, part in given.items()} if isinstance(given, Mapping) else {}
            if entries.keys() != expected.keys():
                return [f"{entry} with the entries {sorted(entries)}, and its observation_space has {sorted(expected)}"]
            parts = ((part, entries[name], f"{entry}[{name!r}]") for name, part in expected.items())
            return [clause for part in parts for clause in self._wrong(*part)]
        if expected is None:
            return []
        space, accepted, bounds = expected
        shape = observation.shape if type(observation) is np.ndarray else np.shape(observation)
        if shape != accepted:
            return [f"{entry} of shape {list(shape)}, and its observation_space has the shape {list(accepted)}"]
        if bounds is None and not self._checks_dtypes:
            return []
        array = np.asarray(observation)
        if not np.can_cast(array.dtype, space.dtype, "same_kind"):
            return [f"{entry} of {array.dtype}, and its observation_space has {space.dtype}"]
        if bounds is not None and ((array < bounds[0]) | (array > bounds[1])).any():
            return [f"{entry} of {array.tolist()}, which {space} does not hold"]
        return []


class LimitedEpisodes(TimeLimit[Any, Any]):
    """Truncates episodes of an evaluation that have not ended after ``max_episode_steps``, with a warning."""

    def step(self, action: object) -> Step:
        """Takes one step. The last step of the limit is truncated."""
        observation, reward, terminated, truncated, info = checked_step(self.env.step(action), self.env)
        steps = (self._elapsed_steps or 0) + 1
        self._elapsed_steps = steps  # type: ignore[assignment]  # Gymnasium sets None first and gives no type
        if steps >= self._max_episode_steps and not (terminated or truncated):
            warnings.warn(
                f"an evaluation episode in {self.env} had not ended after {steps:,} steps; it counts up to there. "
                "Limit episodes in the environment, as gymnasium.wrappers.TimeLimit does. If longer episodes are "
                "meant, raise max_episode_steps of Evaluate or level_returns",
                stacklevel=2,
            )
            truncated = True
        return observation, reward, terminated, truncated, info


def checked_step(returned: object, env: gymnasium.Env[Any, Any]) -> Step:
    """Returns the result of ``step``, or raises ``TypeError`` unless it is Gymnasium's five values with one reward."""
    if not isinstance(returned, tuple) or len(returned) != 5 or not isinstance(returned[4], dict):
        raise _other_interface("step", returned, "(observation, reward, terminated, truncated, info)", env)
    # NumPy's float64 is a float. Other numbers take longer to recognize.
    if not isinstance(returned[1], float):
        checked_reward(returned[1], env)
    return returned


def checked_reward(reward: Any, env: gymnasium.Env[Any, Any]) -> Any:
    """Returns the reward. Raises ``TypeError`` for anything but a number, or an array or tensor without dimensions."""
    if isinstance(reward, Real) or (getattr(reward, "ndim", None) == 0 and isinstance(reward.item(), Real)):
        return reward
    raise TypeError(
        f"{env} returned the reward {reward!r}; it must be one number. Return float(...) from its step, or wrap it in "
        "gymnasium.wrappers.TransformReward"
    )


def checked_reset(returned: object, env: gymnasium.Env[Any, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the result of ``reset``, or raises ``TypeError`` unless it is Gymnasium's observation and dictionary."""
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
        raise _other_interface("reset", returned, "(observation, info)", env)
    return returned


def _other_interface(method: str, returned: object, accepted: str, env: gymnasium.Env[Any, Any]) -> TypeError:
    given = f"a {type(returned).__name__}"
    if isinstance(returned, tuple):
        given = f"the types {', '.join(type(value).__name__ for value in returned)}"
    return TypeError(
        f"{method} of {env} returned {given}; Gymnasium's returns {accepted} with a dictionary as info. Return these, "
        "or convert an environment of OpenAI's gym with the package shimmy"
    )


def checked_info_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """Returns names of infos, and raises for names that are taken, empty, or given twice."""
    for place, key in enumerate(checked_entries("info_keys", keys, "a sequence of names of infos")):
        check_kind(f"info_keys[{place}]", key, str, "the name of an info")
    taken = {"observation", "reward", "terminated", "truncated", "done"}
    if not all(keys) or taken & {*keys} or len({*keys}) < len(keys):
        raise ValueError(
            f"info_keys is {keys!r}; give names of infos, each once. {', '.join(sorted(taken))} are columns already"
        )
    return tuple(keys)


def copied_info(value: Any) -> Any:
    """Returns copies of dictionaries and arrays, and other objects themselves, because a copy may fail."""
    if isinstance(value, dict):
        return {key: copied_info(part) for key, part in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


class TaskChoice:
    """Base of environments with tasks. Keeps the chosen task apart from the task of the running episode.

    A subclass names its tasks in :attr:`TASKS` and calls :meth:`_begin_task` in ``reset``. Through wrappers, set the
    task with Gymnasium's ``set_wrapper_attr("task", name)``. In a vector, set it with
    ``set_attr("task", [name, ...])``.

    Attributes:
        TASKS: Names of the tasks, the target task first.
    """

    TASKS: tuple[str, ...] = ("target",)

    def __init__(self, task: str | None = None) -> None:
        self.task = self.TASKS[0] if task is None else task
        self._begin_task(None)

    @property
    def task(self) -> str:
        """Name of the task of the next episode. An unknown name raises ``ValueError``."""
        return self._task

    @task.setter
    def task(self, name: str) -> None:
        self._task = str(checked_choice("task", name, self.TASKS))

    def _begin_task(self, options: Mapping[str, Any] | None) -> None:
        if options and "task" in options:
            self.task = options["task"]  # Later episodes keep it.
        self._running_task = self.TASKS.index(self.task)
