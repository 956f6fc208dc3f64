# SPDX-License-Identifier: Apache-2.0
"""The state of a part: its generator, and the attributes that it names."""

from __future__ import annotations

import copy
from typing import Any

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

    Raises:
        TypeError: when a subclass derives from :class:`~lightning_replay.state.Seeded` behind its base class, whose
            methods without effect would hide those of ``Seeded``.
    """

    saved_attributes: tuple[str, ...] = ()  #: Names of attributes, tensors or plain values, that belong to the state.

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
        for name in self.saved_attributes:
            if name not in own:
                raise AttributeError(
                    f"saved_attributes of {type(self).__name__} names {name!r}, which is not an attribute of the "
                    "object; set it in the constructor"
                )
            state[name] = _copied(own[name])
        generator = self.generator_state()
        return state if generator is None else {**state, "generator": generator}

    def _restore_attributes(self, state: dict[str, Any]) -> None:
        missing = [name for name in self._read_attributes() if name not in state]
        if missing:
            raise ValueError(
                f"the state has the entries {sorted(state)}, and a {type(self).__name__} needs {missing} too; load "
                "what its state_dict() returned. Nothing was loaded"
            )
        if self.generator_state() is not None:
            self.set_generator_state(state["generator"])
        for name in self.saved_attributes:
            before, value = vars(self)[name], _copied(state[name])
            moved = isinstance(before, Tensor) and isinstance(value, Tensor)
            setattr(self, name, value.to(before.device) if moved else value)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
