# SPDX-License-Identifier: Apache-2.0
"""Options and counters of a saved buffer, as text and plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHOWN_OPTIONS = ("batch_size", "n_steps", "discount", "prefetch")
_PARTS = ("storage", "sampler", "writer", "transform")


def options_of(built_from: Mapping[str, Any], built_by: Any) -> dict[str, str]:
    """Returns the parts of a buffer and their options as text.

    Args:
        built_from: names of the parts, from the state.
        built_by: class and options, see :func:`lightning_replay.saving.spec.describe`.
    """
    arguments = _arguments(built_by)
    shown = {}
    for part in _PARTS:
        described = arguments.get(part)
        names = built_from.get(f"{part}s" if part == "transform" else part)
        names = names if isinstance(names, list) else [names]
        if described is not None:
            shown[part] = text_of(described)
        elif any(names):
            shown[part] = ", ".join(str(name) for name in names if name)
    return shown | {name: text_of(arguments[name]) for name in _SHOWN_OPTIONS if arguments.get(name) is not None}


def text_of(described: Any) -> str:
    """Returns a described object as a call: ``PrioritizedSampler(capacity=100, priority_exponent=0.6)``.

    Options that are ``None`` are left out.

    Example:
        >>> text_of({"class": "lightning_replay.samplers.uniform:UniformSampler", "arguments": {"seed": None}})
        'UniformSampler()'
    """
    if isinstance(described, list):
        return f"[{', '.join(map(text_of, described))}]"
    if not isinstance(described, dict):
        return repr(described) if isinstance(described, str) else str(described)
    kind, content = next(iter(described.items()))
    if kind == "class":
        given = described.get("arguments", {}).items()
        return f"{_name(content)}({', '.join(f'{key}={text_of(one)}' for key, one in given if one is not None)})"
    if kind == "dict":
        return f"{{{', '.join(f'{key}: {text_of(one)}' for key, one in content.items())}}}"
    if kind == "tuple":
        return f"({', '.join(map(text_of, content))})"
    return _name(content) if kind == "import" else str(content)


def table_shares_of(built_by: Any) -> dict[str, float]:
    """Returns the share of a batch by table, of a sampler with fixed shares; otherwise nothing."""
    shares = _arguments(_arguments(built_by).get("sampler")).get("table_shares")
    return dict(shares["dict"]) if isinstance(shares, dict) and isinstance(shares.get("dict"), dict) else {}


def counters_of(state: Mapping[str, Any], given: int | None) -> dict[str, int]:
    """Returns rows given, batches drawn and TD errors returned, as far as the state has them, by name."""
    writer, feedback = state["writer"], state["feedback"]
    counters: dict[str, int] = {}
    if given is not None:
        counters["rows given"] = given
    if "refused" in writer:
        counters["rows refused"], counters["rows evicted"] = int(writer["refused"]), int(writer["evicted"])
    clocks = _nested(state["sampler"], "clocks")
    if clocks is not None:
        counters["batches drawn"] = int(clocks["draws"])
    if "received" in feedback:
        counters["TD errors returned"] = int(feedback["received"])
        counters["TD errors dropped, too late"] = int(feedback["late"])
    return counters


def _nested(sampler: Mapping[str, Any], name: str) -> Any:
    """Returns an entry of a sampler's state, or of the sampler that it draws its first rows from."""
    while name not in sampler:
        if not isinstance(sampler.get("first"), Mapping):
            return None
        sampler = sampler["first"]
    return sampler[name]


def _arguments(described: Any) -> Mapping[str, Any]:
    arguments = described.get("arguments") if isinstance(described, dict) else None
    return arguments if isinstance(arguments, dict) else {}


def _name(path: Any) -> str:
    return str(path).rpartition(":")[2]
