# SPDX-License-Identifier: Apache-2.0
"""Rewards shaped by a potential of the state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from lightning_replay.options import (
    check_kind,
    check_option,
    checked_bound,
    checked_entries,
    checked_key,
    checked_number,
    checked_numbers,
    checked_share,
)
from lightning_replay.parts import ReplayTransform
from lightning_replay.saving.spec import rebuildable

# A message shows an observation of at most this many numbers.
_MOST_SHOWN = 100


@rebuildable
class ManhattanDistance:
    """Potential ``-scale * sum(|observation - goal|)``: larger the nearer the goal.

    Args:
        goal: Goal with one number per component, in the unit of the observations.
        scale: Potential per unit of distance.
        components: Indices in the flattened observation of the components of ``goal``, by default all.

    Example:
        >>> ManhattanDistance(goal=[3.0, 1.0], scale=0.5)(torch.tensor([[0.0, 0.0], [3.0, 1.0]]))
        tensor([-2., -0.])
    """

    def __init__(self, goal: Sequence[float], scale: float = 1.0, components: Sequence[int] | None = None) -> None:
        numbers = checked_numbers("goal", goal)
        if not numbers:
            raise ValueError(f"goal is {goal!r}; a distance needs at least one number")
        self.scale: float = checked_number("scale", scale)
        self._goal = torch.tensor(numbers, device="cpu")
        self._components = _checked_components(components, len(numbers))

    def __call__(self, observation: Tensor) -> Tensor:
        chosen = _choose(observation, self._components, len(self._goal), "goal")
        return -self.scale * (chosen - self._goal.to(chosen)).abs().sum(1)

    def __repr__(self) -> str:
        return f"ManhattanDistance(goal={self._goal.tolist()}, scale={self.scale})"


@rebuildable
class OneAt:
    """Potential 1 inside a box, bounds included, and 0 outside: the gap of the SSET paper.

    Args:
        low: Lower bound per component, ``None`` for none.
        high: Upper bound per component, ``None`` for none, as many as ``low``.
        components: Indices in the flattened observation of the bounded components, by default all.

    Example:
        >>> OneAt(low=[6.0, None], high=[6.0, None])(torch.tensor([[6.0, 2.0], [5.0, 2.0]]))
        tensor([1., 0.])
    """

    def __init__(
        self, low: Sequence[float | None], high: Sequence[float | None], components: Sequence[int] | None = None
    ) -> None:
        lows = [checked_bound(f"low[{place}]", bound) for place, bound in enumerate(checked_entries("low", low))]
        highs = [checked_bound(f"high[{place}]", bound) for place, bound in enumerate(checked_entries("high", high))]
        if not lows or len(lows) != len(highs):
            raise ValueError(
                f"low has {len(lows)} bounds and high {len(highs)}; give both as many as the observation has "
                "components, None where there is no bound, or name the components with components=."
            )
        lowest = [-math.inf if bound is None else bound for bound in lows]
        highest = [math.inf if bound is None else bound for bound in highs]
        if not all(first <= second for first, second in zip(lowest, highest, strict=True)):
            raise ValueError(f"low is {lows} and high is {highs}; every low must be at most its high.")
        self._low = torch.tensor(lowest, device="cpu")
        self._high = torch.tensor(highest, device="cpu")
        self._components = _checked_components(components, len(lows))

    def __call__(self, observation: Tensor) -> Tensor:
        chosen = _choose(observation, self._components, len(self._low), "low and high")
        return ((chosen >= self._low.to(chosen)) & (chosen <= self._high.to(chosen))).all(1).to(chosen.dtype)

    def __repr__(self) -> str:
        return f"OneAt(low={self._low.tolist()}, high={self._high.tolist()})"


@rebuildable
class PotentialShaping(ReplayTransform):
    """Adds ``discount * potential(next observation) - potential(observation)`` to the rewards of a drawn batch.

    The best policies stay the same (Ng et al. 1999, https://dl.acm.org/doi/10.5555/645528.657613). A terminal state
    has potential 0. A truncated one keeps its own. In rows of n steps, which carry ``discount`` or
    ``steps_to_next_obs``, the discount is γ to the power of their steps: the terms between cancel. The stored rows are
    not changed. Baseline of the SSET paper. Put it before transforms that change observations.

    Args:
        potential: Function of observations ``[B, ...]`` that returns ``[B]``: :class:`ManhattanDistance`,
            :class:`OneAt` or any callable. A lambda works, but a saved buffer is not rebuilt with it. In a file of the
            command line or of RLlib, a class path with arguments or the import path of a function.
        discount: Discount γ of the agent and of returns over several steps, per step.
        observation_key: Key of the argument of the potential. The next one is under ``"next"``. If observations have
            several parts, name one, such as ``("observation", "state")``. All of them are a TensorDict ``[B]``.

    Raises:
        ValueError: potentials of another shape, NaN or infinite ones, or no ``("next", "terminated")`` or observations
            in the batch, or, in a ``Replay``, returns with another discount.

    Example:
        >>> from tensordict import TensorDict
        >>> following = {"observation": torch.tensor([[1.0], [2.0]]), "reward": torch.zeros(2, 1)}
        >>> following["terminated"] = torch.tensor([[False], [True]])
        >>> batch = TensorDict({"observation": torch.tensor([[0.0], [1.0]]), "next": following}, [2])
        >>> PotentialShaping(ManhattanDistance(goal=[2.0]), discount=0.5)(batch)["next", "reward"].flatten()
        tensor([1.5000, 1.0000])
    """

    # jsonargparse takes Callable[[Tensor], Tensor] for a class of tensors.
    def __init__(
        self, potential: Callable[..., Any], discount: float, observation_key: NestedKey = "observation"
    ) -> None:
        super().__init__()
        check_kind("potential", potential, Callable, "a callable from observations [B, ...] to [B]")
        self.potential = potential
        self.discount: float = checked_share("discount", discount)
        self.shaping_discount: float | None = self.discount
        self._path = checked_key("observation_key", observation_key)

    def check_buffer(self, replay: Any) -> None:
        """Refuses a buffer whose returns have another discount. Raises ``ValueError``."""
        others = [discount for _, discount in replay.returns if discount != self.discount]
        if others:
            raise ValueError(
                f"PotentialShaping has the discount {self.discount} and the returns of the buffer {others[0]}, so that "
                "other policies would be the best ones; give both the discount of the agent"
            )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Shapes the rewards of a batch of any shape."""
        shape = tensordict.batch_size
        terminated = tensordict.get(("next", "terminated"), None)
        if terminated is None:
            raise ValueError(
                'the batch has no ("next", "terminated"); the potential of a terminal state is 0. '
                "Store terminated, truncated and done with every transition."
            )
        here, there = self._potentials(tensordict, terminated.reshape(-1)).unbind(0)
        # Rows of several steps carry their discount, because the potentials between them cancel.
        factor = tensordict.get("discount", None)
        if factor is None and (steps := tensordict.get("steps_to_next_obs", None)) is not None:
            factor = self.discount**steps
        added = (self.discount if factor is None else factor.reshape(-1)) * there - here
        reward = tensordict.get(("next", "reward"))
        # All components of a reward get the same term.
        added = added.reshape(shape + (1,) * (reward.ndim - len(shape)))
        return tensordict.set(("next", "reward"), reward + added.to(_dtype_of(reward)))

    def _potentials(self, batch: TensorDictBase, terminated: Tensor) -> Tensor:
        count = batch.batch_size.numel()
        dimensions = len(batch.batch_size)
        columns = []
        for path in (self._path, ("next", *self._path)):
            column = batch.get(path, None)
            if column is None:
                raise ValueError(
                    f"the batch has no {path!r}, of which the potential is a function; name the column with "
                    "observation_key=."
                )
            columns.append(column.reshape(count, *column.shape[dimensions:]))
        # The potential may be a network, so it is called once for both.
        states = torch.cat(columns)
        potential = self.potential(states)
        if not isinstance(potential, Tensor) or potential.shape != (2 * count,):
            given = f"shape {list(potential.shape)}" if isinstance(potential, Tensor) else type(potential).__name__
            raise ValueError(
                f"the potential of {2 * count} observations is a tensor [{2 * count}]; {self.potential!r} returned "
                f"{given}. Return one number per observation, for example with .flatten() or .squeeze(1)."
            )
        ends = torch.stack((torch.zeros_like(terminated), terminated))
        # A potential may be undefined in terminal states. It counts as 0 there, so they are masked before the check.
        potential = potential.detach().to(_dtype_of(potential)).reshape(2, count).masked_fill(ends, 0.0)
        if not bool(torch.isfinite(potential).all()):
            state = states[int((~torch.isfinite(potential.flatten())).nonzero()[0])]
            shown = state.tolist() if isinstance(state, Tensor) and state.numel() <= _MOST_SHOWN else state
            raise ValueError(
                f"{self.potential!r} is NaN or infinite, for example at the observation {shown}; a potential "
                "must be finite in every state that is not terminal."
            )
        return potential


def _dtype_of(values: Tensor) -> torch.dtype:
    return values.dtype if values.is_floating_point() else torch.float32


def _checked_components(components: Sequence[int] | None, count: int) -> list[int] | None:
    if components is None:
        return None
    indices = checked_entries("components", components, "a sequence of indices")
    for place, index in enumerate(indices):
        check_option(f"components[{place}]", index, Integral, "the index of a component, a whole number")
    if len(indices) != count:
        raise ValueError(f"components is {indices}; name as many components as there are numbers: {count}.")
    return indices


def _choose(observation: Tensor, components: list[int] | None, count: int, name: str) -> Tensor:
    if not isinstance(observation, Tensor):
        raise ValueError(
            f"{name} is of one column, and the observations have the parts {sorted(observation.keys())}; name one of "
            "them with observation_key=, such as ('observation', 'state')."
        )
    flat = observation.reshape(observation.shape[0], -1)
    width = flat.shape[1]
    if components is None and width != count:
        raise ValueError(
            f"{name} has {count} numbers and an observation {width} components; give one number each, or name the "
            "components with components=."
        )
    if components is not None and not all(-width <= component < width for component in components):
        raise ValueError(f"components is {components}; an observation has {width} components, counted from 0.")
    chosen = flat if components is None else flat[:, components]
    return chosen.to(_dtype_of(chosen))
