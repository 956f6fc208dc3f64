# SPDX-License-Identifier: Apache-2.0
"""What a training loop needs of a replay, wherever its rows are."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from lightning_replay.jit import BreaksGraphs


class TrainingReplay(BreaksGraphs):
    """A replay that a data module fills and draws from.

    :class:`~lightning_replay.Replay` is one, in this process;
    :class:`~lightning_replay.sharded.replay.ShardedReplay` another, whose rows are in Ray actors, and
    :class:`~lightning_replay.MixedReplay` two of the first. Methods are described at ``Replay``.
    """

    is_shared: bool = False  #: Whether several processes may use it, each with what :meth:`for_rank` returns.
    name: str = ""  #: Of a shared one, the same in every process that has it.
    needs_consecutive_rows: Any = False  #: Whether rows of several environments may not be stored in turn.
    sequence_length: int | None = None  #: Steps of the sequences that are drawn; ``None`` where rows are.
    burn_in: int = 0  #: Steps at the start of each sequence that only warm up a recurrent state.
    needs_initial_surprise: Any = False  #: Whether it lacks a function for the surprise of new rows.
    # Properties of both: most transitions kept; rows of a batch; the class of the sampler; lengths and discounts of
    # returns; and whether something here takes feedback and has had none since the last draw.
    capacity: Any
    batch_size: Any
    sampler_name: Any
    returns: Any
    awaits_priorities: Any
    #: Whether the episodes that ran in loaded files end before the next rows are stored.
    awaits_new_episodes: Any = False
    has_snapshots: Any = False  #: Whether rows are written while a save reads them as they were.
    #: The :class:`~lightning_replay.Replay` of this process that new rows enter; ``None`` where they enter others.
    entered: Any = None

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks of a curriculum, in the order of the column ``task``; none for other replays."""
        return []

    # Of both as well, see ``Replay``.
    __len__: Any
    for_rank: Any  #: Returns the same replay for one of N processes, which draws its share of each batch.
    extend_columns: Any
    sample: Any
    update_priority: Any
    end_episodes: Any
    advance: Any
    seed: Any
    generator_fingerprint: Any  #: Returns a value that is equal while nothing is drawn.
    stats: Any
    save: Any
    load: Any

    def progress(self, task: str, value: float) -> None:
        raise NotImplementedError("this replay has no curriculum, whose tasks make progress")

    def actor_tasks(self, num_actors: int) -> list[int]:
        raise NotImplementedError("this replay has no curriculum, whose tasks actors play")

    def set_initial_surprise(self, measure: Any) -> None:
        """Sets a function, TensorDict ``[N]`` to ``[N]``, where it is needed."""

    def frozen_state(self) -> AbstractContextManager[dict[str, Any]]:
        """Context manager for the state as it is now, however others write and draw while a save reads it."""
        raise TypeError(f"a {type(self).__name__} saves itself: replay.save(path)")
