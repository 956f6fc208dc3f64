# SPDX-License-Identifier: Apache-2.0
"""Events of a run, and the tables that keep the steps before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from lightning_replay.events.conditions import ConditionLike, one_number, own, reward_at_least
from lightning_replay.options import (
    BELOW_ONE,
    check_kind,
    checked_count,
    checked_entries,
    checked_number,
    checked_share,
)
from lightning_replay.saving.spec import rebuildable

HISTORY_LENGTH = 200


@rebuildable
@dataclass(frozen=True)
class Event:
    """An event of an episode, and how many of the steps before it are kept.

    Args:
        condition: Function that tells whether the event happened at each step, TensorDict ``[N]`` to bool ``[N]``. A
            condition with memory is copied, so that each event follows the episodes by itself.
        history_length: Number τ of steps kept up to and *including* the event. 1 keeps only the step of the event.

    Raises:
        ValueError: ``condition`` cannot be called, or ``history_length`` is no whole number or below 1.
    """

    condition: ConditionLike
    history_length: int = HISTORY_LENGTH

    def __post_init__(self) -> None:
        object.__setattr__(self, "condition", own(self.condition))  # The class is frozen.
        checked_count("history_length", self.history_length, of="steps, the event's own included,")


@rebuildable
class EventTable:
    """A named table of the steps before an event, so that rare events are kept and replayed more often.

    At each step of the event, the last ``history_length`` steps of its episode enter the table, oldest first. A step
    enters the table once. If more than ``capacity`` steps entered, the oldest leave. Give the tables to
    :func:`lightning_replay.recipes.event_tables`. Stratified Sampling from Event Tables, section 4.

    Args:
        name: Name of the table.
        condition: Condition of its only event. See :class:`Event`. A function that can be imported by name is saved
            with the buffer. With a lambda, the buffer is saved, but you must build it again by hand to load it.
        history_length: History length τ of ``condition``.
        capacity: Number κ of steps kept, at least ``history_length``.
        share: Share η of each batch drawn from this table, in [0, 1). ``None`` divides evenly what the others leave.
            With 0, an ablation, the table is kept, never drawn from, and ignored by corrections.
        min_size: Number d of steps that the table must hold to be drawn from. ``None`` takes the batch size.
        events: Events whose histories go into this table, in place of ``condition``. A step enters once.

    Attributes:
        events: Tuple of :class:`Event`.

    Raises:
        ValueError: An option is out of range, the table can never fill, or the events were given in both ways or in
            neither.
        TypeError: A share that is no number.

    Example:
        >>> goal = EventTable("goal", condition=reward_at_least(1.0), history_length=200, capacity=10_000, share=0.25)
        >>> goal.events
        (Event(condition=reward_at_least(1.0), history_length=200),)
    """

    def __init__(
        self,
        name: str,
        condition: ConditionLike | None = None,
        history_length: int = HISTORY_LENGTH,
        *,
        capacity: int,
        share: float | None = None,
        min_size: int | None = None,
        events: Sequence[Event] | None = None,
    ) -> None:
        check_kind("name", name, str, "a text, by which table(name) finds the table")
        if not name:
            raise ValueError("name is ''; an event table needs one, by which table(name) finds it")
        self.name = name
        self.events: tuple[Event, ...] = _events(name, condition, history_length, events)
        self.capacity = capacity
        self.share = share
        self.min_size = min_size
        checked_count(f"capacity of table {name!r}", capacity, of="steps")
        if self.history_length > capacity:  # A part of the history would leave before it could be drawn.
            raise ValueError(
                f"history longer than the table: {name!r} has history_length {self.history_length} and capacity "
                f"{capacity}, so one event would evict its own history. Raise the capacity or shorten the history"
            )
        if share is not None:
            # With a share of 1, nothing would be drawn from the default table, which all steps enter.
            checked_number(
                f"share of table {name!r}",
                share,
                0.0,
                BELOW_ONE,
                accepted="a number in [0, 1), a part of each batch, or None",
            )
        if min_size is not None and checked_count(f"min_size of table {name!r}", min_size, of="steps") > capacity:
            raise ValueError(f"min_size of table {name!r} is {min_size} and its capacity {capacity}; give at most that")

    @property
    def history_length(self) -> int:
        """Longest history of an event of this table, in steps."""
        return max(event.history_length for event in self.events)

    def fresh(self) -> EventTable:
        """Returns the same table with conditions without memory, for another buffer."""
        return type(self)(**self.init_arguments)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return (
            f"EventTable({self.name!r}, events={list(self.events)}, capacity={self.capacity}, share={self.share}, "
            f"min_size={self.min_size})"
        )


def suggest_events(
    replay: ReplayBuffer | TensorDictBase,
    quantiles: Sequence[float] = (0.5, 0.75, 0.9),
    *,
    history_length: int = HISTORY_LENGTH,
) -> list[Event]:
    """Proposes events for an unknown domain: the reward reaches a quantile of the stored rewards.

    Each threshold is a stored reward above the least reward, which every step reaches. If a quantile is the least
    reward, as with sparse rewards, the next greater reward takes its place. Equal thresholds are one event. Stratified
    Sampling from Event Tables recommends such thresholds for dense rewards.

    Args:
        replay: Buffer that holds some steps, for instance of a random policy, or the steps ``[N]``.
        quantiles: Quantiles, each in [0, 1].
        history_length: History length of the events.

    Returns:
        The events, lowest threshold first. Give all of them to one :class:`EventTable`, or each to another.

    Raises:
        ValueError: Nothing is stored, all rewards are equal or some are not finite, or a quantile is outside [0, 1].

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> steps = TensorDict({"next": {"reward": torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 1, 2, 5])}}, [10])
        >>> [event.condition for event in suggest_events(steps)]
        [reward_at_least(1.0), reward_at_least(5.0)]
    """
    entries = checked_entries("quantiles", quantiles)
    shares = [checked_share(f"quantiles[{place}]", quantile) for place, quantile in enumerate(entries)]
    if not shares:
        raise ValueError("quantiles is empty; give at least one number in [0, 1]")
    if len(replay) == 0:
        raise ValueError("nothing is stored, so there are no rewards to choose from; call extend first")
    rows = replay if isinstance(replay, TensorDictBase) else replay[:]
    rewards = one_number(rows, ("next", "reward")).double().cpu().numpy()
    if not np.isfinite(rewards).all():
        raise ValueError("some stored rewards are NaN or infinite; correct the environment before choosing events")
    # Every step reaches the least reward, which is no event.
    above = rewards[rewards > rewards.min()]
    if above.size == 0:
        raise ValueError(
            f"all {rewards.size} stored rewards are {rewards[0]}, so no threshold separates them; collect until "
            "another reward is seen, or name an event by hand, for instance with key_in_region"
        )
    thresholds = np.maximum(np.quantile(rewards, shares, method="higher"), above.min())
    return [Event(reward_at_least(float(threshold)), history_length) for threshold in np.unique(thresholds)]


def _events(
    name: str, condition: ConditionLike | None, history_length: int, events: Sequence[Event] | None
) -> tuple[Event, ...]:
    if (condition is None) == (events is None):
        raise ValueError(
            f"table {name!r} was given {'neither condition nor' if events is None else 'both condition and'} events; "
            "give one condition, or events=[Event(...), ...] for several"
        )
    if events is None:
        assert condition is not None
        return (Event(condition, history_length),)
    for place, event in enumerate(checked_entries(f"events of table {name!r}", events, "a sequence of Events")):
        check_kind(f"events[{place}] of table {name!r}", event, Event, "an Event(condition, history_length)")
    if not events:
        raise ValueError(f"events of table {name!r} is empty; give at least one Event")
    if history_length != HISTORY_LENGTH:
        raise ValueError(f"table {name!r} was given events and history_length {history_length}; give it to each Event")
    # The conditions of new events remember no steps of another table.
    return tuple(Event(event.condition, event.history_length) for event in events)
