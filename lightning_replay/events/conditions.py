# SPDX-License-Identifier: Apache-2.0
"""Conditions over steps: of one step, over the course of an episode, and combinations of conditions."""

from __future__ import annotations

import copy
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor

from lightning_replay.episodes.groups import EpisodeGroups, groups_of
from lightning_replay.episodes.links import trajectory_of
from lightning_replay.episodes.running_rows import RunningRows
from lightning_replay.events import kernels
from lightning_replay.options import checked_bound, checked_count, checked_entries, checked_key, checked_number
from lightning_replay.saving.spec import rebuildable
from lightning_replay.state import Stateful

_DONE = ("next", "done")


ReadColumn = Callable[[NestedKey], Tensor | None]  # reads a column of all stored rows by its key, [N, ...]


class ConditionError(ValueError):
    """A condition raised an error, or did not return one truth value for each step."""


class Condition(Stateful, ABC):
    """A predicate over steps. If nothing needs saving, a plain function of the same signature is also accepted.

    A step is a row of a TensorDict ``[N]``. An event is a property of its *next* state, so that conditions read
    ``("next", ...)`` and never get the state after a reset. Stratified Sampling from Event Tables, definition 5.
    A condition with memory names its attributes in ``saved_attributes``.
    """

    @abstractmethod
    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Returns whether the event happened at each step, bool ``[N]``."""

    def fresh(self) -> Condition:
        """Returns the same condition without memory. A condition that has no memory returns itself."""
        return self

    def seen(self, read: ReadColumn) -> str:
        """Returns the range of the compared column, for the warning that the condition is never true."""
        return _seen_of(("next", "reward"), read)

    def end_episodes(self, trajectories: Sequence[int | None]) -> None:
        """Discards running episodes that got no done step. Does nothing by default."""

    def __repr__(self) -> str:
        given = vars(self).get("init_arguments")
        if given is None:  # A user's class may not be rebuildable.
            return super().__repr__()
        values = {name: vars(self).get(name, value) for name, value in given.items()}
        shown = [f"{name}={value!r}" if place else repr(value) for place, (name, value) in enumerate(values.items())]
        return f"{_function_of(self)}({', '.join(shown)})"


def _function_of(condition: Condition) -> str:
    # reward_at_least builds RewardAtLeast, and so on.
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", type(condition).__name__).lower()


# The class comes first, so that a command line accepts a class path before the import path of a function.
ConditionLike = Condition | Callable[[TensorDictBase], Tensor]


def holds(condition: ConditionLike, steps: TensorDictBase) -> Tensor:
    """Evaluates a condition at steps ``[N]``, and returns bool ``[N]``, even if the condition returns ``[N, 1]``.

    Raises:
        ConditionError: The condition raised an error, wrote into the steps, or returned another shape or dtype.

    Example:
        >>> from tensordict import TensorDict
        >>> steps = TensorDict({"next": {"reward": torch.tensor([[0.0], [1.0]])}}, [2])
        >>> holds(lambda steps: steps["next", "reward"] > 0, steps)
        tensor([False,  True])
    """
    try:
        result = condition(steps) if isinstance(condition, Condition) else _call_function(condition, steps)
    except ConditionError:
        raise
    except Exception as error:
        raise ConditionError(
            f"the condition {condition!r} raised {type(error).__name__}: {error}. It was given {len(steps)} steps with "
            f"{_columns(steps)}"
        ) from error
    if not isinstance(result, Tensor) or result.dtype != torch.bool:
        given = f"a {result.dtype} tensor" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise ConditionError(f"the condition {condition!r} returned {given}; return a bool tensor [{len(steps)}]")
    if result.shape not in ((len(steps),), (len(steps), 1)):
        raise ConditionError(f"the condition {condition!r} returned shape {list(result.shape)}; return [{len(steps)}]")
    return result.reshape(-1)


def _call_function(function: Callable[[TensorDictBase], Tensor], steps: TensorDictBase) -> Tensor:
    # A user's function gets locked rows, because its changes would be stored. Inference tensors have no version.
    columns = [column for column in steps.values(True, True) if not column.is_inference()]
    before = [column._version for column in columns]
    result = function(steps.clone(recurse=False).lock_())
    if before != [column._version for column in columns]:
        raise ConditionError(f"the condition {function!r} changed a column of the steps in place; compute a new one")
    return result


def column(steps: TensorDictBase, key: NestedKey) -> Tensor:
    """Reads a column, or raises :class:`ConditionError` if there is none."""
    value = steps.get(key, None)
    if not isinstance(value, Tensor):
        raise ConditionError(f"the steps have no column {key!r}; stored are {_columns(steps)}")
    return value


def one_number(steps: TensorDictBase, key: NestedKey) -> Tensor:
    """Reads a column as ``[N]``, or raises :class:`ConditionError` unless it has one number for each step."""
    value = column(steps, key)
    if value.numel() != len(steps):
        raise ConditionError(
            f"the column {key!r} has the shape {list(value.shape)}; this condition needs one number for each step. "
            "For one component of several use key_in_region with None for the others"
        )
    return value.reshape(-1)


def own(condition: ConditionLike, name: str = "condition") -> ConditionLike:
    """Returns the condition of the option ``name`` without memory, or raises ``TypeError`` for anything else."""
    given: Any = condition
    if not callable(given) or (isinstance(given, type) and issubclass(given, Condition)):
        raise TypeError(
            f"{name} is {condition!r}; it must be a condition such as reward_at_least(1.0), or a function of steps "
            "TensorDict[N] that returns bool [N]"
        )
    return condition.fresh() if isinstance(condition, Condition) else condition


def state_of(condition: ConditionLike) -> dict[str, Any]:
    """Returns the state of a condition, which is empty for a plain function."""
    return condition.state_dict() if isinstance(condition, Condition) else {}


def load_state_of(condition: ConditionLike, state: dict[str, Any]) -> None:
    """Restores what :func:`state_of` returned."""
    if isinstance(condition, Condition):
        condition.load_state_dict(state)


def warn_of_unmet(
    what: str, condition: ConditionLike, rows: int, stored: TensorDictBase, slots: Tensor, done_key: NestedKey = _DONE
) -> bool:
    """Warns that a condition was true at none of so many rows, and returns whether it warned.

    If no episode has ended, there is no warning.
    """
    done = stored.get(done_key, None)
    if done is None or not bool(done[slots].any()):
        return False

    def read(key: NestedKey) -> Tensor | None:
        """Returns the column of the stored rows, ``[N, ...]``, or ``None`` if there is none."""
        values = stored.get(key, None)
        return values[slots] if isinstance(values, Tensor) else None

    seen = condition.seen(read) if isinstance(condition, Condition) else _seen_of(("next", "reward"), read)
    warnings.warn(
        f"{what} {condition!r} was true at none of {rows:,} steps, although episodes end{seen}. If it cannot be "
        "true in this environment, give another: lightning_replay.events.suggest_events(replay) proposes thresholds",
        stacklevel=3,
    )
    return True


def _seen_of(key: NestedKey, read: ReadColumn) -> str:
    value = read(key)
    return "" if value is None else f"; stored values of {key!r} are {float(value.min()):g} to {float(value.max()):g}"


def _columns(steps: TensorDictBase) -> str:
    return ", ".join(repr(key) for key in steps.keys(include_nested=True, leaves_only=True))


class Combination(Condition):
    """A condition made of several. Each is evaluated at every step, because it may follow episodes."""

    def __init__(self, conditions: Sequence[ConditionLike]) -> None:
        several = checked_entries("conditions", conditions, "a sequence of conditions")
        if not several:
            raise ValueError("no condition was given; combine at least one")
        self.conditions: tuple[ConditionLike, ...] = tuple(own(condition) for condition in several)

    def answers(self, steps: TensorDictBase) -> Tensor:
        """Evaluates all C conditions at steps ``[N]``, bool ``[C, N]``."""
        return torch.stack([holds(condition, steps) for condition in self.conditions])

    def __repr__(self) -> str:
        return f"{_function_of(self)}({', '.join(map(repr, self.conditions))})"

    def fresh(self) -> Condition:
        """Returns the same combination of conditions without memory."""
        return type(self)(self.conditions)

    def end_episodes(self, trajectories: Sequence[int | None]) -> None:
        """Discards these running episodes in each condition."""
        for condition in self.conditions:
            if isinstance(condition, Condition):
                condition.end_episodes(trajectories)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each condition."""
        return {"conditions": [state_of(condition) for condition in self.conditions]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        for condition, saved in zip(self.conditions, state_dict["conditions"], strict=True):
            load_state_of(condition, saved)


@rebuildable
class EveryOf(Combination):
    """True if all conditions are true. See :func:`lightning_replay.events.every_of`."""

    def __call__(self, steps: TensorDictBase) -> Tensor:
        return self.answers(steps).all(0)


@rebuildable
class AnyOf(Combination):
    """True if at least one condition is true. See :func:`lightning_replay.events.any_of`."""

    def __call__(self, steps: TensorDictBase) -> Tensor:
        return self.answers(steps).any(0)


class EpisodeCondition(Condition):
    """A condition that keeps one integer for each running episode.

    It must get every step exactly once, in order of time. The steps of several environments may be interleaved in one
    call, and an episode may continue in the next call. ``trajectory`` (or ``("collector", "traj_ids")``) identifies the
    episode. Steps without it belong to one environment, in order. A done step ends its episode and discards its
    integer. A subclass defines :meth:`follow` and, if an episode does not begin with 0, ``start``.

    Args:
        condition: Condition to evaluate at each step, without its memory.
    """

    start: int = 0

    def __init__(self, condition: ConditionLike) -> None:
        self.condition: ConditionLike = own(condition)
        self._forget()

    def _forget(self) -> None:
        self._running = RunningRows()
        self._remembered = np.zeros(0, dtype=np.int64)  # Integers in the rows of the running episodes.
        self._unnamed = self.start  # The integer of steps without a trajectory.

    @abstractmethod
    def follow(self, remembered: int, held: bool) -> tuple[bool, int]:
        """Returns whether the event happens at one step of an episode, and the integer to remember.

        Args:
            remembered: Integer of the step before, ``start`` at the first step of an episode.
            held: Whether ``condition`` is true at this step.
        """

    def __call__(self, steps: TensorDictBase) -> Tensor:
        done = one_number(steps, _DONE).to("cpu", torch.bool).numpy()
        trajectory = trajectory_of(steps)
        held = holds(self.condition, steps)
        if not len(steps):
            return held
        names = None if trajectory is None else trajectory.reshape(-1).to("cpu", torch.int64).numpy()
        episodes = groups_of(names, done)
        if names is None:
            remembered = np.array([self._unnamed])
            happened = self._follow_all(held.cpu().numpy(), episodes, remembered)
            self._unnamed = int(remembered[0])
        else:
            rows = self._running.find(episodes.trajectory)
            remembered = kernels.recall(rows, self._remembered, self.start)
            happened = self._follow_all(held.cpu().numpy(), episodes, remembered)
            if kernels.keep(rows, self._remembered, episodes.ended, remembered):
                self._running.close(rows[episodes.ended])
                self._open(episodes.trajectory[~episodes.ended], remembered[~episodes.ended])
        return torch.from_numpy(happened).to(held.device)

    def _follow_all(self, held: np.ndarray, episodes: EpisodeGroups, remembered: np.ndarray) -> np.ndarray:
        """Returns whether the event happens at each step, bool ``[N]``, and replaces the integers of the G episodes."""
        happened = np.empty(len(held), dtype=np.bool_)
        rule = _COMPILED.get(type(self).follow)
        if rule is not None:
            options = rule, vars(self).get("steps", 0), self.start
            kernels.follow(*options, held, episodes.order, episodes.start, episodes.done, remembered, happened)
            return happened
        group = np.empty(len(held), dtype=np.int64)
        group[episodes.order] = np.repeat(np.arange(len(remembered)), np.diff(episodes.start))
        for row, episode in enumerate(group.tolist()):
            happened[row], after = self.follow(int(remembered[episode]), bool(held[row]))
            remembered[episode] = self.start if episodes.done[row] else after
        return happened

    def _open(self, names: np.ndarray, remembered: np.ndarray) -> None:
        rows = self._running.open(names)
        if len(self._remembered) < self._running.capacity:
            self._remembered = np.resize(self._remembered, self._running.capacity)
        self._remembered[rows] = remembered

    def fresh(self) -> Condition:
        """Returns the same condition without running episodes."""
        again = copy.copy(self)
        again.condition = own(self.condition)
        again._forget()
        return again

    def seen(self, read: ReadColumn) -> str:
        """Returns the range of the column that the condition inside compares."""
        return self.condition.seen(read) if isinstance(self.condition, Condition) else super().seen(read)

    def end_episodes(self, trajectories: Sequence[int | None]) -> None:
        """Discards these episodes. ``None`` is the episode of steps without ``trajectory``."""
        if None in trajectories:
            self._unnamed = self.start
        named = np.array([name for name in trajectories if name is not None], dtype=np.int64)
        self._running.close(self._running.find(named))
        if isinstance(self.condition, Condition):
            self.condition.end_episodes(trajectories)

    def state_dict(self) -> dict[str, Any]:
        """Returns the memory of the running episodes, and the state of the condition inside."""
        remembered = self._remembered[self._running.rows]
        is_told = remembered != self.start
        return {
            "trajectory": torch.from_numpy(self._running.names[is_told]),
            "remembered": torch.from_numpy(remembered[is_told]),
            "unnamed": None if self._unnamed == self.start else self._unnamed,
            "condition": state_of(self.condition),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._forget()
        names, remembered = state_dict["trajectory"].numpy(), state_dict["remembered"].numpy()
        order = np.argsort(names)
        self._open(names[order], remembered[order])
        if state_dict["unnamed"] is not None:
            self._unnamed = int(state_dict["unnamed"])
        load_state_of(self.condition, state_dict["condition"])


@rebuildable
class FirstInEpisode(EpisodeCondition):
    """True at the first step of an episode at which ``condition`` is true.

    ::

        condition   . . T T . T     T = true, . = false
        this        . . T . . .
    """

    def follow(self, remembered: int, held: bool) -> tuple[bool, int]:
        """Remembers whether the condition was true before, 0 or 1."""
        return held and remembered == 0, int(held or remembered == 1)


@rebuildable
class Sustained(EpisodeCondition):
    """True when ``condition`` has held for exactly ``steps`` consecutive steps of an episode: once in each run.

    ::

        condition   T T . T T T T . T T T     T = true, . = false
        steps=3     . . . . . T . . . . T

    Args:
        condition: Condition to evaluate at each step.
        steps: Length of the run, including the step of the event.

    Raises:
        ValueError: ``steps`` is below 1.
    """

    def __init__(self, condition: ConditionLike, steps: int) -> None:
        super().__init__(condition)
        self.steps: int = checked_count("steps", steps, of="consecutive steps")

    def follow(self, remembered: int, held: bool) -> tuple[bool, int]:
        """Remembers the length of the run, at most one above ``steps``, at which no event happens."""
        length = min(remembered, self.steps) + 1 if held else 0
        return length == self.steps, length


@rebuildable
class Reestablished(Sustained):
    """True when ``condition`` has held for ``steps`` consecutive steps after it had failed: once for each failure.

    A failure is a step, or several steps in a row, at which the condition is false. An episode may begin with it. An
    episode without failure has no event. Stratified Sampling from Event Tables, history events. The arguments are the
    arguments of :class:`~lightning_replay.events.sustained`. The step of the event counts.

    ::

        condition   T T T . T . . T T T T . T T     T = true, . = false
        steps=2     . . . . . . . . T . . . . T
    """

    start = -1

    def follow(self, remembered: int, held: bool) -> tuple[bool, int]:
        """Remembers the steps since the failure, with -1 before a failure and after the event."""
        if not held:
            return False, 0
        if remembered < 0 or remembered + 1 == self.steps:
            return remembered >= 0, -1
        return False, remembered + 1


# Integers of these conditions are followed in a compiled loop, and integers of your conditions by their ``follow``.
_COMPILED = {
    FirstInEpisode.follow: kernels.FIRST,
    Sustained.follow: kernels.SUSTAINED,
    Reestablished.follow: kernels.REESTABLISHED,
}
Bound = float | Sequence[float | None] | None


@rebuildable
class RewardAtLeast(Condition):
    """True if the reward of a step is ``threshold`` or more.

    Example:
        >>> from tensordict import TensorDict
        >>> steps = TensorDict({"next": {"reward": torch.tensor([[0.5], [1.0]])}}, [2])
        >>> RewardAtLeast(1.0)(steps)
        tensor([False,  True])
    """

    def __init__(self, threshold: float) -> None:
        self.threshold: float = checked_number("threshold", threshold)

    def __call__(self, steps: TensorDictBase) -> Tensor:
        return one_number(steps, ("next", "reward")) >= self.threshold


@rebuildable
class RewardBelow(Condition):
    """True if the reward of a step is less than ``threshold``."""

    def __init__(self, threshold: float) -> None:
        self.threshold: float = checked_number("threshold", threshold)

    def __call__(self, steps: TensorDictBase) -> Tensor:
        return one_number(steps, ("next", "reward")) < self.threshold


@rebuildable
class TerminalWithReward(Condition):
    """True if a step terminated its episode with a reward of ``at_least`` or more. Truncation does not count."""

    def __init__(self, at_least: float) -> None:
        self.at_least: float = checked_number("at_least", at_least)

    def __call__(self, steps: TensorDictBase) -> Tensor:
        terminated = one_number(steps, ("next", "terminated")).bool()
        return terminated & (one_number(steps, ("next", "reward")) >= self.at_least)


@rebuildable
class InfoKey(Condition):
    """True if the information column ``("next", key)`` is ``at_least`` or more. It has a number or bool for each step.

    Args:
        key: Name of the information, or a tuple of names if it is nested.
        at_least: Threshold. The default suits a bool, or numbers that are 0 or 1.
    """

    def __init__(self, key: str | Sequence[str], at_least: float = 0.5) -> None:
        self.key: NestedKey = unravel_key(checked_key("key", key))
        self.at_least: float = checked_number("at_least", at_least)

    def __call__(self, steps: TensorDictBase) -> Tensor:
        return one_number(steps, unravel_key(("next", self.key))) >= self.at_least

    def seen(self, read: ReadColumn) -> str:
        """Returns the range of the information column."""
        return _seen_of(unravel_key(("next", self.key)), read)


@rebuildable
class KeyInRegion(Condition):
    """True if every component of a column lies between its bounds, or on one of them.

    Args:
        key: Key of the column, usually ``("next", "observation")``.
        low, high: Bounds, one number for all components, or one for each. ``None`` leaves a component unbounded.

    Raises:
        ValueError: No bound at all, a bound that is NaN, ``low`` above ``high``, or another number of components.

    Example:
        >>> from tensordict import TensorDict
        >>> steps = TensorDict({"next": {"observation": torch.tensor([[6.0, 1.0], [6.0, 9.0], [5.0, 1.0]])}}, [3])
        >>> KeyInRegion(("next", "observation"), low=[6, None], high=[6, 2])(steps)
        tensor([ True, False, False])
    """

    def __init__(self, key: str | Sequence[str], low: Bound = None, high: Bound = None) -> None:
        self.key: NestedKey = unravel_key(checked_key("key", key))
        self.low: tuple[float | None, ...] = _bounds("low", low)
        self.high: tuple[float | None, ...] = _bounds("high", high)
        if all(bound is None for bound in self.low + self.high):
            raise ValueError("low and high bound nothing, so the region is everything; give at least one bound")
        size = max(len(self.low), len(self.high))
        if min(len(self.low), len(self.high)) not in (1, size):
            raise ValueError(
                f"low has {len(self.low)} components and high has {len(self.high)}; give one number for all, or one or "
                "None for each component in both"
            )
        least = _filled(self.low, -math.inf).expand(size)
        greatest = _filled(self.high, math.inf).expand(size)
        if (least > greatest).any():
            raise ValueError(f"low {low} is above high {high}, so the region is empty; give low <= high")
        #: Least and greatest value of each component, or of all components, float64 ``[n]``.
        self.bounds: tuple[Tensor, Tensor] = (least, greatest)

    def __call__(self, steps: TensorDictBase) -> Tensor:
        value = column(steps, self.key).reshape(len(steps), -1)
        size = self.bounds[0].numel()
        if size not in (1, value.shape[1]):
            raise ConditionError(f"the region has {size} components, {self.key!r} has {value.shape[1]}; give as many")
        # Bounds get the precision of the column, because 0.1 as float32 and 0.1 as float64 are different numbers.
        dtype = value.dtype if value.is_floating_point() else torch.float64
        least, greatest = (bound.to(value.device, dtype) for bound in self.bounds)
        return ((value >= least) & (value <= greatest)).all(1)

    def seen(self, read: ReadColumn) -> str:
        """Returns the range of a component that never reached its bounds."""
        value = read(self.key)
        if value is None:
            return ""
        low, high = (ends.double().cpu() for ends in torch.aminmax(value.reshape(len(value), -1), dim=0))
        apart = ((high < self.bounds[0]) | (low > self.bounds[1])).nonzero().flatten().tolist()
        if not apart:
            return f"; each component of {self.key!r} alone reaches its bounds"
        return f"; stored values of component {apart[0]} of {self.key!r} are {low[apart[0]]:g} to {high[apart[0]]:g}"


def _bounds(name: str, bound: Bound) -> tuple[float | None, ...]:
    if bound is None or isinstance(bound, Real):
        return (checked_bound(name, bound),)
    entries = checked_entries(name, bound, "a number, None, or a list of these, one for each component")
    return tuple(checked_bound(f"{name}[{place}]", entry) for place, entry in enumerate(entries))


def _filled(bounds: tuple[float | None, ...], unbounded: float) -> Tensor:
    return torch.tensor([unbounded if bound is None else bound for bound in bounds], dtype=torch.float64, device="cpu")


# Users build conditions by these names. Saves name the classes.
reward_at_least = RewardAtLeast
reward_below = RewardBelow
terminal_with_reward = TerminalWithReward
key_in_region = KeyInRegion
info_key = InfoKey
first_in_episode = FirstInEpisode
sustained = Sustained
reestablished = Reestablished


def every_of(*conditions: ConditionLike) -> EveryOf:
    """Returns a condition that is true if all ``conditions`` are true. Each is evaluated at every step."""
    return EveryOf(conditions)


def any_of(*conditions: ConditionLike) -> AnyOf:
    """Returns a condition that is true if one of ``conditions`` is true. Each is evaluated at every step."""
    return AnyOf(conditions)
