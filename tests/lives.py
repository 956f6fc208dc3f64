# SPDX-License-Identifier: Apache-2.0
"""The lives of buffers of every kind: rows, draws, feedback, ended episodes, a save and a load.

``python -m tests.lives FILE`` writes the batches of all of them and the names of the library's functions that ran.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from lightning_replay import Age, MixedReplay, PackedStorage, Replay, recipes
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.events.conditions import FirstInEpisode
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.samplers import (
    PrioritizedSampler,
    ReshuffledSampler,
)
from lightning_replay.transforms import NStepTransitions
from tests.frame_steps import frame_rows, stacks_of
from tests.recipe_options import built, fitting
from tests.transitions import numbered_steps

VERBS = ("build", "first rows", "later rows", "draw", "update", "end", "save", "load")


def buffers() -> dict[str, Callable[[], Any]]:
    """Every recipe, and options of them that lead to other tensors."""
    options: dict[str, dict[str, Any]] = {name: {} for name in recipes.known()}
    options |= {f"{name}, n_steps": {"n_steps": 3} for name in ("uniform", "prioritized", "event_tables", "mixup")}
    options |= {"neighborhood_mixup, prioritized": {"priority_exponent": 0.6, "update_partners": True}}
    options |= {f"{name}, prioritized": {"priority_exponent": 0.6} for name in ("event_tables", "sequences")}
    options |= {"event_tables, sequences": {"sequence_length": 3, "burn_in": 1}}
    options |= {"uniform, once": {"observations": "once"}}
    options |= {"prioritized, ragged": {"ragged": ["tokens"], "element_capacity": 90}}
    options |= {f"{name}, aged": {"age": Age(half_life=9.0)} for name in ("uniform", "prioritized")}
    options |= {"uniform, frames": {"frame_stack": 2}, "prioritized, prefetch": {"prefetch": 2}}
    for name in ("uniform", "prioritized", "sequences", "groups", "parallel_curriculum"):
        options[f"{name}, different"] = {"replace": False}
    options |= {
        "uniform, aged, different": {"age": Age(half_life=9.0), "replace": False},
        "uniform, pass": {"replace": "pass"},
    }
    return {name: lambda name=name, given=given: _built(name, given) for name, given in options.items()} | {
        "own parts": lambda: Replay(
            storage=PackedStorage(64),
            sampler=PrioritizedSampler(64, backend="torch"),
            transform=NStepTransitions(3, 0.9),
            batch_size=8,
            seed=0,
        ),
        "own parts, conditions": lambda: recipes.event_tables(
            64,
            8,
            tables=[EventTable("odd", FirstInEpisode(reward_at_least(3.0)), capacity=20, history_length=2)],
            seed=0,
        ),
        "own parts, reshuffled": lambda: Replay(
            storage=PackedStorage(64), sampler=ReshuffledSampler(), batch_size=8, seed=0
        ),
        "mixed": lambda: _mixed("prioritized"),
        "mixed, sequences": lambda: _mixed("sequences"),
    }


def _mixed(online: str) -> MixedReplay:
    """Of which only the online side has priorities."""
    offline = "sequences" if online == "sequences" else "uniform"
    sides = {"online": _built(online, {"priority_exponent": 0.6}), "offline": _built(offline, {})}
    return recipes.mixed(**sides, batch_size=8, seed=0)


def _built(name: str, options: dict[str, Any]) -> Replay:
    return built(name.partition(",")[0], capacity=64, batch_size=8, seed=0, **options)


BUFFERS = buffers()


def steps_for(name: str, replay: Replay, first: int, count: int) -> TensorDict:
    if "frames" in name:
        return frame_rows(stacks_of(range(first, first + count + 1), 2))
    trajectory = first if "conditions" in name else None
    steps = numbered_steps(first, count, done_every=10, trajectory=trajectory)
    if "ragged" in name:
        tokens = [torch.arange(number % 4) for number in range(first, first + count)]
        steps["tokens"] = torch.nested.as_nested_tensor(tokens, layout=torch.jagged)
    return fitting(replay, steps)


@cache
def life(name: str, where: str, mode: Callable[[], Any]) -> list[TensorDict]:
    """Returns the batches of a buffer's life, of which the verb ``where`` is called in the mode."""

    def here(verb: str) -> Any:
        return mode() if where in (verb, "all") else nullcontext()

    with here("build"):
        replay, other = BUFFERS[name](), BUFFERS[name]()
    for one in (replay, other):
        if isinstance(one, MixedReplay):
            one.offline.extend(steps_for(name, replay, 1000, 30))
    given = [steps_for(name, replay, first, count) for first, count in ((0, 24), (24, 24), (48, 1), (49, 30))]
    with here("first rows"):
        replay.extend(given[0])
    with here("later rows"):
        replay.extend(given[1])
        replay.add(given[2][0])
        replay.extend_columns(dict(given[3].items(True, True)))
    batches = []
    for _ in range(3):
        with here("draw"):
            batches.append(replay.sample())
        errors = torch.arange(float(batches[-1].numel())).view(batches[-1].shape)
        with here("update"):
            if replay.takes_feedback:
                replay.update_priority(batches[-1], errors)
    with here("end"):
        replay.end_episodes()
    with here("save"):
        state = replay.state_dict()
    with here("load"):
        other.load_state_dict(state)
    replay.extend(given[0])
    other.extend(given[0])
    return [*batches, replay.sample(), other.sample()]


def past_the_end() -> list[int]:
    """Returns the slots that a priority tree finds at the sum of all its values, and past it."""
    tree = PriorityTree(64)
    tree.set(torch.tensor([3, 40]), torch.tensor([1.0, 2.0]))
    return tree.find(torch.tensor([2.9, 3.0, 4.0])).tolist()


def main(file: str) -> None:
    called = set()
    package = str(Path(recipes.__file__).parent)

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            called.add((str(Path(frame.f_code.co_filename).relative_to(package)), frame.f_code.co_name))

    sys.setprofile(note)
    batches = {name: life(name, "never", nullcontext) for name in BUFFERS}
    found = past_the_end()
    sys.setprofile(None)
    # Columns are views of packed rows of other dtypes, which torch.save refuses.
    columns = {
        name: [{key: column.clone() for key, column in batch.items(True, True)} for batch in of_life]
        for name, of_life in batches.items()
    }
    torch.save({"batches": columns, "past the end": found, "called": called}, file)


if __name__ == "__main__":
    main(sys.argv[1])
