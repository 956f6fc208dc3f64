# SPDX-License-Identifier: Apache-2.0
"""Calls an agent's ``act`` outside its training step and reads the actions that it returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from tensordict import TensorDictBase
from torch import Tensor, nn

from lightning_replay.agents.interfaces import ActingAgent, RolloutAgent
from lightning_replay.agents.parameterized_actions import ParameterizedActions, is_parameterized

__all__ = ["Action", "ActionReader", "act_on", "act_with_value_on", "acting", "as_array", "as_input", "values_of"]

# one array, or for actions with parameters the discrete actions [N] and the parameters of all actions [N, P]
Action = np.ndarray | tuple[np.ndarray, np.ndarray]


@contextmanager
def acting(agent: Any) -> Iterator[None]:
    """Sets evaluation mode and disables gradients, the opposite of Lightning's training loop."""
    switched = [module for module in agent.modules() if module.training]
    _set_mode(switched, False)
    try:
        with torch.no_grad():
            yield
    finally:
        _set_mode(switched, True)


def _set_mode(modules: Iterable[nn.Module], training: bool) -> None:
    for module in modules:
        attributes = vars(module)
        if "training" in attributes and type(module).train is nn.Module.train:
            attributes["training"] = training  # 0.1 us; agent.eval() and agent.train() take 50 to 80 us per step
        else:  # compiled, or with a method of its own
            module.train(training)


def as_input(observation: np.ndarray) -> Tensor:
    """Converts observations to a tensor on the CPU; floats become float32, other dtypes stay."""
    tensor = torch.as_tensor(observation)
    return tensor.float() if tensor.is_floating_point() else tensor


class ActionReader:
    """Converts actions that an agent returned to an array ``[N, *space.shape]`` of the action space's dtype.

    Tensors on any device, arrays, numbers and lists of numbers are accepted. Dimensions of size 1 may be missing or
    added: one observation needs no batch dimension. Numbers are cast to the space's dtype within a kind or upwards:
    integers to floats, not floats to integers.

    Args:
        space: of one environment. For actions with parameters an agent returns the pair ``(discrete, parameters)`` of
            :class:`~lightning_replay.agents.parameterized_actions.ParameterizedActions`.

    Example:
        >>> read = ActionReader(Discrete(3))
        >>> read(2, 1, "Agent.act"), read(torch.tensor([[0], [1]]), 2, "Agent.act")
        (array([2]), array([0, 1]))
    """

    def __init__(self, space: Space[Any]) -> None:
        self.actions: ParameterizedActions | None = ParameterizedActions.of(space) if is_parameterized(space) else None
        self._space = space
        self._dtype, self._shape = np.dtype(space.dtype), tuple(space.shape or ())
        self._bounds = _bounds_of(space)
        if self.actions is not None:
            self._parameters = Box(self.actions.low, self.actions.high)
            self._parts = ActionReader(Discrete(len(self.actions.boxes))), ActionReader(self._parameters)

    def __call__(self, returned: Any, count: int, source: str) -> Action:
        """Reads the actions returned for ``count`` observations by ``source``, a class and method.

        Raises:
            TypeError: not numbers, or not of the space's kind.
            ValueError: another shape, or a discrete action that does not exist.
        """
        if self.actions is not None:
            if not isinstance(returned, tuple | list) or len(returned) != 2:
                raise TypeError(
                    f"{source} returned {_shown(returned)} for a batch of {count}; an action with parameters is the "
                    f"pair (discrete, parameters): integers [{count}] and the parameters of all actions "
                    f"[{count}, {self._parameters.shape[0]}], in the order of the space {self._parameters}."
                )
            parts: Any = [read(part, count, source) for read, part in zip(self._parts, returned, strict=True)]
            return parts[0], parts[1]
        space, array = self._space, as_array(returned)
        dtype, expected = self._dtype, (count, *self._shape)
        if array is None or not (array.dtype == dtype or np.can_cast(array.dtype, dtype, "same_kind")):
            raise TypeError(_refusal(returned, space, count, source))
        if array.shape != expected:
            if [size for size in array.shape if size != 1] != [size for size in expected if size != 1]:
                raise ValueError(_refusal(returned, space, count, source))
            array = array.reshape(expected)
        if self._bounds is not None and ((array < self._bounds[0]) | (array > self._bounds[1])).any():
            raise ValueError(_refusal(array.tolist(), space, count, source))
        if array.dtype != dtype:
            array = array.astype(dtype)
        return array


def _bounds_of(space: Space[Any]) -> tuple[Any, Any] | None:
    """Returns the least and the largest actions of a space of discrete ones."""
    if isinstance(space, Discrete):
        return int(space.start), int(space.start) + int(space.n) - 1
    if isinstance(space, MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return (0, 1) if isinstance(space, MultiBinary) else None


def act_on(agent: ActingAgent, observation: np.ndarray, explore: bool, read: ActionReader) -> Action:
    """Returns the actions for observations ``[N, ...]``, floats as float32; errors as :class:`ActionReader`."""
    returned = agent.act(as_input(observation).to(agent.device), explore=explore)
    return read(returned, len(observation), f"{type(agent).__name__}.act")


def act_with_value_on(
    agent: RolloutAgent, observation: np.ndarray, read: ActionReader
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Returns the columns to record for observations ``[N, ...]``, on the CPU, and the actions for the environments.

    Call it within :func:`acting`, so that the columns have no gradients.

    Raises:
        TypeError, ValueError: no ``action`` and ``state_value`` for each observation, or another batch size.
    """
    source, count = f"{type(agent).__name__}.act_with_value", len(observation)
    given = as_input(observation)
    recorded: Any = agent.act_with_value(given.to(agent.device))
    row = dict(recorded.items()) if isinstance(recorded, dict | TensorDictBase) else {}
    is_whole = row.get("action") is not None and row.get("state_value") is not None
    is_whole &= not isinstance(recorded, TensorDictBase) or recorded.batch_size == (count,)
    if not is_whole or any(np.shape(column)[:1] != (count,) for column in row.values()):
        shown = (
            f"columns of { ({key: list(np.shape(column)) for key, column in row.items()}) }"
            if row
            else _shown(recorded)
        )
        raise ValueError(
            f"{source} returned {shown} for a batch of {count}; return a TensorDict [{count}], or a dictionary of "
            f"tensors [{count}, ...], with action, state_value [{count}, 1] and the columns of the loss and of the "
            "level scores, as lightning_replay.agents.PPO does."
        )
    for key, column in row.items():
        is_tensor = isinstance(column, Tensor) or isinstance(column, TensorDictBase)  # noqa: SIM101  a union is slower
        tensor = column if is_tensor else torch.as_tensor(column)
        # A copy, because an agent may return the same tensors at each step.
        row[key] = tensor.clone() if isinstance(tensor, Tensor) and tensor.is_cpu else tensor.detach().cpu().clone()
    action: Any = read(row["action"], count, source)
    row["action"] = torch.from_numpy(action)
    row["state_value"] = _one_each(row["state_value"], count, source)
    row["observation"] = given
    return row, action


def values_of(agent: RolloutAgent, observation: np.ndarray) -> Tensor:
    """Returns the values of observations ``[N, ...]``, ``[N, 1]`` on the CPU.

    Raises:
        ValueError: ``agent.value`` returned anything but one float for each observation.
    """
    found = agent.value(as_input(observation).to(agent.device))
    return _one_each(found, len(observation), f"{type(agent).__name__}.value")


def _one_each(values: Any, count: int, source: str) -> Tensor:
    is_float = isinstance(values, Tensor) and values.is_floating_point()
    if not is_float or values.shape not in ((count, 1), (count,)):
        raise ValueError(
            f"{source} returned as values {_shown(values)} for a batch of {count}; accepted are floats [{count}, 1]."
        )
    return values.detach().cpu().reshape(count, 1)


def as_array(returned: Any) -> np.ndarray | None:
    """Converts what an agent returned to an array; ``None`` where that is impossible."""
    if isinstance(returned, Tensor):
        tensor = returned.detach() if returned.requires_grad else returned
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
    try:
        return np.asarray(returned)
    except (TypeError, ValueError, RuntimeError):  # lists of unequal lengths, or of tensors on a GPU
        return None


def _refusal(returned: Any, space: Space[Any], count: int, source: str) -> str:
    shape = (count, *(space.shape or ()))
    numbers, hint = f"{'floats' if np.issubdtype(space.dtype, np.floating) else space.dtype} {list(shape)}", ""
    if (bounds := _bounds_of(space)) is not None:
        numbers = f"integers {list(shape)} from {bounds[0]} to {bounds[1]}"
    is_array = isinstance(returned, Tensor | np.ndarray)
    if isinstance(space, Discrete) and is_array and tuple(returned.shape) == (count, space.n):
        hint = " Of one number per action take the argmax(-1)."
    return (
        f"{source} returned {_shown(returned)} for a batch of {count} observations, and the action space is {space}; "
        f"return {numbers}, as a tensor or an array.{hint}"
    )


def _shown(returned: Any) -> str:
    if isinstance(returned, Tensor | np.ndarray):
        dtype = str(returned.dtype).removeprefix("torch.")
        return f"{dtype} of shape {list(returned.shape)}"
    text = repr(returned).replace("\n", " ")
    return f"{type(returned).__name__} {text if len(text) <= 60 else text[:60] + '...'}"
