# SPDX-License-Identifier: Apache-2.0
"""What a training loop needs of a replay, wherever its rows are."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from tensordict.utils import NestedKey


class TrainingReplay:
    """A replay that a data module fills and draws from.

    :class:`~lightning_replay.Replay` is one, in this process;
    :class:`~lightning_replay.sharded.replay.ShardedReplay` another, whose rows are in Ray actors.

    Attributes:
        is_shared: whether several processes may fill it and draw from it, each with what :meth:`for_rank` returns.
        name: of a shared one, the same in every process that has it.
    """

    is_shared: bool = False
    name: str = ""

    @property
    def needs_consecutive_rows(self) -> bool:
        """Whether rows of several environments may not be stored in turn."""
        return False

    @property
    def needs_initial_surprise(self) -> bool:
        """Whether it lacks a function for the surprise of new rows."""
        return False

    @property
    def capacity(self) -> int:
        """Most transitions kept."""
        raise NotImplementedError

    @property
    def sampler_name(self) -> str:
        raise NotImplementedError

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks of a curriculum, in the order of the column ``task``; none for other replays."""
        return []

    @property
    def returns(self) -> list[tuple[int, float]]:
        """Length above 1 and discount of the returns that are formed."""
        raise NotImplementedError

    @property
    def awaits_priorities(self) -> bool:
        """Whether something here takes feedback and has had none since the last draw."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def for_rank(self, rank: int, world_size: int) -> TrainingReplay:
        """Returns the same replay for one of ``world_size`` processes, which draws its share of each batch."""
        raise NotImplementedError

    def extend_columns(self, columns: Mapping[NestedKey, Tensor | np.ndarray]) -> Tensor:
        """Stores transitions given column by column; returns their indices, int64."""
        raise NotImplementedError

    def sample(self) -> TensorDictBase:
        raise NotImplementedError

    def update_priority(self, index: Tensor | TensorDictBase, td_error: Tensor | None = None, **signals: Any) -> None:
        """Returns TD errors ``[B]`` and other signals to the rows of a batch."""

    def end_episodes(self, trajectories: Iterable[int] | None = None) -> Any:
        """Ends running episodes, whose environments were closed."""

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clocks of schedules."""

    def progress(self, task: str, value: float) -> None:
        """Passes the progress of a task to the scheduler of a curriculum."""
        raise NotImplementedError("this replay has no curriculum, whose tasks make progress")

    def actor_tasks(self, num_actors: int) -> list[int]:
        """Returns the next tasks of actors, as indices into :attr:`tasks`."""
        raise NotImplementedError("this replay has no curriculum, whose tasks actors play")

    def set_initial_surprise(self, measure: Any) -> None:
        """Sets a function, TensorDict ``[N]`` to ``[N]``, or removes it with ``None``."""

    def seed(self, seed: int) -> Any:
        """Restarts the draws from ``seed``."""

    def draw_stamp(self) -> Hashable:
        """Returns a value that is equal while nothing is drawn."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        raise NotImplementedError

    def save(self, path: str | Path, *, previous: str | Path | None = None) -> None:
        """Saves the replay into the directory ``path``, sharing what has not changed with the save in ``previous``."""

    def load(self, path: str | Path) -> None:
        """Restores a saved replay into this one, which was built with the same options."""
