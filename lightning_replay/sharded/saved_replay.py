# SPDX-License-Identifier: Apache-2.0
"""Saves that a :class:`~lightning_replay.sharded.replay.ShardedReplay` loads: of shards, or of one replay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_replay.saving import DamagedFileError
from lightning_replay.saving.directory import read_manifest
from lightning_replay.saving.replays import MANIFEST as MANIFEST_OF_REPLAY
from lightning_replay.saving.replays import MANIFEST_OF_SHARDS, SHARDS_VERSION, replay_manifest
from lightning_replay.saving.serialization import MALFORMED
from lightning_replay.sharded.actors import CallOfAll, ShardActors
from lightning_replay.sharded.folders import Folder
from lightning_replay.sharded.reports import Losses
from lightning_replay.sharded.row_routing import Layout, plain_layout
from lightning_replay.sharded.saves import FileNames, names_of_shards, read_shards_state
from lightning_replay.sharded.served_folders import folders_of_shards

NAMES = FileNames(MANIFEST_OF_SHARDS, MANIFEST_OF_REPLAY, "draws")


class SavedReplay(NamedTuple):
    """A save of shards, or of a replay without.

    Attributes:
        data: the folder of its data.
        shards: the folders of shards in the save; of a replay without, which is the save itself, one without a name.
        recipe: its name; ``None`` of a replay without shards.
        capacities: of all shards together, by option; ``None`` of a replay without.
        state: saved beside the shards; ``None`` of a replay without.
    """

    data: str
    shards: list[str]
    recipe: str | None
    capacities: dict[str, int] | None
    state: dict[str, Any] | None

    @classmethod
    def read(cls, folder: Folder) -> SavedReplay:
        """Returns what is saved in a folder.

        Raises:
            FileNotFoundError: nothing.
            DamagedFileError: a file is missing or damaged.
            ValueError: a newer format.
        """
        with folder.to_read(deep=False) as local:
            if not (local / MANIFEST_OF_SHARDS).exists():
                if not (local / MANIFEST_OF_REPLAY).exists():
                    raise FileNotFoundError(
                        f"no replay was saved in {folder}: there is neither {MANIFEST_OF_SHARDS} nor "
                        f"{MANIFEST_OF_REPLAY}"
                    )
                return cls(Path(replay_manifest(local)["data"]).name, [""], None, None, None)
            manifest = read_manifest(local / MANIFEST_OF_SHARDS, SHARDS_VERSION)
        try:
            data, recipe = Path(manifest["data"]).name, manifest["recipe"]
            shards = names_of_shards(data, manifest["num_shards"])
        except MALFORMED as error:
            raise DamagedFileError(
                f"{folder / MANIFEST_OF_SHARDS} is damaged ({error}); load an earlier save"
            ) from error
        return cls(data, shards, recipe, manifest["capacities"], read_shards_state(folder, data, NAMES))

    def check(self, folder: Folder, recipe: str, capacities: Mapping[str, int]) -> None:
        """Refuses a save of shards for a replay of another recipe or other capacities.

        Args:
            folder: of the save.
            recipe, capacities: of the replay.

        Raises:
            ValueError: with both.
        """
        if self.recipe not in (recipe, None):
            raise ValueError(
                f"{folder} holds a sharded replay {self.recipe!r}, and this one is {recipe!r}. Build "
                f"ShardedReplay({self.recipe!r}, ...) to load it. Nothing was loaded"
            )
        if self.capacities not in (capacities, None):
            raise ValueError(
                f"{folder} holds a sharded replay of {self.capacities}, and this one is of {capacities}. Build one "
                "with those of the save to load it. Nothing was loaded"
            )

    def stage(self, shards: ShardActors, folder: Folder) -> tuple[CallOfAll, list[Folder] | None]:
        """Lets shards read the save without using it yet; of other shards than there are, episodes are dealt out anew.

        Args:
            shards: of :class:`~lightning_replay.sharded.shard.ReplayShard`.
            folder: of the save.

        Returns:
            The call, whose values are the rows of each shard and, where they were dealt out, their layout; and the
            folders of the shards, ``None`` where their rows come from all of them.

        Raises:
            DamagedFileError, ValueError: the save cannot be used by a shard.
            RuntimeError, TimeoutError: a shard was lost meanwhile, or has not answered in time.
        """
        seen = folders_of_shards(shards, folder, self.data)
        parts = [[one / name if name else one for name in self.shards] for one in seen]
        limit_s = shards.options.save_timeout_s
        own = None
        if self.recipe is not None and len(self.shards) == len(shards):
            own = folders = [part[shard] for shard, part in enumerate(parts)]
            sent = shards.send_all("stage", lambda shard: (folders[shard],), limit_s=limit_s)
        else:
            sent = shards.send_all("stage_resharded", lambda shard: (parts[shard],), limit_s=limit_s)
        shards.values_of(sent)
        return sent, own


def first_state(staged: CallOfAll) -> dict[str, Any]:
    """Returns a state for rows that were saved without one: one process has given them, and no draws are owed."""
    rows = sum(count for count, _ in staged.values.values())
    layout: Layout | None = next((one for _, one in staged.values.values() if one is not None), None)
    return {
        "draws": {},
        "limiter": {"inserted": rows, "sampled": 0, "filled": rows, "balance": 0.0},
        "losses": Losses().state(),
        "counts": [1, 0, rows],
        "layout": plain_layout(layout),
    }
