# SPDX-License-Identifier: Apache-2.0
"""Discrete actions with continuous parameters, as columns of an agent and as actions of Gymnasium's spaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space, Tuple


def is_parameterized(space: Space[Any]) -> bool:
    """Whether the space is composite, for :class:`ParameterizedActions`."""
    return isinstance(space, Tuple | Dict)


def random_box(space: Box, count: int, generator: np.random.Generator) -> np.ndarray:
    """Draws ``count`` values of a bounded Box as its ``sample`` does, ``[N, *space.shape]``."""
    shape, dtype = (count, *space.shape), np.dtype(space.dtype)
    if dtype.kind == "f":
        return generator.uniform(space.low, space.high, size=shape).astype(dtype)
    return generator.integers(space.low, space.high, size=shape, dtype=dtype.type, endpoint=True)


@dataclass(frozen=True)
class ParameterizedActions:
    """``K`` discrete actions, each with a vector of parameters.

    An agent's action is the pair ``(discrete, parameters)``: int64 ``[N]`` and float32 ``[N, P]``, the parameters of
    all actions one after the other in the environment's units. Masson et al. 2016, https://arxiv.org/abs/1509.01644.

    Args:
        space: of one environment.
        boxes: the space of each action's parameters.
        keys: of the discrete action and then of the boxes, where the space is a Dict.

    Example:
        >>> space = Tuple([Discrete(2), Box(-1, 1, (1,)), Box(0, 9, (2,))])
        >>> actions = ParameterizedActions.of(space)
        >>> actions.sizes, [float(value) for value in actions.high]
        ((1, 2), [1.0, 9.0, 9.0])
        >>> [part.tolist() for part in actions.for_environments(np.array([1]), np.array([[0.5, 3.0, 4.0]]))]
        [[1], [[0.5]], [[3.0, 4.0]]]
    """

    space: Space[Any]
    boxes: tuple[Box, ...]
    keys: tuple[str, ...]

    @classmethod
    def of(cls, space: Space[Any]) -> ParameterizedActions:
        """Reads ``Tuple(Discrete(K), Box_1, ..., Box_K)``, or a Dict of one Discrete and, in its order, K Boxes.

        Raises:
            ValueError: another space.
        """
        if isinstance(space, Dict):
            # the Discrete may be anywhere, because Gymnasium sorts the keys of a plain dictionary
            ordered = sorted(space.spaces.items(), key=lambda item: not isinstance(item[1], Discrete))
            keys, parts = tuple(key for key, _ in ordered), [part for _, part in ordered]
        else:
            keys, parts = (), list(space.spaces) if isinstance(space, Tuple) else []
        boxes = tuple(part for part in parts[1:] if isinstance(part, Box) and part.is_bounded("both"))
        discrete = parts[0] if parts else None
        if not isinstance(discrete, Discrete) or not len(parts) - 1 == len(boxes) == discrete.n or discrete.start != 0:
            raise ValueError(
                f"got the action space {space}; parameterized actions are Tuple(Discrete(K), Box, ..., Box), or a Dict "
                "of these, with one bounded Box per discrete action (of shape (0,) for an action without parameters) "
                "and discrete actions that start at 0. Wrap the environment in gymnasium.wrappers.TransformAction."
            )
        return cls(space, boxes, keys)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of parameters of each action."""
        return tuple(int(np.prod(box.shape)) for box in self.boxes)

    @property
    def low(self) -> np.ndarray:
        """Smallest parameters, float32 ``[P]``."""
        return np.concatenate([box.low.reshape(-1) for box in self.boxes]).astype(np.float32)

    @property
    def high(self) -> np.ndarray:
        """Largest parameters, float32 ``[P]``."""
        return np.concatenate([box.high.reshape(-1) for box in self.boxes]).astype(np.float32)

    def random(self, count: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns uniformly random discrete actions ``[N]`` and parameters ``[N, P]``."""
        discrete = generator.integers(len(self.boxes), size=count)
        drawn = [random_box(box, count, generator).reshape(count, -1) for box in self.boxes]
        return discrete, np.concatenate(drawn, axis=1).astype(np.float32)

    def for_environments(self, discrete: np.ndarray, parameters: np.ndarray) -> Any:
        """Returns the action of a vector of environments: batched arrays in the structure of the space.

        Parameters of integer boxes are rounded.
        """
        cuts = np.split(parameters, np.cumsum(self.sizes)[:-1], axis=1)
        boxes = [
            (cut if box.low.dtype.kind == "f" else np.rint(cut)).reshape(len(discrete), *box.shape).astype(box.dtype)
            for cut, box in zip(cuts, self.boxes, strict=True)
        ]
        return dict(zip(self.keys, (discrete, *boxes), strict=True)) if self.keys else (discrete, *boxes)

    def for_one(self, discrete: np.ndarray, parameters: np.ndarray) -> Any:
        """Returns the action of a single environment, from arrays ``[1]`` and ``[1, P]``."""
        batched = self.for_environments(discrete, parameters)
        if self.keys:
            return {key: part[0] for key, part in batched.items()}
        return tuple(part[0] for part in batched)
