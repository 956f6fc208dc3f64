# SPDX-License-Identifier: Apache-2.0
"""The files of a saved RLlib replay buffer: a folder for each module, and what is known of episodes and counters."""

from __future__ import annotations

import json
import os
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import numpy as np

if TYPE_CHECKING:
    from lightning_replay.checkpoint import SavedSize
    from rllib_ext.episode_buffer import RecipeEpisodeReplayBuffer
    from rllib_ext.module_replay import ModuleReplay

MANIFEST = "buffer.json"
FORMAT_VERSION = 1


class SavedBuffer(NamedTuple):
    """A buffer that was read and checked, not taken over yet."""

    modules: dict[str, ModuleReplay]
    state: dict[str, Any]
    warmup_steps: int


def write_buffer(
    buffer: RecipeEpisodeReplayBuffer, folder: Path, warmup_steps: int, previous: Path | None = None
) -> SavedSize:
    """Writes a buffer into ``folder``; the manifest comes last.

    Args:
        buffer: it is not changed.
        folder: created where missing.
        warmup_steps: of the algorithm, before any restore postponed its learning.
        previous: an earlier save, whose unchanged files are linked.

    Returns:
        Bytes of all files, and of those written.
    """
    from lightning_replay.checkpoint import SavedSize, save_replay

    folder.mkdir(parents=True, exist_ok=True)
    sizes = []
    for name, module in buffer.modules.items():
        earlier = None if previous is None else previous / _folder_of(name)
        sizes.append(save_replay(module.replay, folder / _folder_of(name), previous=earlier))
    state = json.dumps(buffer.plain_state())
    manifest = {
        "format": "lightning-replay-rllib",
        "version": FORMAT_VERSION,
        "warmup_steps": warmup_steps,
        "bytes": sum(size.total for size in sizes),
        "crc32": zlib.crc32(state.encode()),
        "state": state,
    }
    temporary = folder / f"{MANIFEST}.{uuid.uuid4().hex[:8]}.tmp"
    temporary.write_text(json.dumps(manifest))
    os.replace(temporary, folder / MANIFEST)
    return SavedSize(sum(size.total for size in sizes), sum(size.written for size in sizes))


def read_buffer(buffer: RecipeEpisodeReplayBuffer, folder: Path) -> SavedBuffer:
    """Reads and checks what :func:`write_buffer` wrote, into new modules with the options of ``buffer``.

    Raises:
        DamagedFileError: a file is missing, truncated or changed.
        ValueError: a newer format, or a buffer of another recipe or other options.
    """
    from lightning_replay.state_files import DamagedFileError

    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version = int(manifest["version"])
        if version <= FORMAT_VERSION:
            text, checksum, warmup_steps = manifest["state"], manifest["crc32"], int(manifest["warmup_steps"])
            if zlib.crc32(text.encode()) != checksum:
                raise ValueError("its checksum differs")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(
            f"{folder / MANIFEST} is missing or damaged ({error}); nothing was restored. Restore an earlier checkpoint"
        ) from error
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{folder / MANIFEST} has format version {version}; this lightning-replay reads versions up to "
            f"{FORMAT_VERSION}. Install a newer one"
        )
    state = json.loads(text)
    modules = buffer.modules_for(state)
    for name, module in modules.items():
        module.replay.load(folder / _folder_of(name))
    return SavedBuffer(modules, state, warmup_steps)


def check_spaces(modules: Mapping[str, ModuleReplay], spaces: Mapping[str, Any]) -> None:
    """Compares stored observations with the spaces of the environment and of the module.

    Args:
        modules: just read.
        spaces: RLlib's, pairs of observation and action space, by module and for the environment.

    Raises:
        ValueError: the observations stored have the shapes of neither.
    """
    for name, module in modules.items():
        if module.converter.observation is None:
            continue
        stored = sorted(leaf.shape for leaf in module.converter.observation.leaves)
        known = {key: pair[0] for key, pair in spaces.items() if pair[0] is not None}
        candidates = {key: _shapes(space) for key, space in known.items() if key in (name, "__env__")}
        several = [shapes for space in known.values() for shapes in _shapes_of_agents(space)]
        if candidates and stored not in [*candidates.values(), *several]:
            raise ValueError(
                f"the saved buffer holds observations of shapes {stored}; here they have {candidates}. Nothing was "
                "restored; restore_replay=False restores the algorithm without the buffer"
            )


def _folder_of(module_id: str) -> str:
    return f"module-{quote(module_id, safe='')}"


def _shapes(space: Any) -> list[tuple[int, ...]]:
    import tree

    return sorted(np.asarray(leaf).shape for leaf in tree.flatten(space.sample()))


def _shapes_of_agents(space: Any) -> list[list[tuple[int, ...]]]:
    """Of each entry of a Dict space, which in an environment of several agents is an agent's."""
    return [_shapes(entry) for entry in getattr(space, "spaces", {}).values()] if hasattr(space, "keys") else []
