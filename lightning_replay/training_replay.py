# SPDX-License-Identifier: Apache-2.0
"""What a training loop needs of a replay, wherever its rows are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from lightning_replay.jit import BreaksGraphs


class TrainingReplay(BreaksGraphs):
    """A replay that a data module fills and draws from.

    :class:`~lightning_replay.Replay` is one in this process. The rows of a
    :class:`~lightning_replay.sharded.replay.ShardedReplay` are in Ray actors. A
    :class:`~lightning_replay.MixedReplay` consists of two ``Replay``. The methods are described at ``Replay``.
    """

    is_shared: bool = False  #: Whether several processes may use it, each with the result of :meth:`for_rank`.
    name: str = ""  #: Name of a shared replay, the same in every process that has it.
    sequence_length: int | None = None  #: Steps of the sequences that are drawn; ``None`` if rows are drawn.
    burn_in: int = 0  #: Steps at the start of each sequence that only warm up a recurrent state.
    #: Whether the episodes that ran in loaded files end before the next rows are stored.
    awaits_new_episodes: bool = False

    @property
    def needs_consecutive_rows(self) -> bool:
        """Whether the rows of an episode must be adjacent in the storage."""
        return False

    @property
    def needs_initial_surprise(self) -> bool:
        """Whether the replay lacks a function for the surprise of new rows."""
        return False

    @property
    def has_snapshots(self) -> bool:
        """Whether a save reads a snapshot, so that writes may go on."""
        return False

    @property
    def entered(self) -> Any:
        """The local ``Replay`` that new rows are stored in, or ``None`` if other processes store them."""
        return None

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks of a curriculum, in the order of the column ``task``, none for other replays."""
        return []

    # Every replay defines these members. They are described at ``Replay``.
    if TYPE_CHECKING:

        @property
        def capacity(self) -> int: ...
        @property
        def batch_size(self) -> int: ...
        @property
        def sampler_name(self) -> str: ...
        @property
        def returns(self) -> list[tuple[int, float]]: ...
        @property
        def awaits_priorities(self) -> bool: ...
        def __len__(self) -> int: ...
        def for_rank(self, rank: int, world_size: int) -> TrainingReplay: ...
        def extend_columns(self, columns: Mapping[NestedKey, Tensor | np.ndarray]) -> Tensor: ...
        def sample(self, batch_size: int | None = None) -> TensorDictBase: ...
        def update_priority(
            self,
            index: Tensor | TensorDictBase,
            td_error: Tensor | None = None,
            *,
            generation: Tensor | None = None,
            **signals: Any,
        ) -> None: ...
        def end_episodes(self, trajectories: Iterable[int] | None = None) -> Tensor | None: ...
        def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None: ...
        def seed(self, seed: int) -> None: ...
        def generator_fingerprint(self) -> bytes: ...
        def stats(self) -> dict[str, Any]: ...
        def save(self, path: str | Path, *, previous: str | Path | None = None) -> Any: ...
        def load(self, path: str | Path) -> None: ...

    def progress(self, task: str, value: float) -> None:
        """Passes the progress of a task to the scheduler of a curriculum. Other replays refuse it."""
        raise NotImplementedError("this replay has no curriculum, whose tasks make progress")

    def actor_tasks(self, num_actors: int) -> list[int]:
        """Returns the next task of each actor. Replays without a curriculum refuse the call."""
        raise NotImplementedError("this replay has no curriculum, whose tasks actors play")

    def set_initial_surprise(self, measure: Callable[[TensorDictBase], Tensor] | None) -> None:
        """Sets a function, TensorDict ``[N]`` to ``[N]``, if the replay needs it."""

    def frozen_state(self) -> AbstractContextManager[dict[str, Any]]:
        """Context manager for the state as it is now, while others write and draw and a save reads it."""
        raise TypeError(f"a {type(self).__name__} saves itself: replay.save(path)")
