# SPDX-License-Identifier: Apache-2.0
"""The files of a saved RLlib replay buffer: a folder for each module, and the state of episodes and counters."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import gymnasium as gym
import numpy as np
import tree

if TYPE_CHECKING:
    from lightning_replay.saving import SavedSize
    from rllib_ext.buffer.episode_buffer import RecipeEpisodeReplayBuffer
    from rllib_ext.buffer.module_replay import ModuleReplay

MANIFEST = "buffer.json"
MANIFEST_OF_SHARDS = "shards.json"  # in place of the other, of a sharded replay
ROWS = "rows"
FORMAT = "lightning-replay-rllib"
FORMAT_VERSION = 2
SHARDS_VERSION = 1  # of the other manifest


class SavedBuffer(NamedTuple):
    """A buffer that was read and checked, and is not in use yet."""

    modules: dict[str, ModuleReplay]
    state: dict[str, Any]
    warm_up: WarmUp
    algorithm: Mapping[str, Any] | None


class WarmUp(NamedTuple):
    """Warm-up of an algorithm before it learns, in environment steps."""

    steps: int  # as the user gave them
    learning_starts: int  # of the whole run; a restore without the buffer postpones it


def write_buffer(
    buffer: RecipeEpisodeReplayBuffer,
    folder: Path,
    warm_up: WarmUp,
    previous: Path | None = None,
    algorithm: Mapping[str, Any] | None = None,
) -> SavedSize:
    """Writes a buffer into ``folder``, created if missing: new rows beside the old, then the manifest that names them.

    Args:
        buffer, folder, warm_up: to write, and where to.
        previous: the folder of an earlier save, whose unchanged files are linked.
        algorithm: fingerprints of the checkpoint's other files, see :mod:`rllib_ext.checkpoint.files`.

    Returns:
        Bytes of all rows' files, and of those written.
    """
    from lightning_replay.checkpoint.replay import save_replay
    from lightning_replay.saving import DamagedFileError, SavedSize
    from lightning_replay.saving.directory import replaced_save

    earlier = None
    if previous is not None:
        with contextlib.suppress(DamagedFileError, ValueError):
            earlier = previous / Path(read_buffer_manifest(previous)["data"]).name
    with replaced_save(folder, MANIFEST, folder=ROWS) as save:
        sizes = []
        for name, module in buffer.modules.items():
            same = None if earlier is None else earlier / _folder_of(name)
            sizes.append(save_replay(module.replay, save.data / _folder_of(name), previous=same))
        size = SavedSize(sum(size.total for size in sizes), sum(size.written for size in sizes))
        save.manifest |= {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "warm_up": warm_up._asdict(),
            "bytes": size.total,
            "state": buffer.plain_state(),
            "algorithm": algorithm,
        }
    return size


def read_buffer(buffer: RecipeEpisodeReplayBuffer, folder: Path) -> SavedBuffer:
    """Reads and checks what :func:`write_buffer` wrote, into new modules with the options of ``buffer``.

    Raises:
        DamagedFileError: a file is missing, truncated or changed.
        ValueError: a newer format, or a buffer of another recipe or other options.
        MemoryError: less memory is free than the rows take, beside those of ``buffer``.
    """
    from lightning_replay.saving import DamagedFileError
    from lightning_replay.saving.directory import read_save

    def read(manifest: dict[str, Any], rows: Path) -> SavedBuffer:
        modules = buffer.options.restored(manifest["state"])
        for name, module in modules.items():
            try:
                module.replay.load(rows / _folder_of(name))
            except FileNotFoundError as error:
                raise DamagedFileError(f"{error}; nothing was restored. Restore an earlier checkpoint") from error
        return SavedBuffer(modules, manifest["state"], WarmUp(**manifest["warm_up"]), manifest["algorithm"])

    return read_save(folder, lambda: read_buffer_manifest(folder), read)


def read_warm_up(folder: Path) -> WarmUp | None:
    """Returns the warm-up of a saved algorithm; ``None`` where no buffer was saved.

    Raises:
        DamagedFileError, ValueError: as :func:`read_buffer`.
    """
    if not folder.is_dir():
        return None
    is_of_shards = (folder / MANIFEST_OF_SHARDS).exists() and not (folder / MANIFEST).exists()
    return WarmUp(**(read_shards_manifest if is_of_shards else read_buffer_manifest)(folder)["warm_up"])


def read_shards_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a sharded replay; errors as :func:`read_buffer`."""
    return _checked_manifest(folder / MANIFEST_OF_SHARDS, SHARDS_VERSION)


def _checked_manifest(file: Path, version: int) -> dict[str, Any]:
    from lightning_replay.saving import DamagedFileError
    from lightning_replay.saving.directory import read_manifest

    try:
        return read_manifest(file, version)
    except (FileNotFoundError, DamagedFileError) as error:
        raise DamagedFileError(
            f"{file} is missing or damaged ({error}); nothing was restored. Restore an earlier checkpoint"
        ) from error


def check_spaces(modules: Mapping[str, ModuleReplay], spaces: Mapping[str, Any]) -> None:
    """Compares the stored columns with the spaces of the environment and of the module.

    Args:
        modules: just read.
        spaces: RLlib's, pairs of observation and action space, by module and for the environment.

    Raises:
        ValueError: observations or actions stored have other shapes, or actions another kind of number.
    """
    for module_id, module in modules.items():
        for place, name in enumerate(("observation", "action")):
            columns = module.converter.columns.get(name)
            if columns is None:
                continue
            present = {
                owner: _description(tree.flatten(space.sample()), name)
                for key, pair in spaces.items()
                if key in (module_id, "__env__")
                for owner, space in _with_entries(key, pair[place])
            }
            stored = _description([np.empty(leaf.shape, leaf.dtype) for leaf in columns.leaves], name)
            if present and stored not in present.values():
                raise ValueError(
                    f"the saved buffer holds {name}s of {stored}; here they are {present}. Nothing was "
                    "restored; restore_replay=False restores the algorithm without the buffer"
                )


def read_buffer_manifest(folder: Path) -> dict[str, Any]:
    """Returns the checked manifest of a buffer; errors as :func:`read_buffer`."""
    from lightning_replay.saving import DamagedFileError
    from lightning_replay.saving.serialization import MALFORMED

    file = folder / MANIFEST
    if not file.exists() and (folder / MANIFEST_OF_SHARDS).exists():
        raise ValueError(
            f"{folder} holds a replay of several shards, and this algorithm has one buffer in the driver; nothing was "
            "restored. Give replay_config(num_shards=...); any number of shards can be restored from it"
        )
    manifest = _checked_manifest(file, FORMAT_VERSION)
    try:
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}")
        WarmUp(**manifest["warm_up"]), Path(manifest["data"])
    except MALFORMED as error:
        raise DamagedFileError(
            f"{file} is damaged ({error}); nothing was restored. Restore an earlier checkpoint"
        ) from error
    return manifest


def _folder_of(module_id: str) -> str:
    return f"module-{quote(module_id, safe='')}"


def _with_entries(key: str, space: gym.Space[Any] | None) -> list[tuple[str, gym.Space[Any]]]:
    """Returns a space and, as of several agents, its entries; a module's columns may have come from any of them."""
    agents = space.spaces.items() if isinstance(space, gym.spaces.Dict) else ()
    return [] if space is None else [(key, space), *((f"{key}[{agent!r}]", entry) for agent, entry in agents)]


def _description(leaves: list[Any], name: str) -> list[Any]:
    """Returns the shapes, and of actions whether the numbers are floats."""
    arrays = [np.asarray(leaf) for leaf in leaves]
    if name == "observation":
        return sorted(array.shape for array in arrays)
    return sorted((array.shape, "floats" if array.dtype.kind == "f" else "integers") for array in arrays)
