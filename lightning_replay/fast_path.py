# SPDX-License-Identifier: Apache-2.0
"""Fast paths past methods that a subclass may override: a class declares that they may be taken for its objects.

A class declares this by ``exact = True`` in its body. A subclass does not inherit the declaration, because it may
override a method that the fast path leaves out. If it overrides no such method, it sets ``exact = True`` itself.
"""

from __future__ import annotations


def has_fast_path(value: object, flag: str = "exact") -> bool:
    """Returns whether the class of an object declares ``flag`` itself, as in ``exact = True``. A base does not count.

    Example:
        >>> class Fast:
        ...     exact = True
        >>> class Derived(Fast): pass
        >>> has_fast_path(Fast()), has_fast_path(Derived())
        (True, False)
    """
    return bool(vars(type(value)).get(flag))


def overrides(value: object, base: type, method: str) -> bool:
    """Returns whether the class of an object replaces a method of ``base``."""
    return getattr(type(value), method) is not getattr(base, method)
