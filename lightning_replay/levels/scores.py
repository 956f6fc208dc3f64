# SPDX-License-Identifier: Apache-2.0
"""Scores of levels, means over the steps of an episode: how much a policy could still learn from a level.

Most scores exist twice: a class accepts a segment, and a function accepts tensors. A segment is a TensorDict ``[T]`` in
TorchRL's layout.
Table 1 of Jiang et al. 2021, "Prioritized Level Replay", https://arxiv.org/abs/2010.03934. Positive value loss and
MaxMC from Jiang et al. 2021, "Replay-Guided Adversarial Environment Design", https://arxiv.org/abs/2110.02439.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.options import checked_count, checked_number, checked_share

__all__ = [
    "EpisodeScore",
    "L1ValueLoss",
    "Learnability",
    "LeastConfidence",
    "MaxMC",
    "MinMargin",
    "OneStepTdError",
    "PolicyEntropy",
    "PositiveValueLoss",
    "Score",
    "SegmentScore",
    "SignedGae",
    "ValueScore",
    "gae",
    "generalized_advantages",
    "l1_value_loss",
    "least_confidence",
    "max_mc",
    "min_margin",
    "one_step_td_error",
    "policy_entropy",
    "positive_value_loss",
    "td_errors",
]

# Any for a tensor or a float: jsonargparse takes a union in this place for a class to be built
Score = Callable[[TensorDictBase], Any]


@runtime_checkable
class EpisodeScore(Protocol):
    """A score of whole episodes, such as :class:`~lightning_replay.levels.LearningProgress`.

    Attributes:
        initial_score: Score of every level before its first episode. With ``None`` levels are new until then.
    """

    initial_score: float | None

    def of_episode(self, level_id: int, episode: int, episode_return: float) -> float:
        """Computes the level's new score from an episode's number and undiscounted return."""

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that decides later scores."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""


class ValueColumns(NamedTuple):
    """Rewards and values of each step as lists, whose loops take a twentieth of torch's time on so few numbers."""

    reward: list[float]
    state_value: list[float]  #: V of the observation acted on.
    next_state_value: list[float]  #: V of the observation that followed, also of an episode's final observation.
    terminated: list[bool]
    done: list[bool]  #: Whether the step ended the episode, by termination or truncation.

    @classmethod
    def of(cls, *tensors: Tensor) -> Self:
        """Converts tensors ``[T]`` or ``[T, 1]``, in the order of the attributes. ``done`` may be left out."""
        columns: list[list[Any]] = [_numbers(tensor) for tensor in tensors]
        lengths = [len(column) for column in columns]
        if len(set(lengths)) > 1:
            steps = ", ".join(f"{name} has {length}" for name, length in zip(cls._fields, lengths, strict=False))
            raise ValueError(f"of steps, {steps}; give one value per step")
        return cls._make([*columns[:4], columns[-1]])

    def td_errors(self, discount: float) -> list[float]:
        """δ_t = r_t + γ V(s_{t+1}) - V(s_t). Bootstraps after a truncation, not after a termination."""
        return [
            reward + (0.0 if terminated else discount * following) - value
            for reward, value, following, terminated, _ in zip(*self, strict=True)
        ]

    def advantages(self, discount: float, gae_lambda: float) -> list[float]:
        """A_t = Σ_k (γλ)^k δ_{t+k}, summed up to the episode's last step."""
        advantages = self.td_errors(discount)
        decay = discount * gae_lambda
        following = 0.0
        for t in range(len(advantages) - 1, -1, -1):
            if not self.done[t]:
                advantages[t] += decay * following
            following = advantages[t]
        return advantages


class Discounting:
    """A part with its own γ or λ, which must equal the learner's."""

    discount: float | None = None
    gae_lambda: float | None = None


class SegmentScore(Discounting, ABC):
    """Base class of the scores of a segment.

    Attributes:
        needs_best_return: Whether the level buffer adds the key ``best_return``, see :class:`MaxMC`.
        discount: Discount γ of the score, compared with the learner's, or ``None`` if it has none.
        gae_lambda: Parameter λ of the score, likewise.
    """

    needs_best_return: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Computes the score of a segment ``[T]``."""


def discounts_of(part: object) -> dict[str, float]:
    """Returns ``discount`` and ``gae_lambda`` of a score or another part, as far as it declares them."""
    given = {"discount": part.discount, "gae_lambda": part.gae_lambda} if isinstance(part, Discounting) else {}
    return {name: value for name, value in given.items() if value is not None}


class ValueScore(SegmentScore):
    """Base class of the scores of rewards and values. A subclass computes its score from their lists.

    Needs ``state_value`` and ``("next", "reward" | "state_value" | "terminated" | "done")``, one number per step.

    Args:
        discount: γ of the learner, in [0, 1].

    Example:
        >>> class LargestReward(ValueScore):
        ...     def of_columns(self, columns):
        ...         return max(columns.reward)
    """

    def __init__(self, discount: float = 0.999) -> None:
        self.discount: float = checked_share("discount", discount)

    def __call__(self, steps: TensorDictBase) -> Tensor:
        following = steps["next"]
        return self._score(
            following["reward"],
            steps["state_value"],
            following["state_value"],
            following["terminated"],
            following["done"],
        )

    def _score(self, *tensors: Tensor) -> Tensor:
        return torch.tensor(self.of_columns(ValueColumns.of(*tensors)), dtype=torch.float64, device="cpu")

    @abstractmethod
    def of_columns(self, columns: ValueColumns) -> float:
        """Computes the score from lists, which the level buffer has read already."""


class OneStepTdError(ValueScore):
    """Mean of ``|δ_t|``, the last step included. See :func:`td_errors`."""

    def of_columns(self, columns: ValueColumns) -> float:
        """Computes the mean of ``|δ_t|``.

        :meta private:
        """
        return math.fsum(map(abs, columns.td_errors(self.discount))) / len(columns.reward)


class _AdvantageScore(ValueScore):
    """Mean of a term of each generalized advantage, with the learner's γ and λ."""

    _term: Callable[[float], float]

    def __init__(self, discount: float = 0.999, gae_lambda: float = 0.95) -> None:
        super().__init__(discount)
        self.gae_lambda: float = checked_share("gae_lambda", gae_lambda)

    def of_columns(self, columns: ValueColumns) -> float:
        """Computes the mean over the steps of a segment.

        :meta private:
        """
        advantages = columns.advantages(self.discount, self.gae_lambda)
        return math.fsum(map(self._term, advantages)) / len(advantages)  # fsum rounds once


class L1ValueLoss(_AdvantageScore):
    """Mean of ``|A_t|``, the default of level replay. Give it the learner's γ and λ.

    Example:
        >>> one = torch.tensor([1.0])
        >>> float(l1_value_loss(one, 0.25 * one, 9 * one, one.bool(), one.bool()))
        0.75
    """

    _term = staticmethod(abs)


class PositiveValueLoss(_AdvantageScore):
    """Mean of max(A_t, 0)."""

    _term = staticmethod(lambda advantage: max(advantage, 0.0))


class SignedGae(_AdvantageScore):
    """Mean of A_t, which may be negative."""

    _term = staticmethod(float)


def policy_entropy(logits: Tensor) -> Tensor:
    """Mean entropy of the policy over ln(number of actions): 1 for a uniform one. ``logits`` is ``[T, A]``."""
    entropy = torch.special.entr(_probabilities(logits)).sum(-1)  # 0 if an action has no chance
    return (entropy / math.log(logits.shape[-1])).mean()


def min_margin(logits: Tensor) -> Tensor:
    """Mean of 1 - (p_first - p_second) of the two likeliest actions. ``logits`` is ``[T, A]``."""
    first, second = _probabilities(logits).topk(2, dim=-1).values.unbind(-1)
    return (1.0 - (first - second)).mean()


def least_confidence(logits: Tensor) -> Tensor:
    """Mean of 1 - p of the likeliest action. ``logits`` is ``[T, A]``."""
    return (1.0 - _probabilities(logits).amax(-1)).mean()


class _PolicyScore(SegmentScore):
    _of_logits: Callable[[Tensor], Tensor]

    def __call__(self, steps: TensorDictBase) -> Tensor:
        return self._of_logits(steps["logits"])


class PolicyEntropy(_PolicyScore):
    """:func:`policy_entropy` of a segment's ``logits``, ``[T, A]``."""

    _of_logits = staticmethod(policy_entropy)


class MinMargin(_PolicyScore):
    """:func:`min_margin` of a segment's ``logits``, ``[T, A]``."""

    _of_logits = staticmethod(min_margin)


class LeastConfidence(_PolicyScore):
    """:func:`least_confidence` of a segment's ``logits``, ``[T, A]``."""

    _of_logits = staticmethod(least_confidence)


class MaxMC(SegmentScore):
    """Mean of R_best - V(s_t), R_best the largest undiscounted return of an episode on the level.

    The level buffer adds the key ``best_return``, ``[T]``: of finished episodes and of this one, once it is done.
    Before any has finished, it is the return so far.
    """

    needs_best_return = True

    def __call__(self, steps: TensorDictBase) -> Tensor:
        return max_mc(steps["state_value"], steps["best_return"])


def max_mc(state_value: Tensor, best_return: Tensor | float) -> Tensor:
    """Mean of R_best - V(s_t), see :class:`MaxMC`. ``state_value`` is ``[T]``."""
    values = torch.tensor(_numbers(state_value), dtype=torch.float64, device="cpu")
    return (torch.as_tensor(best_return, dtype=torch.float64, device="cpu").reshape(-1) - values).mean()


class Learnability:
    """p (1 - p), p the success rate over a level's last ``window`` outcomes: 0 if all fail or all succeed.

    Use it with :meth:`~lightning_replay.levels.LevelBuffer.record`, or for whole episodes, whose return is the outcome.
    A :class:`~lightning_replay.levels.LevelBuffer` with this score draws ``Proportional()`` to it at temperature 1 and
    leaves levels in flight out, unless it is given other options. Many levels share a high score, and the defaults of
    level replay would take few of them. Rutherford et al. 2024, "No Regrets: Investigating and Improving Regret
    Approximations for Curriculum Discovery", section 4, https://arxiv.org/abs/2408.15099. With
    :class:`~lightning_replay.levels.Top` and :meth:`~lightning_replay.levels.LevelBuffer.forget` it is that paper's
    periodic form. For another function of the success rate override :meth:`of_rate`.

    Args:
        window: Number of outcomes kept of each level.
        success: Return from which an episode is a success. ``None`` takes the return, in [0, 1], as the outcome.

    Raises:
        ValueError: Later, a return that is no outcome, or a score of a subclass's ``of_rate`` that is not finite.

    Example:
        >>> Learnability(window=4).of_outcomes([7], np.array([[0.0, 1.0, 1.0, 1.0]])).tolist()
        [0.1875]
    """

    initial_score: float | None = None

    def __init__(self, window: int = 8, success: float | None = None) -> None:
        self.window: int = checked_count("window", window, of="outcomes")
        self.success: float | None = None if success is None else checked_number("success", success)
        self._has_warned = False
        self._rows: dict[int, int] = {}
        self._outcomes = np.zeros((0, self.window))  # one row for each level, outcome n is at n modulo the window
        self._counts = np.zeros(0, np.int64)  # outcomes ever given

    def of_rate(self, rate: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Computes scores ``[n]`` from success rates ``[n]`` over ``count`` outcomes, int64 ``[n]``."""
        return rate * (1.0 - rate)

    def of_outcomes(self, level_ids: Sequence[int], outcomes: np.ndarray) -> np.ndarray:
        """Adds outcomes ``[n, k]`` in [0, 1], oldest first, and computes the new scores ``[n]``.

        A level that comes several times gets all its outcomes, and then one score.
        """
        entries = np.fromiter(map(self._rows.get, level_ids, repeat(-1)), np.int64)
        missing = np.flatnonzero(entries < 0).tolist()
        new = {
            one: len(self._rows) + row for row, one in enumerate(dict.fromkeys(level_ids[place] for place in missing))
        }
        entries[missing] = [new[level_ids[place]] for place in missing]
        if len(self._rows) + len(new) > len(self._counts):
            more = len(self._rows) + 2 * len(new)
            self._outcomes = np.append(self._outcomes, np.zeros((more, self.window)), 0)
            self._counts = np.append(self._counts, np.zeros(more, np.int64))
        changed, place = np.unique(entries, return_inverse=True)
        given = np.bincount(place) * outcomes.shape[1]  # number of new outcomes for each level
        most = int(given.max(initial=0))
        if most > self.window and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a level got {most} outcomes at a time, of which the last {self.window} count: give "
                f"Learnability(window={most}) to count them all",
                stacklevel=3,
            )
        entry = np.repeat(np.arange(len(changed)), given)
        number = np.arange(len(entry)) - np.repeat(
            np.cumsum(given) - given, given
        )  # position in the outcomes of its level
        window, before = self._outcomes[changed], self._counts[changed]
        rows = outcomes[np.argsort(place, kind="stable")].reshape(-1)
        window[entry, (before[entry] + number) % self.window] = rows  # the last one stays
        after = before + given
        kept = np.minimum(after, self.window)
        scores = np.asarray(self.of_rate(window.sum(1) / kept, kept), np.float64)
        if scores.shape != kept.shape or not np.isfinite(scores).all():
            raise ValueError(f"of_rate returned {scores}; it must return one finite score for each level")
        self._outcomes[changed], self._counts[changed] = window, after
        self._rows.update(new)
        return scores[place]

    def of_episode(self, level_id: int, episode: int, episode_return: float) -> float:
        """Computes the new score from an episode's outcome, or raises ``ValueError`` for a return outside [0, 1].

        :meta private:
        """
        outcome = episode_return if self.success is None else float(episode_return >= self.success)
        if not 0.0 <= outcome <= 1.0:
            raise ValueError(
                f"an episode on level {level_id} has the return {episode_return}, which is no outcome in [0, 1]; give "
                "Learnability(success=...), the return from which an episode is a success"
            )
        return float(self.of_outcomes([level_id], np.array([[outcome]]))[0])

    def columns(self, level_ids: Sequence[int]) -> dict[str, Tensor]:
        """Returns ``successes`` and ``outcomes`` in the window, and ``uncertainty``, of levels, float64 ``[L]`` each.

        The uncertainty is the standard deviation of the success rate under a uniform prior.
        """
        rows = [self._rows.get(level_id, -1) for level_id in level_ids]
        # Levels without outcomes have row -1, which is the appended 0.
        successes = np.append(self._outcomes.sum(1), 0.0)[rows]
        count = np.minimum(np.append(self._counts, 0)[rows], self.window).astype(np.float64)
        total = count + 2.0
        deviation = np.sqrt((successes + 1.0) * (count - successes + 1.0) / (total * total * (total + 1.0)))
        columns = {"successes": successes, "outcomes": count, "uncertainty": deviation}
        return {name: torch.from_numpy(column) for name, column in columns.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns the outcomes in the window of each level."""
        rows = len(self._rows)
        return {
            "level_id": torch.tensor(list(self._rows), dtype=torch.int64, device="cpu"),
            "outcomes": torch.from_numpy(self._outcomes[:rows].copy()),
            "counts": torch.from_numpy(self._counts[:rows].copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`. ``ValueError`` if the window differs or the entries are not outcomes."""
        outcomes = state["outcomes"].cpu().numpy().copy()
        counts = state["counts"].cpu().numpy().copy()
        if outcomes.shape != (len(counts), self.window) or len(state["level_id"]) != len(counts):
            raise ValueError(
                f"the saved outcomes are of windows of {outcomes.shape[-1]}, and this one is of {self.window}; build "
                "Learnability with the window it was saved with"
            )
        if not ((outcomes >= 0.0) & (outcomes <= 1.0)).all() or (counts < 0).any():
            raise ValueError("the saved outcomes are not all in [0, 1], or their numbers are negative")
        self._rows = {level_id: row for row, level_id in enumerate(state["level_id"].tolist())}
        self._outcomes, self._counts = outcomes, counts


def one_step_td_error(
    reward: Tensor, state_value: Tensor, next_state_value: Tensor, terminated: Tensor, *, discount: float = 0.999
) -> Tensor:
    """:class:`OneStepTdError` of tensors, with arguments as :func:`td_errors`."""
    return OneStepTdError(discount)._score(reward, state_value, next_state_value, terminated)


def _function_of(score: type[_AdvantageScore], name: str) -> Callable[..., Tensor]:
    def of_tensors(
        reward: Tensor,
        state_value: Tensor,
        next_state_value: Tensor,
        terminated: Tensor,
        done: Tensor,
        *,
        discount: float = 0.999,
        gae_lambda: float = 0.95,
    ) -> Tensor:
        return score(discount, gae_lambda)._score(reward, state_value, next_state_value, terminated, done)

    of_tensors.__name__ = of_tensors.__qualname__ = name
    of_tensors.__doc__ = f":class:`{score.__name__}` of tensors; arguments as :func:`generalized_advantages`."
    return of_tensors


l1_value_loss: Callable[..., Tensor] = _function_of(L1ValueLoss, "l1_value_loss")
positive_value_loss: Callable[..., Tensor] = _function_of(PositiveValueLoss, "positive_value_loss")
gae: Callable[..., Tensor] = _function_of(SignedGae, "gae")


def td_errors(
    reward: Tensor, state_value: Tensor, next_state_value: Tensor, terminated: Tensor, *, discount: float
) -> Tensor:
    """δ_t = r_t + γ V(s_{t+1}) - V(s_t), float64 ``[T]``. Bootstraps after a truncation, not after a termination.

    ``discount`` is γ. The others are ``[T]`` or ``[T, 1]`` of at least one step, described in :class:`ValueColumns`.
    """
    columns = ValueColumns.of(reward, state_value, next_state_value, terminated)
    return torch.tensor(columns.td_errors(checked_share("discount", discount)), dtype=torch.float64, device="cpu")


def generalized_advantages(
    reward: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    *,
    discount: float,
    gae_lambda: float,
) -> Tensor:
    """A_t = Σ_k (γλ)^k δ_{t+k} up to the episode's last step, float64 ``[T]`` (Schulman et al. 2016).

    Arguments and errors are as in :func:`td_errors`. ``gae_lambda`` is λ.
    """
    columns = ValueColumns.of(reward, state_value, next_state_value, terminated, done)
    decays = checked_share("discount", discount), checked_share("gae_lambda", gae_lambda)
    return torch.tensor(columns.advantages(*decays), dtype=torch.float64, device="cpu")


def _numbers(column: Tensor) -> list[float]:
    if column.ndim > 1 and column.shape[1:].numel() != 1:
        raise ValueError(f"a column of a segment has shape {list(column.shape)}; give [T] or [T, 1] of one episode")
    values: list[float] = (column if column.ndim == 1 else column.reshape(-1)).tolist()
    if not values:
        raise ValueError("a segment has no step; give at least one")
    return values


def _probabilities(logits: Tensor) -> Tensor:
    if logits.ndim != 2 or logits.shape[0] == 0 or logits.shape[1] < 2:
        raise ValueError(f"logits have shape {list(logits.shape)}; give [T, A], at least one step and two actions")
    return torch.log_softmax(logits.detach().to("cpu", torch.float64), dim=-1).exp()
