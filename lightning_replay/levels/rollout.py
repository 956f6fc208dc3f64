# SPDX-License-Identifier: Apache-2.0
"""Rollouts of several actors, split at episode ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.levels.level_ids import Actor
from lightning_replay.levels.selector import LevelSelector
from lightning_replay.storage.row_layout import gather_branch, nest

__all__ = ["segments", "update_rollout"]

_NEXT_KEYS = ("reward", "state_value", "terminated", "truncated", "done")
_KEYS = ("state_value", "logits", *(("next", key) for key in _NEXT_KEYS))


def update_rollout(
    levels: LevelSelector, rollout: TensorDictBase, level_id: Tensor, actors: Sequence[Actor] | None = None
) -> None:
    """Updates levels with the steps of a rollout, actor by actor and episode by episode.

    Call it before the policy update, with the values predicted during collection.

    Args:
        levels: to update.
        rollout: ``[actors, T]`` with the keys of :meth:`LevelSelector.update`; other keys are ignored.
        level_id: int64 ``[actors, T]`` or ``[actors, T, 1]``: the level under which each step's observation was made.
        actors: their names; 0, 1, 2, ... if absent.

    Raises:
        ValueError: shapes that do not fit, a level that changes within an episode, or what ``update`` refuses.
    """
    cut = list(segments(rollout, level_id, actors))
    for actor, level, _, _ in cut:  # a rollout with a wrong level must not be learned in part
        levels.running.oldest(actor, level)
    for actor, level, steps, done in cut:
        levels.update(actor, level, steps, done)


def segments(
    rollout: TensorDictBase, level_id: Tensor, actors: Sequence[Actor] | None = None
) -> Iterator[tuple[Actor, int, TensorDictBase, bool]]:
    """Yields actor, level, steps ``[T']`` and whether the episode is done, for every piece of an episode in a rollout.

    Arguments and errors as :func:`update_rollout`.
    """
    names = list(range(rollout.shape[0])) if actors is None else list(actors)
    if level_id.ndim == 3 and level_id.shape[-1] == 1:
        level_id = level_id.squeeze(-1)
    if rollout.ndim != 2 or level_id.shape != rollout.shape or len(names) != rollout.shape[0]:
        raise ValueError(
            f"the rollout has shape {list(rollout.shape)}, level_id {list(level_id.shape)} and there are {len(names)} "
            "actors; give [actors, T] for both"
        )
    steps = rollout.select(*_KEYS, strict=False).cpu()
    ends = steps["next", "done"].reshape(steps.shape).tolist()
    played = level_id.tolist()
    tree = nest(key if isinstance(key, tuple) else (key,) for key in steps.keys(True, True))
    for row, actor in enumerate(names):
        start = 0
        columns = {(key,) if isinstance(key, str) else key: column[row] for key, column in steps.items(True, True)}
        for stop in range(1, steps.shape[1] + 1):
            if ends[row][stop - 1] or stop == steps.shape[1]:
                if len(set(played[row][start:stop])) > 1:
                    raise ValueError(
                        f"steps {start} to {stop - 1} of actor {actor!r} are one episode on the levels "
                        f"{sorted(set(played[row][start:stop]))}; level_id is that of the step's own observation"
                    )
                # built without TensorDict's indexing, which takes five times as long
                piece = {key: column[start:stop] for key, column in columns.items()}
                size = torch.Size([stop - start])
                cut = gather_branch(tree, piece, size, steps.device)
                yield actor, played[row][start], cut, bool(ends[row][stop - 1])
                start = stop
