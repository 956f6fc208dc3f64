# SPDX-License-Identifier: Apache-2.0
"""A storage in forked processes: its lock and snapshots, and which rows may be read and written."""

from __future__ import annotations

from torchrl.data import LazyTensorStorage

from lightning_replay.saving.snapshot import Snapshots
from lightning_replay.storage import forking


class ForkableStorage(LazyTensorStorage):
    """A storage that a forked process gets whole; rows that lie in a file stay the parent's.

    A subclass calls :meth:`_begin_life` at the end of its constructor, holds ``snapshots.lock`` while it writes, and
    calls :meth:`check_writable` before and :meth:`check_read` after it reads rows.
    """

    fork_rank = 1  # buffers hold their locks while they write here
    _memmap: str | None

    def _begin_life(self) -> None:
        """Sets the attributes of this object in this process: a lock and what a fork changes."""
        self.snapshots: Snapshots = Snapshots()
        self._shared_writes = None if self._memmap is None else forking.SharedWrites()
        self._refusal: str | None = None
        self._is_held = False
        forking.register(self)

    def before_fork(self) -> None:
        """Waits, in the thread that forks, until no row is half-written."""
        self._is_held = forking.acquired(self.snapshots.lock)
        if self._shared_writes is not None:
            self._shared_writes.before_fork()

    def after_fork(self, *, in_child: bool) -> None:
        """Releases the lock in parent and child; the child may not write into a file of the parent."""
        if self._is_held:
            self.snapshots.lock.release()
        if in_child:
            self.snapshots = Snapshots()  # those who read the open ones are in the parent
            if not self._is_held:
                self._refusal = (
                    f"this process was forked while another thread was writing into this {type(self).__name__}, whose "
                    "rows are half-written here. Fork when nobody writes, or build a storage in this process"
                )
            elif self._shared_writes is not None and self.initialized:
                self._shared_writes.forked()
                self._refusal = (
                    f"the rows of this {type(self).__name__} lie in a file that a forked process shares with its "
                    "parent, so they cannot be written here; nothing was changed. Write in the parent, or build a "
                    "storage in this process"
                )

    def check_read(self) -> None:
        """Raises ``RuntimeError`` after a read in a forked process, if the parent has written into the file since."""
        if self._shared_writes is not None and self._shared_writes.came_since:
            raise RuntimeError(
                f"the rows of this {type(self).__name__} lie in a file that a forked process shares with its parent, "
                "which has written into it since the fork: what is read here is of no one moment. Save the buffer in "
                "the parent and load it here, or fork when nothing is written any more"
            )

    def check_writable(self) -> None:
        """Raises ``RuntimeError`` before a write in a forked process into rows of the parent."""
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
