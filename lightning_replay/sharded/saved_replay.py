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
from lightning_replay.sharded.actors import CallOfAll
from lightning_replay.sharded.folders import Folder
from lightning_replay.sharded.reports import Losses
from lightning_replay.sharded.row_routing import Layout
from lightning_replay.sharded.saves import FileNames, names_of_shards, read_shards_state

NAMES = FileNames(MANIFEST_OF_SHARDS, MANIFEST_OF_REPLAY, "draws")


class SavedReplay(NamedTuple):
    """A save of shards, or of a replay without, which has neither recipe, capacities nor state."""

    data: str  # the folder of its data
    shards: list[str]  # their folders in it; of a replay without shards one without a name, as it is the save itself
    recipe: str | None
    capacities: dict[str, int] | None  # of all shards together, by option
    state: dict[str, Any] | None  # saved beside the shards

    @classmethod
    def read(cls, folder: Folder) -> SavedReplay:
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
            data, recipe, capacities = Path(manifest["data"]).name, manifest["recipe"], manifest["capacities"]
            shards = names_of_shards(data, manifest["num_shards"])
        except MALFORMED as error:
            raise DamagedFileError(
                f"{folder / MANIFEST_OF_SHARDS} is damaged ({error}); load an earlier save"
            ) from error
        return cls(data, shards, recipe, capacities, read_shards_state(folder, data, NAMES))

    def check(self, folder: Folder, recipe: str, capacities: Mapping[str, int]) -> None:
        """Refuses a save of shards for a replay of another recipe or other capacities."""
        if self.recipe is None:
            return
        if self.recipe != recipe:
            raise ValueError(
                f"{folder} holds a sharded replay {self.recipe!r}, and this one is {recipe!r}. Build "
                f"ShardedReplay({self.recipe!r}, ...) to load it. Nothing was loaded"
            )
        if self.capacities != capacities:
            raise ValueError(
                f"{folder} holds a sharded replay of {self.capacities}, and this one is of {capacities}. Build one "
                "with those of the save to load it. Nothing was loaded"
            )


def first_state(staged: CallOfAll) -> dict[str, Any]:
    """Returns a state for rows that were saved without one: one process has given them, and no draws are owed."""
    rows = sum(count for count, _ in staged.values.values())
    layout: Layout | None = next((one for _, one in staged.values.values() if one is not None), None)
    return {
        "draws": {},
        "limiter": {"inserted": rows, "sampled": 0, "filled": rows, "balance": 0.0},
        "losses": Losses().state(),
        "counts": [1, 0, rows],
        "layout": layout,
    }
