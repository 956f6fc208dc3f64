# SPDX-License-Identifier: Apache-2.0
"""The state of a part: its generator, and the attributes that it names."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_replay.options import checked_seed

_STEPS = 2**53  # floats of equal spacing in [0, 1)


def seeded_generator(seed: int | None, device: torch.device | str = "cpu") -> torch.Generator:
    """Returns a generator; ``None`` seeds it from torch's global one. Other seeds than of 64 bits are refused."""
    seed = checked_seed(seed)
    return torch.Generator(device).manual_seed(int(torch.randint(2**62, (), device="cpu")) if seed is None else seed)


def uniform(generator: torch.Generator) -> float:
    """Draws a float from [0, 1) at half the cost of ``torch.rand``."""
    return int(torch.randint(_STEPS, (), generator=generator, device="cpu")) / _STEPS


class SeededStateful:
    """A generator of its own and the attributes that it names, so that a saved buffer continues with the same draws.

    The base class of all parts. Call :meth:`_seed_generator` in the constructor of one that draws. TorchRL's
    ``buffer.set_rng(generator)`` replaces the generator through ``_rng``; ``None``, which TorchRL sets in buffers that
    are built without a generator, is ignored, and so is a generator for a part that draws nothing.

    An attribute ``_name`` has the entry ``name`` in the state. NumPy arrays are saved as tensors.
    """

    saved_attributes: tuple[str, ...] = ()  #: Names of attributes, tensors or plain values, that belong to the state.
    saved_parts: tuple[str, ...] = ()  #: Names of attributes with a ``state_dict`` of their own, or ``None``.
    #: Names of attributes with options that decided what is kept of stored rows. A load refuses other values, because
    #: they would act on new rows only.
    stored_options: tuple[str, ...] = ()
    _generator: Any = None  # a torch.Generator, once _seed_generator was called
    _given_generator: Any = None  # by set_rng, to a part that has none of its own; not saved, as in TorchRL

    def _seed_generator(self, seed: int | None, device: torch.device | str = "cpu") -> None:
        # Past the __setattr__ of a torch.nn.Module, which a transform is: it takes microseconds.
        object.__setattr__(self, "_generator", seeded_generator(seed, device))

    @property
    def _rng(self) -> Any:
        return self._given_generator if self._generator is None else self._generator

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        if generator is not None:
            object.__setattr__(self, "_given_generator" if self._generator is None else "_generator", generator)

    def reseed(self, seed: int) -> None:
        """Restarts the generator; called by ``Replay.seed``."""
        if isinstance(self._generator, torch.Generator):  # a class of a user may have another under this name
            self._generator.manual_seed(seed)

    def _generator_state(self) -> dict[str, Tensor]:
        has_one = isinstance(self._generator, torch.Generator)
        return {"generator": self._generator.get_state()} if has_one else {}

    def _restore_generator(self, state: Mapping[str, Any]) -> None:
        if isinstance(self._generator, torch.Generator):
            self._generator.set_state(state["generator"].cpu().to(torch.uint8))

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of what is declared and the generator's state, added to the state of TorchRL's class."""
        self._check_state()
        inherited: Any = getattr(super(), "state_dict", dict)()
        return {**(inherited or {}), **self._read_attributes()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        Raises:
            ValueError: an entry is missing, or the state was saved with other parts; nothing is changed then.
        """
        self._restore_attributes(state_dict)
        inherited = getattr(super(), "load_state_dict", None)
        if inherited is not None:
            inherited(state_dict)

    def _check_state(self) -> None:
        # Where TorchRL's class has no state either, draws would silently start anew from a save.
        of_torchrl = getattr(super(), "state_dict", None)
        if type(self).state_dict is not SeededStateful.state_dict or not getattr(
            of_torchrl, "__isabstractmethod__", False
        ):
            return
        if not any("saved_attributes" in vars(base) for base in type(self).__mro__ if base is not SeededStateful):
            raise TypeError(
                f"{type(self).__name__} declares no state: set saved_attributes to the names of the attributes that "
                "decide what is drawn or kept, or to () if none does; or define state_dict and load_state_dict"
            )

    def _read_attributes(self) -> dict[str, Any]:
        own, state = vars(self), {}
        for name in (*self.saved_attributes, *self.saved_parts):
            if name not in own:
                raise AttributeError(
                    f"saved_attributes of {type(self).__name__} names {name!r}, which is not an attribute of the "
                    "object; set it in the constructor"
                )
            is_part = name in self.saved_parts and own[name] is not None
            state[name.lstrip("_")] = own[name].state_dict() if is_part else _copied(own[name])
        return {**state, **self._generator_state()}

    def _restore_attributes(self, state: dict[str, Any]) -> None:
        own = vars(self)
        needed = [name.lstrip("_") for name in (*self.saved_attributes, *self.saved_parts)]
        missing = [entry for entry in (*needed, *self._generator_state()) if entry not in state]
        if missing:
            raise ValueError(
                f"the state has the entries {sorted(state)}, and a {type(self).__name__} needs {missing} too; load "
                "what its state_dict() returned. Nothing was loaded"
            )
        for name in self.saved_parts:
            if (own[name] is None) != (state[name.lstrip("_")] is None):
                there, here = ("none", "one") if own[name] is not None else ("one", "none")
                raise ValueError(
                    f"the saved {type(self).__name__} has {there} for {name.lstrip('_')!r}, and this one has {here}; "
                    "build it with the options it was saved with. Nothing was loaded"
                )
        for name in self.saved_parts:  # first, as they may refuse
            if own[name] is not None:
                own[name].load_state_dict(state[name.lstrip("_")])
        self._restore_generator(state)
        for name in self.saved_attributes:
            before, value = own[name], _copied(state[name.lstrip("_")])
            if isinstance(value, Tensor) and isinstance(before, np.ndarray):
                value = value.cpu().numpy()
            elif isinstance(value, Tensor) and isinstance(before, Tensor):
                value = value.to(before.device)
            setattr(self, name, value)


class Stateful(SeededStateful):
    """An object, no part of a buffer, whose state is what it declares."""


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
