# SPDX-License-Identifier: Apache-2.0
"""Event tables from an RLlib config or a YAML file, with conditions named by import path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rllib_ext.class_paths import class_and_arguments

if TYPE_CHECKING:
    from lightning_replay.events.conditions.condition import ConditionLike
    from lightning_replay.events.event_table import Event, EventTable


def built_tables(tables: Any) -> list[EventTable]:
    """Returns the tables of ``replay_config("event_tables", tables=[...])``.

    Args:
        tables: each an :class:`~lightning_replay.events.EventTable`, or a dict of its arguments, with conditions as in
            :func:`built_condition` and events as ``{"condition": ..., "history_length": ...}``.

    Example:
        >>> condition = {"class_path": "lightning_replay.events.reward_at_least", "init_args": {"threshold": 1.0}}
        >>> built_tables([{"name": "goal", "condition": condition, "history_length": 5, "capacity": 100}])
        [EventTable('goal', events=[Event(condition=reward_at_least(1.0), history_length=5)], capacity=100, \
share=None, min_size=None)]
    """
    if isinstance(tables, str | Mapping) or not isinstance(tables, Sequence):
        raise TypeError(f"tables is {tables!r}; a list is accepted, of EventTable objects or of dicts of its arguments")
    return [_table(table, f"tables[{place}]") for place, table in enumerate(tables)]


def built_condition(value: Any, name: str) -> ConditionLike:
    """Builds a condition from the value of an option.

    Args:
        value: a callable; the import path of a function, which is the condition, or of a class; or
            ``{"class_path": ..., "init_args": {...}}`` of a class, whose own conditions have the same form.
        name: of the option, for messages.
    """
    found = value
    if isinstance(value, str | Mapping):
        given = value if isinstance(value, Mapping) else {"class_path": value}
        found, arguments = class_and_arguments(given, name)
        if inspect.isclass(found):
            found = found(**{key: _argument(key, item, f"{name}.{key}") for key, item in arguments.items()})
        elif "init_args" in given:
            raise ValueError(f"{name} names {given['class_path']!r}, which takes no init_args: it is no class")
    if not callable(found) or inspect.isclass(found):
        raise ValueError(
            f"{name} is {value!r}, which is no condition: give a function of steps, a condition object, an import path "
            "of either as text, or {'class_path': ..., 'init_args': {...}}"
        )
    return found


def _argument(key: str, value: Any, name: str) -> Any:
    """Returns an argument of a condition, which may be made of others."""
    if key == "conditions" and isinstance(value, list | tuple):
        return [built_condition(item, f"{name}[{place}]") for place, item in enumerate(value)]
    return built_condition(value, name) if key == "condition" else value


def _table(value: Any, name: str) -> EventTable:
    from lightning_replay.events.event_table import EventTable

    if isinstance(value, Mapping):
        kind, arguments = class_and_arguments(value, name) if "class_path" in value else (EventTable, dict(value))
        if arguments.get("condition") is not None:
            arguments["condition"] = built_condition(arguments["condition"], f"{name}.condition")
        if isinstance(arguments.get("events"), list | tuple):
            arguments["events"] = [_event(one, f"{name}.events[{i}]") for i, one in enumerate(arguments["events"])]
        value = kind(**arguments)
    if not isinstance(value, EventTable):
        raise TypeError(f"{name} is {value!r}; an EventTable or a dict of its arguments is accepted")
    return value


def _event(value: Any, name: str) -> Event:
    from lightning_replay.events.event_table import Event

    if isinstance(value, Event):
        return value
    if not isinstance(value, Mapping) or "class_path" in value:
        return Event(built_condition(value, name))
    return Event(**{**value, "condition": built_condition(value.get("condition"), f"{name}.condition")})
