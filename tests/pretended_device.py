# SPDX-License-Identifier: Apache-2.0
"""A device that is pretended on the CPU, and counts the calls that would wait for a real one."""

from __future__ import annotations

import functools
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"
_tensor, _as_tensor, _Generator = torch.tensor, torch.as_tensor, torch.Generator
# Operations whose result, or its shape, the CPU must know before it goes on.
_WAITING = {
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique_dim", "_unique2"),
        *("unique_consecutive", "bincount", "repeat_interleave", "item"),
    )
}


@functools.cache
def device() -> torch.device:
    """Returns the device. The first call registers it with PyTorch for the rest of the process."""
    _setup_privateuseone_for_python_backend(NAME)
    return torch.device(NAME, 0)


class Calls:
    """What a block of code did on the pretended device.

    Attributes:
        waits: Calls that wait for the device, by kind and by place in the library.
        kernels: Operations that were started on the device.
        copies: Copies to the device from memory that is not pinned, which may wait.
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.kernels = 0
        self.copies = 0

    def wait(self, kind: str) -> None:
        own = [frame for frame in traceback.extract_stack() if "/lightning_replay/" in frame.filename]
        place = f"{own[-1].filename.split('/lightning_replay/')[-1]}:{own[-1].lineno}" if own else "the caller"
        self.waits[f"{kind} in {place}"] += 1

    @property
    def num_waits(self) -> int:
        return sum(self.waits.values())


class Pretended(Tensor):
    """A tensor whose values are on the CPU and whose device is the pretended one."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        shown: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device(),
        )
        shown.inner = inner
        return shown

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {}, Calls())

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({self.inner!r})"

    def tolist(self) -> Any:  # PyTorch reads the memory itself.
        return self.cpu().tolist()


class _Generator_(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        return _Generator.__new__(cls, "cpu")


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Pretended) else value


def _is_pretended(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _run(function: Any, args: Any, kwargs: dict[str, Any], calls: Calls) -> Any:
    name = function._schema.name
    is_there = any(isinstance(value, Pretended) for value in tree_flatten((args, kwargs))[0])
    goes_there = is_there
    if kwargs.get("device") is not None:
        goes_there = _is_pretended(kwargs["device"])
        kwargs = {**kwargs, "device": torch.device("cpu"), "pin_memory": False}
    if name in ("aten::_to_copy", "aten::copy_"):
        source, target = (
            (args[0], goes_there) if name == "aten::_to_copy" else (args[1], isinstance(args[0], Pretended))
        )
        if isinstance(source, Pretended) and not target:
            calls.wait("copy to the CPU")
        elif target and not isinstance(source, Pretended):
            is_waiting = source.ndim > 0 and source.numel() > 0 and not kwargs.get("non_blocking")
            calls.copies += 1
            if is_waiting:
                calls.wait("copy to the device")
        else:
            calls.kernels += 1
        kwargs = {**kwargs, "non_blocking": False}
    elif name in _WAITING and is_there:
        calls.wait(name.removeprefix("aten::"))
    elif name in ("aten::index", "aten::index_put", "aten::index_put_") and is_there:
        index = [one for one in args[1] if one is not None]
        calls.kernels += 1
        if any(one.dtype == torch.bool for one in index):
            calls.wait("index of flags")
        if any(not isinstance(one, Pretended) for one in index):
            calls.wait("index on the CPU")
    elif is_there or goes_there:
        calls.kernels += not function.is_view
    result = function(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if function._schema.is_mutable and "out" in kwargs:
        return kwargs["out"]
    if name.endswith("_") and isinstance(args[0], Pretended):
        return args[0]
    if name == "aten::_local_scalar_dense":
        return result
    return tree_map(lambda one: Pretended(one) if isinstance(one, Tensor) and goes_there else one, result)


class _Mode(TorchDispatchMode):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_pretended(kwargs.get("device")) or any(issubclass(kind, Pretended) for kind in types):
            return _run(function, args, kwargs, self.calls)
        return function(*args, **kwargs)


@contextmanager
def counted() -> Iterator[Calls]:
    """Runs a block in which tensors may be on :func:`device`, and counts what it does there."""
    calls = Calls()

    def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if not _is_pretended(device):
            return _tensor(data, *args, device=device, **kwargs)
        calls.copies += 1
        calls.wait("torch.tensor")
        return Pretended(_tensor(data, *args, **kwargs))

    def as_tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if isinstance(data, Tensor) or not _is_pretended(device):
            return _as_tensor(data, *args, device=device, **kwargs)
        return tensor(data, *args, device=device, **kwargs)

    replaced = {"tensor": tensor, "as_tensor": as_tensor, "Generator": _Generator_}
    with patch.multiple(torch, **replaced), _Mode(calls):
        yield calls


def there(values: Tensor) -> Tensor:
    """Returns a tensor on the pretended device, without a call that is counted."""
    return Pretended(values)
