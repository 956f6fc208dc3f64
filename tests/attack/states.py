# SPDX-License-Identifier: Apache-2.0
"""Whether two states are the same: to the last bit, NaN included."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def fingerprint(state: Any) -> str:
    """A hash of nested tensors and plain values: equal for equal states, whatever the order of their keys."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(state):
        digest.update(part)
    return digest.hexdigest()


def difference(one: Any, other: Any, path: str = "state") -> str | None:
    """Where two states differ first; ``None`` where nowhere."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in sorted({*one, *other}, key=str):
            if name not in one or name not in other:
                return f"{path}.{name} is on one side only"
            found = difference(one[name], other[name], f"{path}.{name}")
            if found:
                return found
        return None
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{path} has {len(one)} and {len(other)} entries"
        found = (difference(*both, f"{path}[{place}]") for place, both in enumerate(zip(one, other, strict=True)))
        return next((text for text in found if text), None)
    return None if fingerprint(one) == fingerprint(other) else f"{path}: {one!r} and {other!r}"


def _parts(state: Any) -> Iterator[bytes]:
    if isinstance(state, Mapping):
        yield b"{"
        for name in sorted(state, key=str):
            yield f"{name!r}:".encode()
            yield from _parts(state[name])
        yield b"}"
    elif isinstance(state, list | tuple):
        yield b"["
        for value in state:
            yield from _parts(value)
            yield b","
        yield b"]"
    elif isinstance(state, Tensor | np.ndarray):
        tensor = torch.as_tensor(state).detach().cpu().clone(memory_format=torch.contiguous_format)
        yield f"{tensor.dtype}{list(tensor.shape)}".encode()
        yield tensor.view(-1).view(torch.uint8).numpy().tobytes()
    elif state is None or isinstance(state, bool | int | float | str | bytes | torch.Size | np.generic):
        yield repr(state).encode()
    else:
        raise TypeError(f"{type(state).__name__} in a state: {state!r}")
