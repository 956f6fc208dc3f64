# SPDX-License-Identifier: Apache-2.0
"""Replay buffers and levels in RLlib's checkpoints, bound to their other files by digests."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import gymnasium as gym
import numpy as np
import tree
from pyarrow import fs
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_AGENT_STEPS_SAMPLED_LIFETIME, NUM_ENV_STEPS_SAMPLED_LIFETIME

from lightning_replay.saving import DamagedFileError, SavedSize
from lightning_replay.saving.directory import data_of, read_manifest, read_save, replaced_save
from lightning_replay.saving.files import MALFORMED
from lightning_replay.saving.folders import Folder
from rllib_ext.buffer.buffer import ModuleReplay, RecipeEpisodeReplayBuffer

logger: logging.Logger = logging.getLogger(__name__)
MANIFEST = "buffer.json"
# A sharded replay has this manifest in place of the manifest of one replay.
MANIFEST_OF_SHARDS = "shards.json"
ROWS = "rows"
FORMAT = "lightning-replay-rllib"
FORMAT_VERSION = 2
# Version of the manifest of shards.
SHARDS_VERSION = 1
FOLDER = "replay_buffer"
_OWN_FOLDERS = ("levels", "replay_buffer")
CheckFiles = Callable[[Mapping[str, Any] | None], None]


class CheckpointedAlgorithm:
    """Adds a part to ``save_to_path`` and ``restore_from_path`` of an algorithm. RLlib 2.60 has no hook for it."""

    def __init__(self, algorithm: Any, part: CheckpointPart) -> None:
        self._part = part
        self._save_algorithm = algorithm.save_to_path
        self._restore_algorithm = algorithm.restore_from_path
        algorithm.save_to_path = self.save_to_path
        algorithm.restore_from_path = self.restore_from_path

    def save_to_path(
        self, path: str | Path | None = None, *, filesystem: fs.FileSystem | None = None, **options: Any
    ) -> str:
        """Saves the algorithm as RLlib does, and then the replay or the levels beside it."""
        # The state is taken at the moment of RLlib's state.
        state = self._part.state()
        saved: str = self._save_algorithm(path, filesystem=filesystem, **options)
        checkpoint = dataclasses.replace(Folder.at(path, filesystem), path=saved)
        # Last, with the fingerprints of RLlib's files: a save that was cut short does not match them.
        fingerprints = {name: _record(checkpoint.filesystem, file) for name, file in _files(checkpoint).items()}
        self._part.write(checkpoint / self._part.folder, state, fingerprints)
        return saved

    def restore_from_path(
        self, path: str | Path, *, component: str | None = None, filesystem: fs.FileSystem | None = None, **options: Any
    ) -> None:
        """Restores the algorithm and the part, or only a ``component`` of the algorithm.

        ``restore_replay`` or ``restore_levels`` among the options is whether to restore the part. If the part is
        refused, nothing is changed. ``FileNotFoundError`` means that the checkpoint lacks it. ``DamagedFileError``
        means that files are damaged or of two checkpoints. ``ValueError`` means that it is of another recipe, capacity,
        or space, or of other levels.
        """
        given = options.pop(self._part.option, None)
        if component is not None:
            self._restore_algorithm(path, component=component, filesystem=filesystem, **options)
            return
        restores = self._part.restores if given is None else given
        checkpoint = Folder.at(path, filesystem)
        folder = checkpoint / self._part.folder
        if restores and not folder.exists():
            raise FileNotFoundError(
                f"{path} holds no {self._part.folder}: it was saved without rllib_ext.configure, or the folder is "
                f"gone. Nothing was restored; {self._part.instead}"
            )
        check_files = functools.partial(check_fingerprints, checkpoint, instead=self._part.instead)
        # The part is read and checked before the algorithm changes. `finish` puts it in place after the change.
        finish = self._part.read(folder, check_files) if restores else self._part.leave_out(folder)
        self._restore_algorithm(path, filesystem=filesystem, **options)
        finish()


class CheckpointPart(Protocol):
    """A part of an algorithm that RLlib's checkpoints lack."""

    folder: str  #: Name of the part's folder in a checkpoint.
    option: str  #: Option of ``restore_from_path`` that leaves the part out.
    restores: bool  #: Default of the option.
    instead: str  #: Effect of the option, for errors.

    def state(self) -> Any:
        """Returns the state. Called before RLlib saves the algorithm."""

    def write(self, folder: Folder, state: Any, files: Mapping[str, Any]) -> None:
        """Writes a state into ``folder``, with the fingerprints of RLlib's files."""

    def read(self, folder: Folder, check_files: CheckFiles) -> Callable[[], None]:
        """Reads and checks the part, and returns a function that puts it in place after the restore."""

    def leave_out(self, folder: Folder) -> Callable[[], None]:
        """Returns a function to call after a restore without the part. ``folder`` may not exist."""


class ReplayPart:
    """Saves and restores the replay buffer and the warm-up. Without the buffer, a restored algorithm warms up again."""

    folder = FOLDER
    option = "restore_replay"
    instead = "restore_replay=False restores the algorithm alone and starts with a new warm-up"

    def __init__(self, algorithm: Any, *, restore: bool = True, incremental: bool = True) -> None:
        self._algorithm = algorithm
        self.restores: bool = restore
        self._incremental = incremental
        self._warmup_steps: int = algorithm.config.num_steps_sampled_before_learning_starts
        self._last_save: Path | None = None

    @property
    def _buffer(self) -> RecipeEpisodeReplayBuffer:
        return self._algorithm.local_replay_buffer

    def state(self) -> WarmUp:
        """Returns the warm-up at the moment of RLlib's state."""
        return WarmUp(self._warmup_steps, self._algorithm.config.num_steps_sampled_before_learning_starts)

    def write(self, folder: Folder, state: WarmUp, files: Mapping[str, Any]) -> None:
        """Writes the buffer into ``folder``, linking files of the last save if saves are incremental."""
        previous = self._last_save if self._incremental and folder.local is not None else None
        with folder.to_write() as local:
            size = write_buffer(self._buffer, local, state, previous, files)
        self._last_save = folder.local or self._last_save
        logger.info("replay buffer saved: %s bytes, %s of them written", f"{size.total:,}", f"{size.written:,}")

    def read(self, folder: Folder, check_files: CheckFiles) -> Callable[[], None]:
        """Reads and checks a saved buffer, and returns the function that takes it over."""
        with folder.to_read() as local:
            saved = read_buffer(self._buffer, local)
        check_files(saved.algorithm)
        check_spaces(saved.modules, self._algorithm.spaces or {})
        return functools.partial(self._take_over, saved)

    def leave_out(self, folder: Folder) -> Callable[[], None]:
        """Returns the function that restarts the warm-up without the saved buffer."""
        with folder.to_read(deep=False) as local:
            return functools.partial(self._restart_warm_up, read_warm_up(local))

    def _take_over(self, saved: SavedBuffer) -> None:
        self._buffer.take_over(saved.modules, saved.state)
        self._go_on_from(saved.warm_up)

    def _go_on_from(self, warm_up: WarmUp) -> None:
        self._warmup_steps = warm_up.steps
        self._start_learning_at(warm_up.learning_starts)

    def _restart_warm_up(self, saved: WarmUp | None) -> None:
        self._warmup_steps = self._warmup_steps if saved is None else saved.steps
        # RLlib compares the warm-up with the steps of the whole run, which were restored.
        missing = max(0, self._warmup_steps - self._buffer.num_env_steps_stored)
        metrics = self._algorithm.metrics
        if self._algorithm.config.count_steps_by == "agent_steps":
            steps = sum(metrics.peek((ENV_RUNNER_RESULTS, NUM_AGENT_STEPS_SAMPLED_LIFETIME), default={}).values())
        else:
            steps = metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)
        self._start_learning_at(int(steps) + missing)
        logger.info("the replay buffer was not restored: %d steps are collected before learning continues", missing)

    def _start_learning_at(self, steps: int) -> None:
        algorithm = self._algorithm
        if algorithm.config.num_steps_sampled_before_learning_starts != steps:
            config = algorithm.config.copy(copy_frozen=False)
            config.num_steps_sampled_before_learning_starts = steps
            config.freeze()
            algorithm.config = config


class WarmUp(NamedTuple):
    """Warm-up of an algorithm before it learns, in environment steps."""

    steps: int  #: Warm-up steps as the user gave them.
    learning_starts: int  #: Steps before the first update of the whole run. A restore without the buffer postpones it.


class SavedBuffer(NamedTuple):
    """A buffer that was read and checked, and is not in use yet."""

    modules: dict[str, ModuleReplay]
    state: dict[str, Any]
    warm_up: WarmUp
    algorithm: Mapping[str, Any] | None


def write_buffer(
    buffer: RecipeEpisodeReplayBuffer,
    folder: Path,
    warm_up: WarmUp,
    previous: Path | None = None,
    algorithm: Mapping[str, Any] | None = None,
) -> SavedSize:
    """Writes a buffer into ``folder``, new rows before the manifest. Links unchanged files of the save ``previous``."""
    from lightning_replay.saves import save_replay

    earlier = None
    if previous is not None:
        # A damaged earlier save is not linked to. The new save is written whole.
        with contextlib.suppress(DamagedFileError, ValueError):
            earlier = data_of(previous, read_buffer_manifest(previous))
    with replaced_save(folder, MANIFEST, folder=ROWS, replaces=MANIFEST_OF_SHARDS) as save:
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
    """Reads and checks what :func:`write_buffer` wrote, into new modules with the options of ``buffer``."""

    def read(manifest: dict[str, Any], rows: Path) -> SavedBuffer:
        """Reads each module of a save into a new replay."""
        modules = buffer.options.restored(manifest["state"])
        for name, module in modules.items():
            try:
                module.replay.load(rows / _folder_of(name))
            except FileNotFoundError as error:
                raise DamagedFileError(f"{error}; nothing was restored. Restore an earlier checkpoint") from error
        return SavedBuffer(modules, manifest["state"], WarmUp(**manifest["warm_up"]), manifest["algorithm"])

    return read_save(folder, lambda: read_buffer_manifest(folder), read)


def read_warm_up(folder: Path) -> WarmUp | None:
    """Returns the warm-up of a saved algorithm, or ``None`` if no buffer was saved."""
    if not folder.is_dir():
        return None
    is_of_shards = (folder / MANIFEST_OF_SHARDS).exists() and not (folder / MANIFEST).exists()
    return WarmUp(**(read_shards_manifest if is_of_shards else read_buffer_manifest)(folder)["warm_up"])


def read_shards_manifest(folder: Path) -> dict[str, Any]:
    """Returns the checked manifest of a sharded replay."""
    return _checked_manifest(folder / MANIFEST_OF_SHARDS, SHARDS_VERSION)


def read_buffer_manifest(folder: Path) -> dict[str, Any]:
    """Returns the checked manifest of a buffer. Errors are as of :func:`read_buffer`."""
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


def _checked_manifest(file: Path, version: int) -> dict[str, Any]:
    try:
        return read_manifest(file, version)
    except (FileNotFoundError, DamagedFileError) as error:
        raise DamagedFileError(
            f"{file} is missing or damaged ({error}); nothing was restored. Restore an earlier checkpoint"
        ) from error


def _folder_of(module_id: str) -> str:
    return f"module-{quote(module_id, safe='')}"


def check_spaces(modules: Mapping[str, ModuleReplay], spaces: Mapping[str, Any]) -> None:
    """Compares the stored columns with the spaces of the environment and of the module."""
    for module_id, module in modules.items():
        for place, name in enumerate(("observation", "action")):
            columns = module.converter.columns.get(name)
            if columns is None:
                continue
            given = [spaces[key][place] for key in (module_id, INPUT_ENV_SPACES) if key in spaces]
            # Of several agents, a module's columns may have come from any of them.
            given += [entry for space in given if isinstance(space, gym.spaces.Dict) for entry in space.values()]
            present = [_description(tree.flatten(space.sample()), name) for space in given if space is not None]
            stored = _description([np.empty(leaf.shape, leaf.dtype) for leaf in columns.leaves], name)
            if present and stored not in present:
                raise ValueError(
                    f"the saved buffer holds {name}s of {stored}; here they are {present}. Nothing was "
                    "restored; restore_replay=False restores the algorithm without the buffer"
                )


def _description(leaves: list[Any], name: str) -> list[Any]:
    arrays = [np.asarray(leaf) for leaf in leaves]
    if name == "observation":
        return sorted(array.shape for array in arrays)
    return sorted((array.shape, "floats" if array.dtype.kind == "f" else "integers") for array in arrays)


def check_fingerprints(checkpoint: Folder, recorded: Mapping[str, Any] | None, instead: str) -> None:
    """Compares RLlib's files in a checkpoint with their fingerprints."""
    present = _files(checkpoint)
    for name, record in (recorded or {}).items():
        if name not in present or _record(checkpoint.filesystem, present[name]) != record:
            raise DamagedFileError(
                f"{checkpoint} holds files of two checkpoints: {name} is not the one that was saved with the rest, "
                f"because a save into this folder was cut short or the file is damaged. Nothing was restored. Restore "
                f"an earlier checkpoint; {instead}"
            )


def _files(checkpoint: Folder) -> dict[str, str]:
    found = {}
    # Tune's own files begin with a dot.
    for info in checkpoint.filesystem.get_file_info(fs.FileSelector(checkpoint.path, recursive=True)):
        relative = PurePosixPath(info.path.strip("/")).relative_to(checkpoint.path.strip("/"))
        is_own = relative.parts[0] in _OWN_FOLDERS
        if info.type == fs.FileType.File and not is_own and not any(part.startswith(".") for part in relative.parts):
            found[relative.as_posix()] = info.path
    return dict(sorted(found.items()))


def _record(filesystem: fs.FileSystem, file: str) -> dict[str, Any]:
    with filesystem.open_input_file(file) as stream:
        digest = hashlib.file_digest(stream, functools.partial(hashlib.blake2b, digest_size=20))
        return {"bytes": stream.size(), "blake2b": digest.hexdigest()}
