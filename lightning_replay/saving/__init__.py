# SPDX-License-Identifier: Apache-2.0
"""States on disk: one save at a time, checked, replaced as a whole, without code in the files."""

from lightning_replay.saving.files import DamagedFileError
from lightning_replay.saving.states import SavedSize, load_state, read_state, write_state

__all__ = ["DamagedFileError", "SavedSize", "load_state", "read_state", "write_state"]
