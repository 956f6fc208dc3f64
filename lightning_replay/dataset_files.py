# SPDX-License-Identifier: Apache-2.0
"""Files of data sets that strangers wrote: regular files inside the data set, which lead to no other file."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_replay.options import missing_extra


class DatasetError(ValueError):
    """A data set cannot be read. The message names the place, what was found there, and what is supported."""


@contextmanager
def readable(place: object, supported: str) -> Iterator[None]:
    """Raises a :class:`DatasetError` in place of the errors that other libraries raise at a damaged file."""
    try:
        yield
    except (DatasetError, FileNotFoundError, ImportError, MemoryError):
        raise
    except Exception as error:  # The classes of these errors are as many as the libraries.
        raise DatasetError(f"{place} cannot be read ({type(error).__name__}: {error}); give {supported}") from error


def imported(module: str) -> Any:
    """Returns a module, or raises an error that names the extra ``demonstrations`` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing_extra("the data set", str(error.name), "demonstrations") from error


@contextmanager
def without_ghostscript() -> Iterator[None]:
    """Images are decoded by Pillow, which would let Ghostscript run a program that lies in place of an image."""
    plugin = imported("PIL.EpsImagePlugin")
    before = plugin.gs_binary
    plugin.gs_binary = False
    try:
        yield
    finally:
        plugin.gs_binary = before


def files_below(data_set: Path, folder: Path) -> list[Path]:
    """Returns all files below a folder of a data set, sorted.

    Raises:
        DatasetError: A file leads out of the data set, or is a pipe or a device, which have no end. A folder is a link,
            so that its files could be read twice.
    """
    root = Path(os.path.realpath(data_set))
    homes = [root]
    if root.parent.name == "snapshots":  # The files are links in the cache of Hugging Face's hub.
        homes.append(root.parent.parent / "blobs")
    files = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    for path in files:
        target = Path(os.path.realpath(path))
        if not target.is_file() or not any(target.is_relative_to(home) for home in homes):
            raise DatasetError(
                f"{path} is a pipe, a device, or a link to a folder, or leads out of the data set (to {target}); put a "
                "file in its place"
            )
    return files


def own_columns(file: Any) -> dict[str, Any]:
    """Returns all arrays of an HDF5 file by their paths, after a check that their values lie in the file.

    Raises:
        DatasetError: An entry is a link, or its values lie in other files.
    """
    h5py = imported("h5py")
    links: dict[str, Any] = {}
    file.visititems_links(links.__setitem__)
    columns = {}
    for name, link in links.items():
        is_own = isinstance(link, h5py.HardLink)
        if is_own and isinstance(file[name], h5py.Dataset):
            columns[name] = file[name]
            is_own = not columns[name].external and not columns[name].is_virtual
        if not is_own:
            raise DatasetError(
                f"{name} of {file.filename} is a link, or its values lie in other files; copy the values into this file"
            )
    return columns
