# SPDX-License-Identifier: Apache-2.0
"""A replay built from a recipe's name or from class paths, as in an RLlib config or a YAML file."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from lightning_replay.options import accepted_names, check_kind, did_you_mean
from lightning_replay.sharded.options import SHARD_OPTIONS
from rllib_ext.buffer.images import image_columns

if TYPE_CHECKING:
    import numpy as np

    from lightning_replay.replay import Replay
    from lightning_replay.schedulers import ReturnProgress

# Options of a buffer put together from parts, beside the parts.
PARTS = ("sampler", "writer", "transform")
PART_OPTIONS = (
    *("capacity", "device", "memmap", "observations", "frame_stack", "image_key", "frame_capacity"),
    *("check_finite", "check_continuity", "seed"),
)
# Recipes that keep rows by importance, and take n_steps and discount of returns to be formed before they are stored.
_BY_IMPORTANCE = ("surprise_retention",)
Returns = tuple[int | tuple[int, int], float]  # length, or the interval of lengths, and discount
_SET_BY_RLLIB = {
    "n_steps": ".training(n_step=...)",
    "discount": ".training(gamma=...)",
    "batch_size": ".training(train_batch_size_per_learner=...)",
}
CAPACITIES = ("capacity", "capacity_per_task")
# A lost EnvRunner leaves episodes that never end, so that more and more of them seem to run.
RECIPE_DEFAULTS: dict[str, dict[str, Any]] = {"event_tables": {"forget_stale": True, "max_trajectories": 128}}
_EXAMPLE = "lightning_replay.samplers.PrioritizedSampler"
# By the name of an argument: its text is a class path, or a function that is not called. A dict may hold only
# arguments.
_CONDITIONS = ("condition", "conditions", "goal")
_FUNCTIONS = (*_CONDITIONS, "reward", "terminated", "potential")
_PATHS = (*PARTS, "scheduler", *_FUNCTIONS)
_CLASSES = {"tables": "lightning_replay.events.EventTable", "events": "lightning_replay.events.Event"}
_LISTS = (*_CLASSES, "conditions")


def build_replay(recipe: str | None, options: Mapping[str, Any], returns: Returns = (1, 0.99)) -> Replay:
    """Builds the buffer of a recipe, or of parts without one. ``returns`` are of rows that are kept by importance."""
    for name in options:
        if name in _SET_BY_RLLIB:
            raise ValueError(f"{name} is not an option of replay_config; RLlib has it: {_SET_BY_RLLIB[name]}")
    replay = _from_parts(options, returns) if recipe is None else _from_recipe(recipe, options, returns)
    if replay.sequence_length is not None:
        raise ValueError(
            f"{replay.sampler_name} draws sequences, and RLlib's modules without state learn from single steps; "
            "recurrent modules get sequences from replays of single steps, by max_seq_len in their model_config and "
            'burn_in_len. Use replay_config("uniform", ...) or replay_config("prioritized", ...)'
        )
    return replay


def _from_recipe(recipe: str, options: Mapping[str, Any], returns: Returns) -> Replay:
    from lightning_replay import recipes
    from lightning_replay.replay import Replay
    from lightning_replay.writers import RetentionWriter

    is_path = isinstance(recipe, str) and "." in recipe
    function = imported(recipe, "recipe", "my_module.my_recipe") if is_path else recipes.by_name(recipe)
    named = accepted_names(function) or inspect.signature(function).parameters
    accepted = [name for name in named if name not in {*_SET_BY_RLLIB, "prefetch"}]
    # A function of a user's own need not take the seed, which configure gives.
    takes_seed = "seed" in accepted
    seed = options.get("seed")
    options = {name: value for name, value in options.items() if name != "seed" or takes_seed}
    _refuse_unknown(f"recipe {recipe!r}", options, accepted)
    arguments = {name: built(value, name) for name, value in options.items()}
    if options.get("frame_stack") is not None and "image_key" in accepted:
        arguments["image_key"] = image_columns(options.get("image_key"))
    if recipe in _BY_IMPORTANCE:
        arguments["n_steps"], arguments["discount"] = _single_length(returns)
    # RLlib gives the batch size with each draw. The recipe checks this one against the capacity.
    replay = function(**{**RECIPE_DEFAULTS.get(recipe, {}), **arguments, "batch_size": 1})
    check_kind(f"what recipe {recipe!r} returned", replay, Replay, "a lightning_replay.Replay")
    if isinstance(replay.writer, RetentionWriter) and recipe not in _BY_IMPORTANCE:
        raise ValueError(
            f"recipe {recipe!r} keeps rows by importance, which RLlib's returns have to be formed for. Leave the "
            "recipe out and name the parts: replay_config(capacity=..., writer={'class_path': ...})"
        )
    if seed is not None and not takes_seed:
        replay.seed(seed)
    return replay


def _from_parts(options: Mapping[str, Any], returns: Returns) -> Replay:
    from torchrl.data.replay_buffers import Sampler, Writer
    from torchrl.envs import Compose, Transform

    from lightning_replay.recipes import frames_at_worst, storage_for
    from lightning_replay.replay import Replay
    from lightning_replay.transforms import NStepTransitions

    if all(options.get(name) is None for name in PARTS):
        raise ValueError(
            "replay_config needs a recipe (see lightning_replay.recipes), or a sampler, writer or transform"
        )
    _refuse_unknown("a buffer put together from parts", options, [*PARTS, *PART_OPTIONS])
    capacity = options["capacity"]
    frame_stack = options.get("frame_stack")
    image_key = options.get("image_key")

    def part(value: object, name: str, kind: type) -> Any:
        """Returns a part of the replay, built from its class path if necessary."""
        if value is not None:
            # A config may build several buffers, and a part belongs to one buffer.
            value = copy.deepcopy(built(value, name, defaults={"capacity": capacity}))
            check_kind(name, value, kind, f"a TorchRL {kind.__name__}, or its class path")
        return value

    given = options.get("transform") or []
    given = given if isinstance(given, list | tuple) else [given]
    transforms = [part(value, "transform", Transform) for value in given]
    n_steps = 1
    worst = None
    if uses_retention(None, options):
        n_steps, discount = _single_length(returns)
        worst = functools.partial(frames_at_worst, capacity, n_steps=n_steps)
        if n_steps > 1:
            transforms.append(NStepTransitions(n_steps, discount, options.get("check_continuity", True)))
    return Replay(
        storage=storage_for(
            capacity,
            device=options.get("device", "cpu"),
            memmap=options.get("memmap"),
            observations=options.get("observations", "twice"),
            frame_stack=frame_stack,
            image_key=image_columns(image_key) if frame_stack is not None else image_key or "pixels",
            frame_capacity=options.get("frame_capacity"),
            default_frame_capacity=worst,
            n_steps=n_steps,
        ),
        sampler=part(options.get("sampler"), "sampler", Sampler),
        writer=part(options.get("writer"), "writer", Writer),
        transform=Compose(*transforms) if len(transforms) > 1 else next(iter(transforms), None),
        batch_size=1,
        **{name: options[name] for name in ("check_finite", "check_continuity", "seed") if name in options},
    )


def _single_length(returns: Returns) -> tuple[int, float]:
    n_step, gamma = returns
    if not isinstance(n_step, int):
        raise ValueError(
            f"n_step is {tuple(n_step)}, an interval to draw lengths from, and the rows of this buffer are kept by "
            "importance: their returns are formed once, before they are stored. Give one length, .training(n_step=3)"
        )
    return n_step, gamma


def _refuse_unknown(owner: str, options: Mapping[str, Any], accepted: list[str]) -> None:
    unknown = [name for name in options if name not in accepted and options[name] is not None]
    if unknown:
        of_buffer = ["layout", "num_learners", "modules", "info_keys", "progress"]
        hint = did_you_mean(unknown[0], [*accepted, *of_buffer, *SHARD_OPTIONS]) or (
            f"; accepted are {', '.join(accepted)}, for the whole buffer {', '.join(of_buffer)}, and for one that is "
            f"divided over Ray actors {', '.join(SHARD_OPTIONS)}"
        )
        raise ValueError(f"{owner} has no option {', '.join(map(repr, unknown))}{hint}")
    capacity = next((name for name in CAPACITIES if name in accepted), "capacity")
    if options.get(capacity) is None:
        raise ValueError(f"{owner} needs {capacity}, the most transitions kept. Add {capacity}=100_000.")


def uses_retention(recipe: str | None, options: Mapping[str, Any]) -> bool:
    """Returns whether a buffer with these arguments of :func:`build_replay` has a ``RetentionWriter``."""
    from lightning_replay.writers import RetentionWriter

    if recipe is not None:
        return recipe in _BY_IMPORTANCE
    writer = options.get("writer")
    path = writer.get("class_path") if isinstance(writer, Mapping) else writer
    kind = imported(path, "writer") if isinstance(path, str) else type(path)
    return inspect.isclass(kind) and issubclass(kind, RetentionWriter)


def build_progress(value: object, replay: Replay) -> ReturnProgress | None:
    """Builds the object that turns the returns of finished episodes into progress signals. Copies one that is given."""
    from lightning_replay.schedulers import ReturnProgress
    from lightning_replay.table_replay import CurriculumReplay

    if value is None:
        return None
    if not isinstance(replay, CurriculumReplay):
        raise ValueError('progress is for the tasks of a curriculum: replay_config("parallel_curriculum", ...)')
    progress = built(value, "progress")
    check_kind("progress", progress, ReturnProgress, "of lightning_replay.schedulers, as MeanReturn(low=0.0, high=1.0)")
    return copy.deepcopy(progress)


class MinSizes:
    """Gives tables without a least size the size of the batch.

    While no table holds as many rows, the longest is drawn from.
    """

    def __init__(self, replay: Replay, options: Mapping[str, Any]) -> None:
        from lightning_replay.samplers.tables import ScheduledSampler, TableShares
        from lightning_replay.writers.tables import DEFAULT_TABLE

        self._tables, self._sampler = cast("Any", replay.tables), cast("Any", replay.sampler)
        self._has_shares = isinstance(replay.sampler, TableShares)
        self._unset: list[str] = []  # tables
        if self._has_shares and "tables" in options:
            self._unset = [table.name for table in built(options["tables"], "tables") if table.min_size is None]
        if options.get("min_size") is None and self._has_shares and "tables" in options:
            self._unset.append(DEFAULT_TABLE)
        elif options.get("min_size") is None and isinstance(replay.sampler, ScheduledSampler) and "tasks" in options:
            # The tables of all tasks are alike.
            self._unset = list(self._tables.names[:1])

    def update(self, batch_size: int, held: np.ndarray | None = None) -> None:
        """Sets the minimum sizes before a draw.

        ``held`` is the number of entries in each table, if they lie in other replays.
        """
        if not self._unset:
            return
        tables = self._tables
        held = tables.length if held is None else held
        if self._has_shares:
            held = held[[self._sampler.table_shares[name] > 0 for name in tables.names]]
        reachable = min(batch_size, max(1, int(held.max())))
        sizes = {name: min(reachable, int(tables.capacity[tables.number(name)])) for name in self._unset}
        if not self._has_shares:
            self._sampler.min_size = sizes[self._unset[0]]
        elif not sizes.items() <= self._sampler.min_sizes.items():
            self._sampler.set_min_sizes(sizes)


def built(
    value: object,
    name: str,
    *,
    defaults: Mapping[str, Any] | None = None,
    functions: bool = False,
    example: str = _EXAMPLE,
    examples: Mapping[str, str] | None = None,
) -> Any:
    """Builds the object that ``{"class_path": ..., "init_args": {...}}`` describes. Returns any other value as it is.

    Parts of a buffer, schedulers, and conditions may be given only by their path. Event tables and their events may be
    given by their arguments, without a class path.

    Args:
        value: of an option. ``init_args`` may also hold class paths.
        name: of the option.
        defaults: arguments of each class that accepts them, left out or ``None``. With ``functions``, arguments of the
            outer class.
        functions: whether a path may name a function, which is called if there are ``init_args``. The path of a
            condition always may.
        example, examples: paths for messages. ``examples`` are of arguments, by dotted name.

    Example:
        >>> condition = {"class_path": "lightning_replay.events.reward_at_least", "init_args": {"threshold": 1.0}}
        >>> built([{"name": "goal", "condition": condition, "history_length": 5, "capacity": 100}], "tables")
        [EventTable('goal', events=[Event(condition=reward_at_least(1.0), history_length=5)], capacity=100, \
share=None, min_size=None)]
    """
    key = name.rpartition(".")[2].partition("[")[0]
    # The capacity also belongs to nested samplers. Seed and score of levels belong only to the buffer.
    nested = None if functions else defaults
    own = functools.partial(built, defaults=nested, functions=functions, example=example, examples=examples)
    if key in _LISTS and isinstance(value, list | tuple):
        # In ``events`` a condition alone may stand for its event.
        items = [{"condition": item} if key == "events" and _is_condition(item) else item for item in value]
        return [own(item, f"{name}[{place}]") for place, item in enumerate(items)]
    if key in _CLASSES and name.endswith("]") and isinstance(value, Mapping) and "class_path" not in value:
        value = {"class_path": _CLASSES[key], "init_args": value}
    elif key in _PATHS and isinstance(value, str) and "." in value:  # other texts are for a recipe of the user's
        value = {"class_path": value}
    if not (isinstance(value, Mapping) and "class_path" in value):
        if key == "age" and isinstance(value, Mapping):
            # The recipe builds an age of its options, of which the half-life may be a schedule.
            return {option: own(item, f"{name}.{option}") for option, item in value.items()}
        return value
    arguments = value.get("init_args") or {}
    if set(value) - {"class_path", "init_args"} or not isinstance(arguments, Mapping):
        raise ValueError(f"{name} is {value!r}; accepted are class_path and init_args, arguments by name")
    found = imported(value["class_path"], name, (examples or {}).get(name, example))
    if not inspect.isclass(found):
        if not functions and key not in _FUNCTIONS:
            raise ValueError(f"{name} names {value['class_path']!r}, which is no class but a {type(found).__name__}")
        if not arguments:
            return found
    defaults = defaults or {}
    present = {key: item for key, item in arguments.items() if item is not None or key not in defaults}
    given = {key: own(item, f"{name}.{key}") for key, item in present.items()}
    # The constructor's signature: TorchRL's samplers have a __new__ that hides it.
    accepted = inspect.signature(found.__init__ if inspect.isclass(found) else found).parameters
    return found(**{key: item for key, item in defaults.items() if key in accepted} | given)


def _is_condition(item: object) -> bool:
    path = item.get("class_path") if isinstance(item, Mapping) else item
    return isinstance(path, str) and not path.endswith(".Event")


def imported(path: object, name: str, example: str = _EXAMPLE) -> Any:
    """Returns the object that the dotted path of an option names."""
    module, _, attribute = str(path).rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name} names {path!r}, which cannot be imported ({error}). Give a full path, as "
            f"{example!r}, of a module that Python finds"
        ) from error
