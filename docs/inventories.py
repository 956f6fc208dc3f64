# SPDX-License-Identifier: Apache-2.0
"""Inventories for links into other projects' documentation, from the lists in this folder's ``inventories``.

A list has the address of a documentation, and in each further line a name, its role and the rest of its address. The
projects' own inventories are not needed, so that the site is built offline.
"""

import zlib
from pathlib import Path

LISTS = Path(__file__).parent / "inventories"


def write_inventories(folder: Path) -> dict[str, tuple[str, str]]:
    """Writes an inventory of each list into the folder, and returns ``intersphinx_mapping``."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for names in sorted(LISTS.glob("*.txt")):
        address, *entries = names.read_text().splitlines()
        lines = [f"{name} py:{role} 1 {rest} -\n" for name, role, rest in (entry.split() for entry in entries)]
        head = (
            f"# Sphinx inventory version 2\n# Project: {names.stem}\n# Version:\n# The rest is compressed using zlib.\n"
        )
        inventory = folder / f"{names.stem}.inv"
        inventory.write_bytes(head.encode() + zlib.compress("".join(lines).encode()))
        mapping[names.stem] = (address, str(inventory))
    return mapping
