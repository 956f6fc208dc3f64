# SPDX-License-Identifier: Apache-2.0
"""Event tables from an RLlib config or a YAML file, with conditions named by import path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rllib_ext.class_paths import call, imported

if TYPE_CHECKING:
    from lightning_replay.events.conditions.condition import ConditionLike
    from lightning_replay.events.event_table import Event, EventTable

_CONDITION_ARGUMENTS = ("condition", "conditions")  # of conditions made of others


def built_tables(tables: Any) -> list[EventTable]:
    """Returns the tables of ``replay_config("event_tables", tables=[...])``.

    Args:
        tables: each an :class:`~lightning_replay.events.EventTable`, or a dict of its arguments, with conditions as in
            :func:`built_condition` and events as ``{"condition": ..., "history_length": ...}``.

    Raises:
        TypeError: no list, or an entry that is neither.
        ValueError: an unknown argument, a condition that cannot be imported or called, or values that are refused.

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

    Raises:
        ValueError: a path that cannot be imported, or an object that cannot be called.
    """
    if isinstance(value, str):
        value = {"class_path": value}
    if isinstance(value, Mapping):
        if "class_path" not in value or set(value) - {"class_path", "init_args"}:
            raise ValueError(
                f"{name} has the keys {sorted(value)}; a condition is an import path, or class_path and init_args"
            )
        arguments = value["init_args"] or {} if "init_args" in value else None
        return _from_path(value["class_path"], arguments, name)
    if not callable(value) or inspect.isclass(value):
        raise ValueError(
            f"{name} is {value!r}, which is no condition: give a function of steps, a condition object, an import path "
            "of either as text, or {'class_path': ..., 'init_args': {...}}"
        )
    return value


def _from_path(path: Any, arguments: Mapping[str, Any] | None, name: str) -> ConditionLike:
    condition = imported(path, name)
    if inspect.isclass(condition):
        given = {key: _argument(key, item, name) for key, item in (arguments or {}).items()}
        condition = call(condition, given, name)
    elif arguments is not None:
        raise ValueError(
            f"{name} names the function {path!r} with init_args; a function is the condition itself. Give its path "
            "alone, or a class"
        )
    if not callable(condition):
        raise ValueError(f"{name} names {path!r}, a {type(condition).__name__} that cannot be called with steps")
    return condition


def _argument(key: str, value: Any, name: str) -> Any:
    """Returns an argument of a condition, which may itself be a condition or several."""
    if key not in _CONDITION_ARGUMENTS:
        return value
    if isinstance(value, list | tuple):
        return [built_condition(item, f"{name}.{key}[{place}]") for place, item in enumerate(value)]
    return built_condition(value, f"{name}.{key}")


def _table(value: Any, name: str) -> EventTable:
    from lightning_replay.events.event_table import EventTable

    if isinstance(value, EventTable):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {value!r}; an EventTable or a dict of its arguments is accepted")
    arguments = dict(value)
    if "class_path" in arguments:
        if imported(arguments["class_path"], name) is not EventTable or set(arguments) - {"class_path", "init_args"}:
            raise ValueError(f"{name} is {value!r}; class_path of a table is lightning_replay.events.EventTable")
        arguments = dict(arguments.get("init_args") or {})
    if arguments.get("condition") is not None:
        arguments["condition"] = built_condition(arguments["condition"], f"{name}.condition")
    events = arguments.get("events")
    if isinstance(events, list | tuple):
        arguments["events"] = [_event(event, f"{name}.events[{place}]") for place, event in enumerate(events)]
    return call(EventTable, arguments, name)


def _event(value: Any, name: str) -> Event:
    from lightning_replay.events.event_table import Event

    if not isinstance(value, Mapping) or "class_path" in value:
        return value if isinstance(value, Event) else Event(built_condition(value, name))
    arguments = dict(value)
    if "condition" in arguments:
        arguments["condition"] = built_condition(arguments["condition"], f"{name}.condition")
    return call(Event, arguments, name)
