# SPDX-License-Identifier: Apache-2.0
"""Whether a module may compute something else in evaluation mode than in training mode."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable

import lightning as L
from tensordict import TensorDictParams
from torch import nn

_READS_MODE = re.compile(r"""\.training\b|["']training["']|\bdef (?:train|eval)\b""")
# they store or forward the mode; TensorDictParams has a source of 20,000 lines
_MODE_FREE = frozenset({*L.LightningModule.__mro__, *TensorDictParams.__mro__})


def depends_on_mode(module: nn.Module) -> bool:
    """Returns whether the outputs of a module may depend on ``module.training``.

    Read from the source of the classes of all its parts and of their forward hooks: false if none reads the attribute
    ``training``, defines ``train`` or ``eval``, or has no source. A part that reads it for something else counts as
    well, so that true is always safe. It takes up to some 100 ms for classes seen for the first time, and later about
    2 µs for each part; call it again where parts were added.

    Example:
        >>> depends_on_mode(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        False
        >>> depends_on_mode(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
        True
    """
    for part in module.modules():
        if any(map(_reads_mode, type(part).__mro__)):
            return True
        if any(_hook_reads_mode(hook) for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())):
            return True
    return False


def _hook_reads_mode(hook: Callable[..., object]) -> bool:
    if inspect.ismethod(hook):
        return _reads_mode(hook.__func__)
    return not inspect.isfunction(hook) or _reads_mode(hook)


@functools.lru_cache(maxsize=4096)
def _reads_mode(code: type | Callable[..., object]) -> bool:
    if code in _MODE_FREE or (isinstance(code, type) and code.__module__.split(".")[0] in sys.stdlib_module_names):
        return False
    try:
        return _READS_MODE.search(inspect.getsource(code)) is not None
    except (OSError, TypeError):  # built while running, or compiled
        return True
