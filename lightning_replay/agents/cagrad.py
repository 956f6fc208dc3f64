# SPDX-License-Identifier: Apache-2.0
"""One gradient from several that conflict: an update that also serves the part of a batch it would serve least."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_replay.schedules import Schedule, checked_schedule
from lightning_replay.validation import BELOW_ONE, check_callable, checked_number

#: Below this share of the longest gradient a combination counts as zero.
_ZERO = 1e-7


def unscaled(c: float) -> float:
    """1: the gradient of the paper."""
    return 1.0


def divided_by_one_plus(c: float) -> float:
    """``1 / (1 + c)``: as long as the average where all parts agree; in one file of the authors' code."""
    return 1 / (1 + c)


def divided_by_one_plus_square(c: float) -> float:
    """``1 / (1 + c**2)``: in another file of the authors' code."""
    return 1 / (1 + c**2)


def conflict_averse_gradient(gradients: Tensor, c: float, rescale: Callable[[float], float] = unscaled) -> Tensor:
    """Computes ``d = g0 + c |g0| g_w / |g_w|``: of all d with ``|d - g0| <= c |g0|`` the one that helps the least most.

    g0 is the average of the gradients and ``g_w = sum(w_i g_i)``, with w of the simplex that minimises
    ``g_w . g0 + c |g0| |g_w|``; then ``min_i(g_i . d)`` is as large as it can be. The minimum is found from the inner
    products alone, whatever P. Where g_w vanishes no d helps every part, and d is g0. Where all gradients are equal,
    d is ``(1 + c) g0``. CAGrad, Liu et al. 2021, https://arxiv.org/abs/2110.14048.

    Args:
        gradients: ``[T, P]``, one row for each part.
        c: radius of the search as a share of ``|g0|``, in [0, 1); 0 is the average.
        rescale: factor of the result as a function of c; :func:`divided_by_one_plus` and
            :func:`divided_by_one_plus_square` are those of the authors' code.

    Returns:
        ``[P]``.

    Raises:
        ValueError: ``gradients`` is not ``[T, P]`` or not finite; c lies outside [0, 1).

    Example:
        >>> gradients = torch.tensor([[4.0, 0.0], [0.0, 2.0]])
        >>> direction = conflict_averse_gradient(gradients, c=0.5)
        >>> gradients @ gradients.mean(0), gradients @ direction
        (tensor([8., 2.]), tensor([8.0000, 4.2361]))
    """
    _check_radius(c)
    if gradients.ndim != 2 or gradients.shape[0] == 0:
        raise ValueError(
            f"gradients has shape {list(gradients.shape)}; it takes [T, P], one row for each part. "
            "Flatten the gradient of each part and stack them."
        )
    average = gradients.mean(0)
    if c == 0:
        return average
    products = (gradients @ gradients.t()).double().cpu()
    if not bool(torch.isfinite(products).all()):
        raise ValueError("gradients are NaN, infinite, or too long to be squared; look for the loss that made them so.")
    inner = products.tolist()
    length = math.sqrt(max(0.0, sum(map(sum, inner)))) / len(inner)
    longest = math.sqrt(max(inner[part][part] for part in range(len(inner))))
    if length <= _ZERO * longest:
        return average
    normalized = [[value / longest**2 for value in row] for row in inner]
    weights = _least_helped(normalized, c * length / longest)
    weighted_length = math.sqrt(max(0.0, _quadratic(normalized, weights))) * longest
    if weighted_length <= _ZERO * longest:
        return average * rescale(c)
    combined = gradients.t() @ torch.tensor(weights, dtype=gradients.dtype, device=gradients.device)
    return (average + combined * (c * length / weighted_length)) * rescale(c)


class ConflictAverseStep:
    """Puts the conflict-averse gradient of the parts of a batch into ``.grad``, for any optimiser to step with.

    :meth:`backward` stands where ``loss.backward()`` stood. It costs one pass backwards for each part, and overwrites
    ``.grad`` (no accumulation, no ``zero_grad`` needed). The SSET paper combines event tables with it: a larger c helps
    early and hurts late, so let it fall to 0. See :func:`conflict_averse_gradient`.

    Args:
        parameters: what the optimiser steps.
        c: a number in [0, 1), or a schedule of such numbers that reads the calls of this object: clock ``"updates"``.
        rescale: factor of the gradient as a function of c.

    Raises:
        ValueError: no parameter that takes a gradient; a schedule that follows environment steps; c outside [0, 1).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> step = ConflictAverseStep([weight], c=0.0)
        >>> rows = (torch.tensor([[4.0, 0.0], [0.0, 2.0], [0.0, 6.0]]) * weight).sum(1)
        >>> _ = step.backward(rows, parts=torch.tensor([0, 1, 1]))
        >>> weight.grad  # c is 0: that of the mean
        tensor([1.3333, 2.6667])
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        c: float | Schedule = 0.5,
        rescale: Callable[[float], float] = unscaled,
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self._parameters:
            raise ValueError("parameters holds none that takes a gradient; pass those that the optimiser steps.")
        self._schedule = checked_schedule("c", c, 0.0, BELOW_ONE)
        if self._schedule.clock == "env_steps":
            raise ValueError(f'c is {c!r}, which follows environment steps; give a schedule with clock="updates".')
        check_callable("rescale", rescale, "a function of c, such as divided_by_one_plus")
        self._rescale = rescale
        self.updates = 0

    @property
    def c(self) -> float:
        """c at the next call."""
        return self._schedule(self.updates)

    def backward(self, rows: Tensor, parts: Tensor) -> Tensor:
        """Sets ``.grad`` from the loss of each row of a batch.

        A part's loss is the sum over its rows times ``T / B``, so that the average over the T parts that are present is
        the mean over the batch, and c = 0 is ``rows.mean().backward()``.

        Args:
            rows: ``[B]`` or ``[B, 1]``, with their ``priority_weight`` multiplied in.
            parts: int64 ``[B]``, the part each row belongs to, such as ``batch["table"]``.

        Returns:
            The mean loss, detached.
        """
        rows, parts = rows.reshape(-1), parts.reshape(-1)
        if rows.shape != parts.shape or not len(rows):
            raise ValueError(
                f"rows has {len(rows)} losses and parts {len(parts)} entries; give each row of the batch one of both."
            )
        present, place = parts.unique(return_inverse=True)
        count = len(present)
        losses = rows.new_zeros(count).index_add(0, place, rows) * (count / len(rows))
        self.backward_parts(losses)
        return rows.detach().mean()

    def backward_parts(self, losses: Tensor | Sequence[Tensor]) -> None:
        """Sets ``.grad`` from one loss for each part, ``[T]`` or T scalars."""
        c = self.c
        _check_radius(c)
        losses = list(losses)
        if not losses:
            raise ValueError("losses is empty; give the loss of at least one part.")
        gradients = torch.stack([self._flat_gradient(loss, part + 1 < len(losses)) for part, loss in enumerate(losses)])
        combined = conflict_averse_gradient(gradients, c, self._rescale)
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, combined.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        """The place in the schedule."""
        return {"updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave."""
        self.updates = state_dict["updates"]

    def _flat_gradient(self, loss: Tensor, retain_graph: bool) -> Tensor:
        """Gradient of one loss over all parameters, ``[P]``, 0 where it does not depend on one."""
        gradients = torch.autograd.grad(
            loss, self._parameters, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
        )
        return torch.cat([gradient.reshape(-1) for gradient in gradients])


def _check_radius(c: float) -> None:
    checked_number("c", c, 0.0, BELOW_ONE, accepted="a number in [0, 1), where 0 is the average gradient")


def _least_helped(products: list[list[float]], radius: float) -> list[float]:
    """Weights of the simplex that minimise ``g_w . g0 + radius |g_w|``, from the inner products of the gradients.

    As ``|g_w|`` is the least of ``(|g_w|**2 / s + s) / 2`` over s > 0, this is a quadratic problem for each s, and
    the best s is where ``|g_w| = s``. Below it ``|g_w|`` is longer than s and above it shorter: s is bisected.
    """
    count = len(products)
    linear = [sum(row) / count for row in products]
    weights = [1 / count] * count
    low, high = math.log(_ZERO / 2), 0.0  # the longest gradient has length 1
    while high - low > 1e-9:
        middle = (low + high) / 2
        shortness = math.exp(middle)
        _minimize_quadratic(products, linear, radius / shortness, weights)
        if _quadratic(products, weights) > shortness**2:
            low = middle
        else:
            high = middle
    return weights


def _minimize_quadratic(
    products: list[list[float]], linear: list[float], curvature: float, weights: list[float]
) -> None:
    """Moves ``weights`` to the least ``linear . w + curvature / 2 * w G w`` of the simplex, two of them at a time.

    The pair with the steepest exchange moves to its minimum until no exchange gains, as in SMO (Platt 1998).
    """
    parts = range(len(weights))
    slope = [linear[i] + curvature * sum(map(float.__mul__, products[i], weights)) for i in parts]
    enough = 1e-12 * (max(map(abs, linear)) + curvature)
    for _ in range(1000 * len(weights)):
        to = min(parts, key=slope.__getitem__)
        source = max((i for i in parts if weights[i] > 0), key=slope.__getitem__)
        gain = slope[source] - slope[to]
        if gain <= enough:
            return
        bend = curvature * (products[to][to] + products[source][source] - 2 * products[to][source])
        moved = min(weights[source], gain / bend) if bend > 0 else weights[source]
        weights[to] += moved
        weights[source] -= moved
        for i in parts:
            slope[i] += curvature * moved * (products[i][to] - products[i][source])


def _quadratic(products: list[list[float]], weights: list[float]) -> float:
    """``w G w``."""
    return sum(first * sum(map(float.__mul__, row, weights)) for first, row in zip(weights, products, strict=True))
