# SPDX-License-Identifier: Apache-2.0
"""Private names of other libraries that classes of this library override."""

from __future__ import annotations


def subclasses(host: type) -> set[type]:
    return {host}.union(*map(subclasses, host.__subclasses__()))


def overridden_names(host: type) -> set[str]:
    """Returns the private names that subclasses of ``host`` in this library override, of those loaded so far.

    A name that a release moves is no longer overridden. Then its method here is never called.
    """
    library = host.__module__.split(".")[0]
    found = set()
    for kind in subclasses(host):
        if kind.__module__.startswith("lightning_replay."):
            bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] == library]
            names = {name for name in vars(kind) if name.startswith("_") and not name.startswith("__")}
            found |= {name for name in names if any(name in vars(base) for base in bases)}
    return found - {"_abc_impl"}
