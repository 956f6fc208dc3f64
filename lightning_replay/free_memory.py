# SPDX-License-Identifier: Apache-2.0
"""Free memory, and rows that are allocated only when they fit."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT_BYTES = 64
_SMALL_BYTES = 1 << 24  # not worth the 60 us that reading the free bytes takes


def free_bytes(device: torch.device) -> int | None:
    """Returns the bytes that can still be allocated on ``device``, or ``None`` if that is unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    group = Path("/sys/fs/cgroup")  # The control group of this process may set a lower limit.
    try:
        limit = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        limit = 2**63 - 1
    available = (line.split()[1] for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    return next((min(int(kilobytes) * 1024, limit) for kilobytes in available), None)


def check_free(
    num_bytes: int, what: str, device: torch.device | None = None, advice: str = "Lower the capacity"
) -> None:
    """Raises ``MemoryError`` if ``num_bytes`` for ``what`` are more than is free on ``device``, by default the CPU."""
    if num_bytes < _SMALL_BYTES:
        return
    device = torch.device("cpu") if device is None else device
    free = free_bytes(device)
    if free is not None and num_bytes > free:
        raise MemoryError(f"{num_bytes:,} bytes are needed for {what}, and {free:,} are free on {device}. {advice}")


def allocate_rows(
    num_rows: int,
    row_words: int,
    device: torch.device,
    directory: str | Path | None,
    breakdown: str,
    *,
    as_written: bool = False,
    beside: int = 0,
) -> Tensor:
    """Returns int64 ``[num_rows, row_words]`` of zeros, in memory or in a scratch file in ``directory``.

    The file has no name once it is mapped, and so disappears with the process. ``as_written`` leaves memory unwritten,
    so that a CPU's pages are taken as rows are written. If less is free than these and the ``beside`` bytes that
    others will take, a ``MemoryError`` with the ``breakdown`` is raised and nothing allocated.
    """
    allocated = num_rows * row_words * 8
    needed = allocated + beside
    if directory is None:
        free, where, other = free_bytes(device), f"on {device}", "keep the rows on disk with memmap=<directory>"
    else:
        Path(directory).mkdir(parents=True, exist_ok=True)
        disk = os.statvfs(directory)
        free, where, other = disk.f_bavail * disk.f_frsize, f"in {directory}", "choose another directory"
    if free is not None and needed > free:
        raise MemoryError(
            f"the storage needs {needed:,} bytes ({breakdown}) and {free:,} are free {where}. Lower the capacity, or "
            f"{other}"
        )
    if directory is None:
        if device.type == "cpu" and not as_written:
            # NumPy requests huge pages from Linux and torch does not: a gather of rows at random, from the beginning of
            # cache lines, takes a quarter less time. Memory that is taken as rows are written stays in small pages.
            array = np.zeros(num_rows * row_words + _ALIGNMENT_BYTES // 8, np.int64)
            first = -array.ctypes.data % _ALIGNMENT_BYTES // 8
            return torch.from_numpy(array[first : first + num_rows * row_words]).view(num_rows, row_words)
        allocate = torch.empty if as_written else torch.zeros
        return allocate(num_rows, row_words, dtype=torch.int64, device=device)
    handle, name = tempfile.mkstemp(prefix="replay-", dir=directory)
    try:
        os.ftruncate(handle, allocated)
        flat = torch.from_file(name, shared=True, size=num_rows * row_words, dtype=torch.int64)
    finally:
        os.close(handle)
        os.unlink(name)
    return flat.view(num_rows, row_words)
