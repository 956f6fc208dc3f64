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


class Seeded:
    """A part with a generator of its own, so that a saved buffer continues with the same draws.

    Call :meth:`_seed_generator` in the constructor. TorchRL's ``buffer.set_rng(generator)`` replaces the generator
    through ``_rng``; ``None``, which TorchRL sets in buffers that are built without a generator, is ignored.
    """

    _generator: torch.Generator

    def _seed_generator(self, seed: int | None, device: torch.device | str = "cpu") -> None:
        object.__setattr__(self, "_generator", seeded_generator(seed, device))

    @property
    def _rng(self) -> torch.Generator:
        return self._generator

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        if generator is not None:
            object.__setattr__(self, "_generator", generator)

    def reseed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def generator_state(self) -> Tensor:
        """Returns the state of the generator, uint8, for a saved buffer."""
        return self._generator.get_state()

    def set_generator_state(self, state: Tensor) -> None:
        self._generator.set_state(state.cpu().to(torch.uint8))


class PartState:
    """Reads and restores the generator of a part and the attributes named in :attr:`saved_attributes`.

    An attribute ``_name`` has the entry ``name`` in the state. NumPy arrays are saved as tensors.

    Raises:
        TypeError: when a subclass derives from :class:`~lightning_replay.state.Seeded` behind its base class, whose
            methods without effect would hide those of ``Seeded``.
    """

    saved_attributes: tuple[str, ...] = ()  #: Names of attributes, tensors or plain values, that belong to the state.
    saved_parts: tuple[str, ...] = ()  #: Names of attributes with a ``state_dict`` of their own, or ``None``.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, Seeded) and cls.__mro__.index(Seeded) > cls.__mro__.index(PartState):
            raise TypeError(f"{cls.__name__} names Seeded after its base class; name it first: (Seeded, ...)")

    def generator_state(self) -> Tensor | None:
        """Returns the state of the part's generator, uint8; ``None`` where it has none."""
        return None

    def set_generator_state(self, state: Tensor) -> None:
        """Restores what :meth:`generator_state` returned."""

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
        generator = self.generator_state()
        return state if generator is None else {**state, "generator": generator}

    def _restore_attributes(self, state: Mapping[str, Any]) -> None:
        own = vars(self)
        generator = () if self.generator_state() is None else ("generator",)
        needed = [name.lstrip("_") for name in (*self.saved_attributes, *self.saved_parts)]
        missing = [entry for entry in (*needed, *generator) if entry not in state]
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
        if generator:
            self.set_generator_state(state["generator"])
        for name in self.saved_attributes:
            before, value = own[name], _copied(state[name.lstrip("_")])
            if isinstance(value, Tensor) and isinstance(before, np.ndarray):
                value = value.cpu().numpy()
            elif isinstance(value, Tensor) and isinstance(before, Tensor):
                value = value.to(before.device)
            setattr(self, name, value)
        for name in self.saved_parts:
            if own[name] is not None:
                own[name].load_state_dict(state[name.lstrip("_")])


class DeclaredState(PartState):
    """An object whose state is what it declares; see :class:`PartState`."""

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the attributes and the states of the parts that are declared, and of the generator."""
        return self._read_attributes()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        Raises:
            ValueError: an entry is missing, or the state was saved with other parts; nothing is changed then.
        """
        self._restore_attributes(state_dict)


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
