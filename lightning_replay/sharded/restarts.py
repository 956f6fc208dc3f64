# SPDX-License-Identifier: Apache-2.0
"""Restarts of lost shards, empty or with a save."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeVar

from lightning_replay.sharded.actors import ShardActors

logger: logging.Logger = logging.getLogger(__name__)

Folder = TypeVar("Folder")


def folder_to_start_with(shards: ShardActors, shard: int, last_save: Sequence[Folder] | None) -> Folder | None:
    """Returns the folder of the save that a shard starts with; ``None`` where it starts empty.

    A save that it could not be started with, as its files were deleted, is not tried again.

    Args:
        shards: of the replay.
        shard: number.
        last_save: folders by shard.
    """
    restarts = shards.epochs[shard] > 1 and shards.options.restart_shards == "last_save"
    if not restarts or last_save is None:
        return None
    if shards.failed_starts[shard]:
        logger.warning("shard %d could not be started with its save %s, and starts empty", shard, last_save[shard])
        return None
    return last_save[shard]


def start_lost_shards(shards: ShardActors) -> None:
    """Starts shards again that were lost since they last answered, and waits for them.

    Raises:
        TimeoutError: a shard has not answered in time; it is named.
    """
    for shard in range(len(shards)):
        shards.send(shard, "report")
    shards.settle()
    shards.wait_for_starts()
    shards.check_all_answer()
