# SPDX-License-Identifier: Apache-2.0
"""The state of a part: its generator, and the attributes that it names."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from lightning_replay.seeded import Seeded


class PartState:
    """Reads and restores the generator of a part and the attributes named in :attr:`saved_attributes`.

    Raises:
        TypeError: when a subclass derives from :class:`~lightning_replay.seeded.Seeded` behind its base class, whose
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
        """Returns copies of the attributes, and the generator's state."""
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
        """Restores what :meth:`_read_attributes` returned; raises ``ValueError`` where an entry is missing."""
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
