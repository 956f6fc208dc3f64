# SPDX-License-Identifier: Apache-2.0
"""State of objects: the attributes that a class declares, and a random generator."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_replay.options import checked_seed

logger: logging.Logger = logging.getLogger(__name__)

_STATE_BYTES = {16, 5056}  # Bytes of the states of generators on a GPU and on the CPU.
_STEPS = 2**53  # Number of floats of equal spacing in [0, 1).


def seeded_generator(seed: int | None, device: torch.device | str = "cpu") -> torch.Generator:
    """Returns a generator. ``None`` seeds it from torch's global generator. A seed has at most 64 bits."""
    seed = checked_seed(seed)
    if seed is None:
        seed = int(torch.randint(2**62, (), device="cpu"))
    return torch.Generator(device).manual_seed(seed)


def uniform(generator: torch.Generator) -> float:
    """Draws a float from [0, 1) at half the cost of ``torch.rand``."""
    return int(torch.randint(_STEPS, (), generator=generator, device="cpu")) / _STEPS


class Stateful:
    """Base class of objects that list the attributes to be saved.

    An attribute ``_name`` has the entry ``name`` in the state. NumPy arrays are saved as tensors.
    """

    saved_attributes: tuple[str, ...] = ()  #: Names of attributes, tensors or plain values, that belong to the state.
    saved_parts: tuple[str, ...] = ()  #: Names of attributes with a ``state_dict``, or ``None``.
    #: Names of attributes with options that decided what is kept of stored rows. A load refuses other values, because
    #: they would act on new rows only.
    stored_options: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the declared attributes, added to the state of TorchRL's class."""
        self._check_state()
        inherited: Any = getattr(super(), "state_dict", dict)()
        return {**(inherited or {}), **self._read_attributes()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        Raises:
            ValueError: An entry is missing, or the state was saved with other parts. Nothing is changed then.
        """
        self._restore_attributes(state_dict)
        inherited = getattr(super(), "load_state_dict", None)
        if inherited is not None:
            inherited(state_dict)

    def _check_state(self) -> None:
        # If TorchRL's class has no state either, draws after a load would silently start from the beginning.
        inherited = getattr(super(), "state_dict", None)
        is_abstract = getattr(inherited, "__isabstractmethod__", False)
        if type(self).state_dict is not Stateful.state_dict or not is_abstract:
            return
        bases = (base for base in type(self).__mro__ if base not in (Stateful, SeededStateful))
        if not any("saved_attributes" in vars(base) for base in bases):
            raise TypeError(
                f"{type(self).__name__} declares no state: set saved_attributes to the names of the attributes that "
                "decide what is drawn or kept, or to () if none does; or define state_dict and load_state_dict"
            )

    def _entries(self) -> list[str]:
        return [name.lstrip("_") for name in (*self.saved_attributes, *self.saved_parts)]

    def _read_attributes(self) -> dict[str, Any]:
        own = vars(self)
        state = {}
        for name in (*self.saved_attributes, *self.saved_parts):
            if name not in own:
                raise AttributeError(
                    f"saved_attributes of {type(self).__name__} names {name!r}, which is not an attribute of the "
                    "object; set it in the constructor"
                )
            is_part = name in self.saved_parts and own[name] is not None
            state[name.lstrip("_")] = own[name].state_dict() if is_part else _copied(own[name])
        return state

    def _restore_attributes(self, state: dict[str, Any]) -> None:
        own = vars(self)
        missing = [entry for entry in self._entries() if entry not in state]
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
        # Parts come first, because they may refuse their state.
        for name in self.saved_parts:
            if own[name] is not None:
                own[name].load_state_dict(state[name.lstrip("_")])
        for name in self.saved_attributes:
            before = own[name]
            value = _copied(state[name.lstrip("_")])
            if isinstance(value, Tensor) and isinstance(before, np.ndarray):
                value = value.cpu().numpy()
            elif isinstance(value, Tensor) and isinstance(before, Tensor):
                value = value.to(before.device)
            setattr(self, name, value)


class SeededStateful(Stateful):
    """Base class of all parts: adds a random generator, so that a saved buffer continues with the same draws.

    Call :meth:`_seed_generator` in the constructor of a part that draws. TorchRL's ``buffer.set_rng(generator)``
    replaces the generator through ``_rng``. If TorchRL sets ``None``, as in a buffer that is built without a generator,
    the generator stays. A part that draws nothing ignores a generator.
    """

    _generator: Any = None  # A torch.Generator, after _seed_generator was called.
    _given_generator: Any = None  # The generator of set_rng for a part without its own; not saved, as in TorchRL.

    def _seed_generator(self, seed: int | None, device: torch.device | str = "cpu") -> None:
        # The __setattr__ of a torch.nn.Module, which a transform is, takes microseconds.
        object.__setattr__(self, "_generator", seeded_generator(seed, device))

    @property
    def _rng(self) -> Any:
        return self._given_generator if self._generator is None else self._generator

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        if generator is not None:
            object.__setattr__(self, "_given_generator" if self._generator is None else "_generator", generator)

    def reseed(self, seed: int) -> None:
        """Restarts the generator. ``Replay.seed`` calls it.

        :meta private:
        """
        if self._has_generator:
            self._generator.manual_seed(seed)

    @property
    def _has_generator(self) -> bool:
        # A user's class may have another object under this name.
        return isinstance(self._generator, torch.Generator)

    def _generator_state(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state()} if self._has_generator else {}

    def _restore_generator(self, state: Mapping[str, Any]) -> None:
        if not self._has_generator:
            return
        saved = state["generator"].cpu().to(torch.uint8)
        sizes = {len(saved), len(self._generator.get_state())}
        if sizes == _STATE_BYTES:
            logger.warning(
                "the save has the generator of another kind of device, so that %s goes on with draws of its own",
                type(self).__name__,
            )
        else:
            self._generator.set_state(saved)

    def _entries(self) -> list[str]:
        return [*super()._entries(), *self._generator_state()]

    def _read_attributes(self) -> dict[str, Any]:
        return super()._read_attributes() | self._generator_state()

    def _restore_attributes(self, state: dict[str, Any]) -> None:
        super()._restore_attributes(state)
        self._restore_generator(state)


def _copied(state: object) -> Any:
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.copy())
    if isinstance(state, Tensor):
        return state.clone()
    return copy.deepcopy(state)
