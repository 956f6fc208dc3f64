# SPDX-License-Identifier: Apache-2.0
"""Conflict-averse gradients: updates that also reduce the loss of the part of a batch that they help least."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_replay.options import BELOW_ONE, check_kind, checked_number
from lightning_replay.schedules import Schedule, checked_schedule
from lightning_replay.state import Stateful

_ZERO = 1e-7  # share of the longest gradient below which a combination counts as zero


def _unscaled(c: float) -> float:
    return 1.0


def conflict_averse_gradient(gradients: Tensor, c: float, rescale: Callable[[float], float] = _unscaled) -> Tensor:
    """Computes ``d = g0 + c |g0| g_w / |g_w|``, which maximizes ``min_i(g_i . d)`` subject to ``|d - g0| <= c |g0|``.

    g0 is the average of the gradients and ``g_w = sum(w_i g_i)``, with w of the simplex that minimizes
    ``g_w . g0 + c |g0| |g_w|``, found from the inner products of the gradients alone. If g_w vanishes, no d helps every
    part, and d is g0. If all gradients are equal, d is ``(1 + c) g0``. CAGrad, Liu et al. 2021,
    https://arxiv.org/abs/2110.14048.

    Args:
        gradients: ``[T, P]``, one row for each part.
        c: Radius of the search as a share of ``|g0|``, in [0, 1). With 0, the result is the average.
        rescale: Factor of the result as a function of c. It is 1 in the paper. Files of the authors' code use
            ``1 / (1 + c)``, which keeps the average's length if all parts agree, or ``1 / (1 + c**2)``.

    Returns:
        ``[P]``.

    Raises:
        ValueError: ``gradients`` is not ``[T, P]`` or not finite, or c is outside [0, 1).
    """
    checked_number("c", c, 0.0, BELOW_ONE, accepted="a number in [0, 1), where 0 is the average gradient")
    if gradients.ndim != 2 or gradients.shape[0] == 0:
        raise ValueError(
            f"gradients has shape {list(gradients.shape)}; it must be [T, P], one row for each part. "
            "Flatten the gradient of each part and stack them."
        )
    average = gradients.mean(0)
    if c == 0:
        return average
    # T x T numbers are handled in Python in less time than one kernel on a GPU takes.
    products = (gradients @ gradients.t()).double().cpu()
    if not bool(torch.isfinite(products).all()):
        raise ValueError("gradients are NaN, infinite, or too long to be squared; check the losses they are from.")
    inner = products.tolist()
    length = math.sqrt(max(0.0, sum(map(sum, inner)))) / len(inner)
    longest = math.sqrt(max(inner[part][part] for part in range(len(inner))))
    if length <= _ZERO * longest:  # The radius of the search vanishes with the average.
        return average
    normalized = [[value / longest**2 for value in row] for row in inner]
    weights = _least_helped(normalized, c * length / longest)
    weighted_length = math.sqrt(max(0.0, _quadratic(normalized, weights))) * longest
    if weighted_length <= _ZERO * longest:
        return average * rescale(c)
    combined = gradients.t() @ torch.tensor(weights, dtype=gradients.dtype, device=gradients.device)
    return (average + combined * (c * length / weighted_length)) * rescale(c)


class ConflictAverseStep(Stateful):
    """Sets ``.grad`` to the conflict-averse gradient of the parts of a batch, for any optimizer.

    Call :meth:`backward` in place of ``loss.backward()``. It costs one backward pass for each part and overwrites
    ``.grad`` (no accumulation, no ``zero_grad`` needed). The SSET paper uses it with event tables. There, a larger c
    helps early and hurts late, so let it fall to 0. See :func:`conflict_averse_gradient`.

    Args:
        parameters: Parameters of the optimizer.
        c: A number in [0, 1), or a schedule of such numbers by the calls of this object, with clock ``"updates"``.
        rescale: Factor of the gradient as a function of c.

    Raises:
        ValueError: No parameter requires a gradient, ``c`` is a schedule of environment steps, or c is outside [0, 1).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> step = ConflictAverseStep([weight], c=0.0)
        >>> rows = (torch.tensor([[4.0, 0.0], [0.0, 2.0], [0.0, 6.0]]) * weight).sum(1)
        >>> _ = step.backward(rows, parts=torch.tensor([0, 1, 1]))
        >>> weight.grad  # c is 0: that of the mean
        tensor([1.3333, 2.6667])
    """

    saved_attributes: tuple[str, ...] = ("updates",)

    def __init__(
        self,
        parameters: Iterable[Tensor],
        c: float | Schedule = 0.5,
        rescale: Callable[[float], float] = _unscaled,
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self._parameters:
            raise ValueError("parameters has none that requires a gradient; pass those of the optimizer.")
        self._schedule = checked_schedule("c", c, 0.0, BELOW_ONE)
        if self._schedule.clock == "env_steps":
            raise ValueError(f'c is {c!r}, a schedule of environment steps; give a schedule with clock="updates".')
        check_kind("rescale", rescale, Callable, "a function of c, such as lambda c: 1 / (1 + c)")
        self._rescale = rescale
        self.updates: int = 0

    @property
    def c(self) -> float:
        """c at the next call."""
        return self._schedule(self.updates)

    def backward(self, rows: Tensor, parts: Tensor) -> Tensor:
        """Sets ``.grad`` from the loss of each row of a batch and returns the mean loss, detached.

        A part's loss is the sum over its rows times ``T / B``. The average over the T present parts is therefore the
        mean over the batch, and c = 0 is ``rows.mean().backward()``.

        Args:
            rows: ``[B]`` or ``[B, 1]``, multiplied by their ``priority_weight``.
            parts: int64 ``[B]``, the part of each row, such as ``batch["table"]``.
        """
        rows = rows.reshape(-1)
        parts = parts.reshape(-1)
        if rows.shape != parts.shape or not len(rows):
            raise ValueError(
                f"rows has {len(rows)} losses and parts {len(parts)} entries; give each row of the batch one of both."
            )
        present, position = parts.unique(return_inverse=True)
        sums = rows.new_zeros(len(present)).index_add(0, position, rows)
        self.backward_parts(sums * (len(present) / len(rows)))
        return rows.detach().mean()

    def backward_parts(self, losses: Tensor | Sequence[Tensor]) -> None:
        """Sets ``.grad`` from one loss for each part, ``[T]`` or T scalars. :meta private:"""
        losses = list(losses)
        flat: list[Tensor] = []
        for part, loss in enumerate(losses, 1):
            # The parts share their graph. The last one may free it.
            gradients = torch.autograd.grad(
                loss, self._parameters, retain_graph=part < len(losses), allow_unused=True, materialize_grads=True
            )
            flat.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        combined = conflict_averse_gradient(torch.stack(flat), self.c, self._rescale)
        gradients = combined.split([parameter.numel() for parameter in self._parameters])
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype)
        self.updates += 1


def _least_helped(products: list[list[float]], radius: float) -> list[float]:
    """Returns weights of the simplex that minimize ``g_w . g0 + radius |g_w|``, from the gradients' inner products."""
    # |g_w| is the minimum of (|g_w|² / s + s) / 2 over s > 0, which gives a quadratic problem for each s. The best s is
    # |g_w|. Below it |g_w| is longer than s, and above it shorter, so that s is found by bisection.
    count = len(products)
    linear = [sum(row) / count for row in products]
    weights = [1 / count] * count
    low = math.log(_ZERO / 2)
    high = 0.0  # The longest gradient has length 1.
    while high - low > 1e-9:
        middle = (low + high) / 2
        length = math.exp(middle)
        _minimize_quadratic(products, linear, radius / length, weights)
        if _quadratic(products, weights) > length**2:
            low = middle
        else:
            high = middle
    return weights


def _minimize_quadratic(
    products: list[list[float]], linear: list[float], curvature: float, weights: list[float]
) -> None:
    """Changes ``weights`` to minimize ``linear . w + curvature / 2 * w G w`` over the simplex."""
    # Moves the pair with the steepest exchange to its minimum until no exchange improves, as in SMO (Platt 1998).
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
    return sum(first * sum(map(float.__mul__, row, weights)) for first, row in zip(weights, products, strict=True))
