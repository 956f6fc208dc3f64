# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files with a replay beside each, which is written, removed and found with it."""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
from collections.abc import Callable, Hashable, Mapping
from concurrent import futures
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_replay.fast_path import overrides
from lightning_replay.saves import FrozenReplay, save_id
from lightning_replay.saving import DamagedFileError
from lightning_replay.saving.directory import exclusive, local_folder, remote_folder
from lightning_replay.saving.files import LOCK_FILE, remove_saved, sync, touch

if TYPE_CHECKING:
    from lightning_replay.training_replay import TrainingReplay

REQUEUED = "hpc_ckpt_"  # begins the names that Lightning gives to the checkpoints of SLURM's signal
_UNFINISHED = ".unfinished"  # marks a replay that its checkpoint file does not name yet, or no longer names


class CheckedCheckpointIO(CheckpointIO):
    """Around the trainer's plug-in: warns once of what cannot be loaded again, and syncs the file."""

    def __init__(self, wrapped: CheckpointIO) -> None:
        self.wrapped = wrapped
        self._is_first = True

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None) -> None:
        """Writes a checkpoint and waits until it is on the disk."""
        # Lightning moves the file from the folder of temporary files, which on another device is a copy: killed then,
        # half a checkpoint would be left. Other plug-ins may write later or elsewhere.
        is_plain = isinstance(self.wrapped, TorchCheckpointIO)
        is_plain = is_plain and not overrides(self.wrapped, TorchCheckpointIO, "save_checkpoint")
        is_local = is_plain and "://" not in str(path)
        written = Path(path).with_name(f".{Path(path).name}.unfinished") if is_local else path
        self.wrapped.save_checkpoint(checkpoint, written, storage_options)
        if self._is_first:
            self._is_first = False
            _warn_of_unloadable(checkpoint)
        if is_local:
            sync(Path(written))
            os.replace(written, path)
        if Path(path).is_file():
            sync(Path(path))
            sync(Path(path).parent)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint by the wrapped plug-in."""
        checkpoint: dict[str, Any] = self.wrapped.load_checkpoint(path, *args, **kwargs)
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint by the wrapped plug-in."""
        self.wrapped.remove_checkpoint(path)

    def teardown(self) -> None:
        """Ends the wrapped plug-in."""
        self.wrapped.teardown()


class ReplayCheckpointIO(CheckedCheckpointIO):
    """Saves ``name.ckpt`` together with a new folder ``name.<updates>.replay/`` beside it, found by the id of its save.

    While :attr:`in_background` is set a thread writes and removes checkpoints, in order and as they were when that was
    requested. What follows a failed one is left out, and :meth:`wait` raises its error.
    """

    def __init__(self, wrapped: CheckpointIO, datamodule: Any) -> None:
        super().__init__(wrapped)
        self.datamodule = datamodule  # a ReplayDataModule, whose file imports this one
        self._newest: tuple[Hashable, Path] | None = None  # state and folder
        self._names: dict[str, str] = {}  # replay of each checkpoint that this plug-in has written
        self.in_background: bool = False
        self._thread = futures.ThreadPoolExecutor(1)
        self._last_task: futures.Future[None] | None = None
        self._pending: Hashable = None  # the state that the thread saves

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None) -> None:
        """Writes a checkpoint with its replay, or only the weights if it has no optimizer states."""
        name = type(self.datamodule).__qualname__
        if checkpoint.get(name) is None or "optimizer_states" not in checkpoint:  # weights only: nothing to resume from
            self.wrapped.save_checkpoint(checkpoint, path, storage_options)
            return
        replay = self.datamodule.replay
        stamp = self.datamodule.replay_stamp()
        # SLURM may end the job as soon as it is requeued, so the file that it resumes from must be whole by then.
        in_background = self.in_background and not Path(path).name.startswith(REQUEUED)
        # Best and last of one state do not wait for each other.
        if not (in_background and stamp == self._pending):
            self.wait()
        if not in_background:
            self._save(checkpoint, path, storage_options, stamp, replay)
            return
        kept = apply_to_collection(checkpoint, torch.Tensor, torch.Tensor.clone)  # copies dictionaries, too
        frozen = FrozenReplay(replay)
        self._pending = stamp
        self._submit(partial(self._save, kept, path, storage_options, stamp, frozen), frozen.close)

    def _submit(self, task: Callable[[], None], cleanup: Callable[[], None] = lambda: None) -> None:
        before = self._last_task

        def follow() -> None:
            try:
                if before is not None:
                    before.result()
                task()
            finally:
                cleanup()

        self._last_task = self._thread.submit(follow)

    def wait(self, *, for_end: bool = True) -> None:
        """Raises the error of what was written in the background, without ``for_end`` only of what has ended by now."""
        task = self._last_task
        if task is not None and (for_end or task.done()):
            futures.wait([task])  # an interrupt leaves it to be waited for
            self._last_task = self._pending = None
            task.result()

    def _save(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        options: object,
        stamp: Hashable,
        replay: TrainingReplay | FrozenReplay,
    ) -> None:
        state = checkpoint[type(self.datamodule).__qualname__]
        if "://" in str(path):
            self._save_at_url(checkpoint, str(path), options, state, replay)
            return
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        # The replay first, then the file that names it, then the replays saved with it before: killed at any time, the
        # file finds its replay.
        with exclusive(file.parent) as is_alone:
            before = self._replay_of(file)
            target = self._save_replay(file, state["updates"], stamp, replay)
            state.update(replay=target.name, replay_id=save_id(target))
            if isinstance(before, Path):
                touch(before / _UNFINISHED)
            super().save_checkpoint(checkpoint, path, options)
            self._names[str(path)] = target.name
            (target / _UNFINISHED).unlink(missing_ok=True)
            if before is not None and before != target:
                _remove_replay(before)
            # Without a lock, a replay that no checkpoint names yet may be another process's in the making.
            if is_alone:
                for stale in self._abandoned(file):
                    _remove_replay(stale)

    def _save_at_url(
        self,
        checkpoint: dict[str, Any],
        url: str,
        options: object,
        state: dict[str, Any],
        replay: TrainingReplay | FrozenReplay,
    ) -> None:
        before = self._replay_of(url)
        name = _unused_name(url, state["updates"])
        target = str(_beside(url, name))
        try:
            with local_folder(target, writes=True) as local:
                replay.save(local)
                state.update(replay=name, replay_id=save_id(local))
        except BaseException:
            _remove_replay(target)
            raise
        super().save_checkpoint(checkpoint, url, options)
        self._names[url] = name
        if before is not None:
            _remove_replay(before)

    def _replay_of(self, path: str | Path) -> Path | str | None:
        # The replay that the checkpoint file names. Others beside it may be the user's.
        try:
            name = self._names.get(str(path)) or self._name_in(path)
        except Exception:  # a plug-in may raise any error for a file that it cannot read
            return None
        return _beside(path, name) if name in _replay_names(path) else None

    def _name_in(self, path: str | Path) -> Any:
        filesystem, place = fsspec.core.url_to_fs(str(path))
        if not (filesystem.isfile(place) or filesystem.isdir(place)):
            raise OSError(f"{path} is neither a file nor a folder")  # reading a pipe would wait for ever
        # Given here, since a variable of torch's can let every other file be unpickled.
        safely = {"weights_only": True} if isinstance(self.wrapped, TorchCheckpointIO) else {}
        return self.wrapped.load_checkpoint(path, **safely)[type(self.datamodule).__qualname__]["replay"]

    def _save_replay(self, file: Path, updates: int, stamp: Hashable, replay: TrainingReplay | FrozenReplay) -> Path:
        # Of the same state as the newest save, its files are linked: save_last=True makes two checkpoints of each.
        before, newest = self._newest or (None, None)
        if newest is not None and before == stamp and newest.is_dir():
            if newest in replays_beside(file):  # the file itself is written again
                return newest
            target = _new_replay(file, updates)
            try:
                left_out = shutil.ignore_patterns(LOCK_FILE, _UNFINISHED)
                shutil.copytree(newest, target, copy_function=os.link, ignore=left_out, dirs_exist_ok=True)
                for folder in (*(path for path in target.rglob("*") if path.is_dir()), target, target.parent):
                    sync(folder)
                return target
            except OSError:  # a file system without hard links
                shutil.rmtree(target, ignore_errors=True)
        target = _new_replay(file, updates)
        replay.save(target, previous=newest)  # links the files that have not changed
        self._newest = (stamp, target)
        return target

    def _abandoned(self, file: Path) -> list[Path]:
        found = []
        for replay in file.parent.glob("*.replay"):
            stem = _stem_of(replay.name)
            # Without the mark, a checkpoint named it when its save ended.
            if stem is None or not (replay / _UNFINISHED).exists():
                continue
            owner = file.with_name(f"{stem}{file.suffix}".replace("ckpt~", "ckpt_"))
            try:
                if not owner.exists() or self._name_in(owner) != replay.name:
                    found.append(replay)
            except Exception:  # a plug-in may raise any error for a file that it cannot read: keep its replay
                continue
        return found

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint and finds its replay, or raises an error if the replay is missing."""
        checkpoint = super().load_checkpoint(path, *args, **kwargs)
        replay = self.datamodule.find_replay(checkpoint, path)  # raises before anything is restored
        if replay is not None:
            self._names[str(path)] = Path(replay).name
        if isinstance(replay, Path) and self._newest is None:
            self._newest = (None, replay)  # The state is another, but rows that stay have the same files.
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint and its replay."""
        if self.in_background:  # once the one that replaces it is written
            self._submit(partial(self._remove, path))
        else:
            self._remove(path)

    def _remove(self, path: str | Path) -> None:
        replay = self._replay_of(path)
        if isinstance(replay, Path):
            touch(replay / _UNFINISHED)
        super().remove_checkpoint(path)
        self._names.pop(str(path), None)
        if replay is not None:
            _remove_replay(replay)

    def teardown(self) -> None:
        """Waits for the thread and ends the wrapped plug-in."""
        self._thread.shutdown()
        super().teardown()


def check_checkpoint(path: str | Path | None) -> None:
    """Raises ``ValueError`` if a path is not a checkpoint of Lightning."""
    # Addresses and Lightning's own words are left to Lightning.
    if path is None or "://" in str(path) or str(path) in ("best", "last", "hpc") or str(path).startswith("registry"):
        return
    accepted = "give a .ckpt file that a run has saved, or 'last'"
    if not Path(path).is_file():
        raise ValueError(f"ckpt_path is {str(path)!r}, which is no file; {accepted}")
    try:
        content = torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:  # torch raises errors of many kinds for files of other programs
        reason = " ".join(str(error).split(". ")[0].split())
        raise ValueError(f"ckpt_path is {str(path)!r}, which torch does not load ({reason}); {accepted}") from error
    if not isinstance(content, Mapping) or not {"state_dict", "pytorch-lightning_version"} <= set(content):
        raise ValueError(f"ckpt_path is {str(path)!r}, which is no checkpoint of Lightning; {accepted}")


def _warn_of_unloadable(checkpoint: Mapping[str, Any]) -> None:
    parts: dict[str, Any] = {}
    for name, value in checkpoint.items():
        if name not in ("state_dict", "optimizer_states"):  # tensors, which load, and large
            if isinstance(value, Mapping):
                parts |= {f"{name}.{key}": entry for key, entry in value.items()}
            else:
                parts[name] = value
    unloadable = [f"{name} ({type(value).__name__})" for name, value in parts.items() if not _is_loadable(value)]
    if unloadable:
        rank_zero_warn(
            f"a checkpoint holds {', '.join(unloadable)}, which fit(ckpt_path=...) and load_from_checkpoint do not "
            "load unless weights_only=False is given. Give the hyperparameters as plain numbers, texts, lists and "
            "tensors, or leave them out with save_hyperparameters(ignore=...)."
        )


def _is_loadable(value: object) -> bool:
    # As Lightning loads by default, weights_only.
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except Exception:  # An object of any class may raise any error.
        return False
    return True


def _beside(path: str | Path, name: str) -> Path | str:
    return f"{str(path).rpartition('/')[0]}/{name}" if "://" in str(path) else Path(path).with_name(name)


def _names_beside(path: str | Path) -> list[str]:
    if "://" in str(path):
        return remote_folder(str(path).rpartition("/")[0]).names()
    return [place.name for place in Path(path).parent.glob("*.replay")]


def _replay_stem(stem: str) -> str:
    # Lightning reads the number of SLURM's newest checkpoint from every name with "ckpt_" in its folder.
    return stem.replace("ckpt_", "ckpt~")


def replays_beside(path: str | Path) -> list[Path | str]:
    """Returns the replays of a checkpoint: paths, or URLs if ``path`` is one."""
    return [_beside(path, name) for name in _replay_names(path)]


def _replay_names(path: str | Path) -> list[str]:
    # Links are left out, because nothing is marked or removed in the folder that a link leads to.
    if "://" in str(path):
        names = remote_folder(str(path).rpartition("/")[0]).names(only_folders=True)
    else:
        names = [place.name for place in Path(path).parent.glob("*.replay") if not place.is_symlink()]
    return [name for name in names if _stem_of(name) == _replay_stem(Path(path).stem)]


def _remove_replay(replay: Path | str) -> None:
    if isinstance(replay, Path):
        remove_saved(replay)
    else:
        remote_folder(replay).remove_saved()


def saved_replay(path: str | Path, name: str | None, replay_id: str) -> Path | str:
    """Returns the place of the save ``replay_id`` that a checkpoint names, or of one renamed together with it."""
    others = []
    for replay in [*([_beside(path, name)] if name else []), *replays_beside(path)]:
        with suppress(FileNotFoundError):
            if save_id(replay) == replay_id:
                return replay
            others.append(replay)
    if others:
        raise DamagedFileError(
            f"checkpoint {path} was saved with another replay than the one in {others[0]}, which belongs to another "
            "run or another moment. Nothing was restored. Put the folder it was saved with beside it, or load the "
            "weights alone with load_from_checkpoint."
        )
    raise FileNotFoundError(
        f"checkpoint {path} was saved with the replay {name}, which is not beside it. "
        "Move both together, or load the weights alone with load_from_checkpoint."
    )


def _new_replay(file: Path, updates: int) -> Path:
    target = file.with_name(_unused_name(file, updates))
    target.mkdir()
    (target / _UNFINISHED).touch()
    return target


def _unused_name(path: str | Path, updates: int) -> str:
    # Not one that is there: the checkpoint may name it until it is overwritten.
    stem = _replay_stem(Path(path).stem)
    taken = _names_beside(path)
    suffixes = itertools.chain([""], map("-{}".format, itertools.count(1)))
    return next(name for suffix in suffixes if (name := f"{stem}.{updates}{suffix}.replay") not in taken)


def _stem_of(replay: str) -> str | None:
    match = re.fullmatch(r"(.+)\.\d+(?:-\d+)?\.replay", replay)
    return None if match is None else match[1]
