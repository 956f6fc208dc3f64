# SPDX-License-Identifier: Apache-2.0
"""Calls that all or some buffers refuse, after which nothing may have changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from tensordict import TensorDict

from lightning_replay import recipes
from lightning_replay.replay import Replay
from lightning_replay.storage.packed import occupancy_of
from tests.attack.variants import Variant

Refused = Callable[[Replay, TensorDict], object]

REASONS = (TypeError, ValueError, KeyError, IndexError, RuntimeError, OSError)


def _with(key: object, change: Callable[[torch.Tensor], torch.Tensor]) -> Refused:
    """Offers rows of which one column is changed."""

    def offer(replay: Replay, rows: TensorDict) -> object:
        return replay.extend(rows.clone().set(key, change(rows[key].clone())))

    return offer


def _without(*keys: object) -> Refused:
    return lambda replay, rows: replay.extend(rows.exclude(*keys))


def _last(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Only the last row is bad: those before it must not have been stored."""

    def change(column: torch.Tensor) -> torch.Tensor:
        column.view(-1)[-1] = value
        return column

    return change


def _feedback(td_error: Callable[[TensorDict], object], **more: object) -> Refused:
    """TD errors for rows that are stored."""

    def update(replay: Replay, rows: TensorDict) -> object:
        batch = TensorDict({"index": _stored(replay), "generation": torch.ones(2, dtype=torch.int64)}, [2])
        return replay.update_priority(batch, td_error(batch), **more)

    return update


def _stored(replay: Replay) -> torch.Tensor:
    return occupancy_of(replay.storage).slots()[:1].repeat(2)


def _load_state_of_another(replay: Replay, rows: TensorDict) -> None:
    other = recipes.uniform(replay.capacity + 1, 2, seed=0)
    other.extend(rows)
    replay.load_state_dict(other.state_dict())


def _load_half_a_state(replay: Replay, rows: TensorDict) -> None:
    """The state of another sampler is taken over, then that of the writer is refused."""
    other = copy.deepcopy(replay)
    other.seed(99)
    state = other.state_dict()
    state["writer"] = {"nothing": 0}
    replay.load_state_dict(state)


def _ended_but_not_done(replay: Replay, rows: TensorDict) -> object:
    rows = rows.clone()
    rows["next", "terminated"][-1], rows["next", "done"][-1] = True, False
    return replay.extend(rows)


def _reward_of_no_step(replay: Replay, rows: TensorDict) -> object:
    """The last step has a reward at which the functions of the variants raise; it ends, so that no return waits."""
    rows = rows.clone()
    rows["next", "reward"][-1] = 1000.0
    for flag in ("terminated", "done"):
        rows["next", flag][-1] = True
    return replay.extend(rows)


ROWS: dict[str, Refused] = {
    "NaN reward": _with(("next", "reward"), _last(float("nan"))),
    "infinite reward": _with(("next", "reward"), _last(float("-inf"))),
    "terminated, not done": _ended_but_not_done,
    "float trajectory": _with("trajectory", torch.Tensor.float),
    "no rows": lambda replay, rows: replay.extend(rows[:0]),
    "rows of two dimensions": lambda replay, rows: replay.extend(rows.unsqueeze(0)),
    "no TensorDict": lambda replay, rows: replay.extend(rows.to_dict()),
}
COLUMNS: dict[str, Refused] = {
    "wider action": _with("action", lambda column: column.repeat(1, 2)),
    "double action": _with("action", torch.Tensor.double),
    "no action": _without("action"),
    "one more column": lambda replay, rows: replay.extend(rows.clone().set("more", rows["action"])),
}
RETURNS: dict[str, Refused] = {
    "float done": _with(("next", "done"), torch.Tensor.float),
    "no reward": _without(("next", "reward")),
    "no terminated": _without(("next", "terminated")),
    "no next": _without("next"),
}
FUNCTIONS: dict[str, Refused] = {"a function that raises": _reward_of_no_step}
TASKS: dict[str, Refused] = {
    "unknown task": _with("task", _last(9)),
    "no task": _without("task"),
    "progress of an unknown task": lambda replay, rows: replay.progress("nowhere", 0.5),
    "progress above 1": lambda replay, rows: replay.progress("near", 1.5),
}
DRAWS: dict[str, Refused] = {
    "batch of 0": lambda replay, rows: replay.sample(0),
    "batch of 2.5": lambda replay, rows: replay.sample(2.5),
    "batch of '4'": lambda replay, rows: replay.sample("4"),
}
FEEDBACK: dict[str, Refused] = {
    "NaN TD error": _feedback(lambda batch: torch.tensor([1.0, float("nan")])),
    "complex TD error": _feedback(lambda batch: torch.ones(2, dtype=torch.complex64)),
    "three TD errors for two": _feedback(lambda batch: torch.ones(3)),
    "TD errors as text": _feedback(lambda batch: "high"),
    "a misspelt signal": _feedback(lambda batch: torch.ones(2), suprise=torch.ones(2)),
    "a slot that is not stored": lambda replay, rows: replay.update_priority(torch.tensor([10_000]), torch.ones(1)),
    "a batch without index": lambda replay, rows: replay.update_priority(rows, torch.ones(len(rows))),
}
SURPRISE: dict[str, Refused] = {
    "surprise as text": _feedback(lambda batch: torch.ones(2), surprise="high"),
    "negative surprise": _feedback(lambda batch: torch.ones(2), surprise=torch.tensor([1.0, -1.0])),
    "action values without actions": _feedback(lambda batch: torch.ones(2), action_values=torch.ones(2, 3)),
}
STATES: dict[str, Refused] = {
    "the state of another buffer": _load_state_of_another,
    "half a state": _load_half_a_state,
    "no save": lambda replay, rows: replay.load(Path("nowhere")),
    "negative clock": lambda replay, rows: replay.advance(env_steps=5, updates=-1),
    "seed of text": lambda replay, rows: replay.seed("a"),
}


def refusals(replay: Replay, variant: Variant) -> dict[str, Refused]:
    """The calls that a buffer of this variant refuses now, by name."""
    found = ROWS | DRAWS | STATES
    if len(replay):  # the first rows may be of any columns
        found |= COLUMNS
    if len(replay) or variant.n_steps > 1:
        found |= RETURNS
    if variant.has_functions:
        found |= FUNCTIONS
    if variant.recipe == "parallel_curriculum":
        found |= TASKS
    if replay.takes_feedback and len(replay):
        found |= FEEDBACK
    if variant.learns_surprise and len(replay):
        found |= SURPRISE
    return found
