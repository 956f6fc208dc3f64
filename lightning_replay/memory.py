# SPDX-License-Identifier: Apache-2.0
"""How much memory is free, and rows allocated only when they fit."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

_SMALL_BYTES = 1 << 24  # which are not worth the 60 us that asking takes


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on ``device``; ``None`` where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, _container_bytes())
    return None


def _container_bytes() -> int:
    """Returns what the control group of this process still allows, where it sets a limit."""
    group = Path("/sys/fs/cgroup")
    try:
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return 2**63 - 1


def check_free(num_bytes: int, what: str, device: torch.device | None = None) -> None:
    """Refuses what would take more memory than is free, before any of it is taken.

    Args:
        num_bytes: at least so many.
        what: they are needed for, for the error.
        device: the CPU if absent.

    Raises:
        MemoryError: with both numbers.
    """
    if num_bytes < _SMALL_BYTES:
        return
    device = torch.device("cpu") if device is None else device
    free = free_bytes(device)
    if free is not None and num_bytes > free:
        raise MemoryError(
            f"{num_bytes:,} bytes are needed for {what}, and {free:,} are free on {device}. Lower the capacity"
        )


def allocate_rows(
    num_rows: int,
    row_words: int,
    device: torch.device,
    directory: str | Path | None,
    breakdown: str,
    *,
    as_written: bool = False,
) -> Tensor:
    """int64 ``[num_rows, row_words]`` of zeros, in memory or in a scratch file mapped into memory.

    Args:
        directory: where the scratch file goes; it has no name once it is mapped, so it disappears with the process.
        breakdown: how the size comes about, for the error.
        as_written: leaves memory unwritten, of any content, so that a CPU's pages are taken as rows are written.

    Raises:
        MemoryError: less is free than is needed; nothing was allocated.
    """
    needed = num_rows * row_words * 8
    if directory is not None:
        return _map_scratch_file(num_rows, row_words, Path(directory), needed, breakdown)
    free = free_bytes(device)
    if free is not None and needed > free:
        raise MemoryError(
            f"the storage needs {needed:,} bytes ({breakdown}) and {free:,} are free on {device}. "
            "Lower the capacity, or keep the rows on disk with memmap=<directory>"
        )
    if as_written:
        return torch.empty(num_rows, row_words, dtype=torch.int64, device=device)
    return torch.zeros(num_rows, row_words, dtype=torch.int64, device=device)


def _map_scratch_file(num_rows: int, row_words: int, directory: Path, needed: int, breakdown: str) -> Tensor:
    directory.mkdir(parents=True, exist_ok=True)
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    if needed > free:
        raise MemoryError(
            f"the storage needs {needed:,} bytes ({breakdown}) and {free:,} are free in {directory}. "
            "Lower the capacity, or choose another directory"
        )
    handle, name = tempfile.mkstemp(prefix="replay-", dir=directory)
    try:
        os.ftruncate(handle, needed)
        flat = torch.from_file(name, shared=True, size=num_rows * row_words, dtype=torch.int64)
    finally:
        os.close(handle)
        os.unlink(name)
    return flat.view(num_rows, row_words)
