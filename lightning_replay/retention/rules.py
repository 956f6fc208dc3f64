# SPDX-License-Identifier: Apache-2.0
"""Who leaves a full buffer: what a row's retention priority is made of, and how a victim is found by it."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.retention.surprise import greedy_on_policyness, on_policyness, retention_priority
from lightning_replay.saving.spec import recorded
from lightning_replay.schedules import Constant, Schedule, checked_schedule
from lightning_replay.validation import ABOVE_ZERO, checked_number, checked_share


class RetentionRule:
    """Retention priorities for :class:`~lightning_replay.writers.RetentionWriter`; the lowest row is evicted.

    Attributes:
        always_admits: a candidate enters a full buffer whatever its priority.
        takes_surprise: the priority of a new row is its surprise (``initial_surprise`` of the writer).
        learns: feedback changes priorities.
        needs_actions: feedback without ``action_values`` and ``action`` is of no use.
        weighs_actions: they are made use of.
        is_stochastic: the victim is drawn, in proportion to :meth:`chance`.
        surprise_exponent: of the surprise in the priority; ``None`` where it is not raised to a power.
    """

    always_admits = False
    takes_surprise = False
    learns = False
    needs_actions = False
    weighs_actions = False
    is_stochastic = False
    surprise_exponent: float | None = None

    def first_priority(self, rows: TensorDictBase) -> Tensor | None:
        """Priorities ``[M]`` of new rows, where they depend on the rows alone; ``None`` where on what is fed back."""
        return None

    def on_policyness(self, action_values: Tensor, action: Tensor) -> Tensor:
        """The second factor of the priority, ``[B]`` from ``[B, A]`` and ``[B]``."""
        return on_policyness(action_values, action)

    def priority(self, surprise: Tensor, on_policyness: Tensor) -> Tensor:
        """Priorities ``[B]`` of the two factors ``[B]``."""
        return surprise

    def chance(self, priority: Tensor) -> Tensor:
        """Of stochastic rules: how likely each row is the victim, up to a common factor; positive."""
        raise NotImplementedError

    @property
    def schedule(self) -> Schedule | None:
        """Returns what changes the priorities of stored rows as time goes by; ``None`` where nothing does."""
        return None

    def follow(self, value: float) -> bool:
        """Takes the present value of :attr:`schedule`; whether that changes priorities."""
        return False


class _Surprising(RetentionRule):
    """Rules in which surprise counts, raised to an exponent that may be annealed."""

    takes_surprise = learns = True
    surprise_exponent: float
    exponent_step = 0.01  # between two of them all priorities are computed anew

    def __init__(self, surprise_exponent: float | Schedule = 1.0) -> None:
        schedule = checked_schedule("surprise_exponent", surprise_exponent)
        if not isinstance(schedule, Constant) and schedule.clock == "draws":
            raise ValueError(
                "surprise_exponent follows the clock 'draws', which a writer does not see; use a schedule of 'updates' "
                "or 'env_steps', and tell the buffer by replay.advance"
            )
        self._schedule = schedule
        self.surprise_exponent = schedule(0)

    @property
    def schedule(self) -> Schedule | None:
        """That of the exponent, unless it is constant."""
        return None if isinstance(self._schedule, Constant) else self._schedule

    def follow(self, value: float) -> bool:
        """Takes the exponent over once it has moved by a hundredth, or reached 0 or 1."""
        moved = abs(value - self.surprise_exponent)
        if moved < self.exponent_step and not (moved and value in (0.0, 1.0)):
            return False
        self.surprise_exponent = max(float(value), 0.0)
        return True

    def priority(self, surprise: Tensor, on_policyness: Tensor) -> Tensor:
        """``surprise ** surprise_exponent * on_policyness``."""
        return retention_priority(surprise, on_policyness, surprise_exponent=self.surprise_exponent)


class _Weighing:
    """The on-policyness that rules share."""

    weighs_actions = True

    def __init__(self, q_inverse_temperature: float, greedy_epsilon: float | None) -> None:
        self.q_inverse_temperature = checked_number("q_inverse_temperature", q_inverse_temperature, 0.0)
        self.greedy_epsilon = None if greedy_epsilon is None else checked_share("greedy_epsilon", greedy_epsilon)

    def on_policyness(self, action_values: Tensor, action: Tensor) -> Tensor:
        """Softmax of the action values, or 1 and ``greedy_epsilon``."""
        if self.greedy_epsilon is None:
            return on_policyness(action_values, action, q_inverse_temperature=self.q_inverse_temperature)
        return greedy_on_policyness(action_values, action, epsilon=self.greedy_epsilon)


@recorded
class SurpriseOnPolicyness(_Weighing, _Surprising):
    """The proposal: surprise times on-policyness, the lowest leaves, a candidate that is lowest is refused.

    Feedback without ``action_values`` counts as on-policyness 1: surprise alone.

    Args:
        q_inverse_temperature: β, multiplies Q inside the softmax; 0 leaves surprise alone, up to a constant.
        greedy_epsilon: on-policyness of actions that are not greedy, instead of the softmax; slightly worse.
        surprise_exponent: of the surprise; a schedule anneals it, and all stored priorities with it.
    """

    def __init__(
        self,
        q_inverse_temperature: float = 1.0,
        greedy_epsilon: float | None = None,
        surprise_exponent: float | Schedule = 1.0,
    ) -> None:
        _Weighing.__init__(self, q_inverse_temperature, greedy_epsilon)
        _Surprising.__init__(self, surprise_exponent)


@recorded
class SurpriseOnly(_Surprising):
    """The ablation without on-policyness: ``action_values`` are ignored.

    Args:
        surprise_exponent: of the surprise; it changes no order of stored rows.
    """

    def __init__(self, surprise_exponent: float | Schedule = 1.0) -> None:
        super().__init__(surprise_exponent)

    def priority(self, surprise: Tensor, on_policyness: Tensor) -> Tensor:
        """``surprise ** surprise_exponent``."""
        return super().priority(surprise, torch.ones_like(surprise))


@recorded
class OnPolicynessOnly(_Weighing, RetentionRule):
    """The ablation without surprise: on-policyness alone, 1 for new rows, whose policy is the present one.

    Args:
        q_inverse_temperature: β, multiplies Q inside the softmax.
        greedy_epsilon: on-policyness of actions that are not greedy, instead of the softmax.
    """

    learns = needs_actions = True

    def __init__(self, q_inverse_temperature: float = 1.0, greedy_epsilon: float | None = None) -> None:
        super().__init__(q_inverse_temperature, greedy_epsilon)

    def first_priority(self, rows: TensorDictBase) -> Tensor | None:
        """1."""
        return torch.ones(rows.shape[0])

    def priority(self, surprise: Tensor, on_policyness: Tensor) -> Tensor:
        """The on-policyness."""
        return on_policyness


@recorded
class OldestLeaves(RetentionRule):
    """First in, first out: all priorities are alike, and of equal ones the oldest leaves. Ignores feedback."""

    always_admits = True

    def __init__(self) -> None:
        pass

    def first_priority(self, rows: TensorDictBase) -> Tensor | None:
        """0."""
        return torch.zeros(rows.shape[0])


@recorded
class SmallestReturnLeaves(RetentionRule):
    """The row of the smallest ``("next", "reward")`` leaves, over n steps the discounted sum. Ignores feedback."""

    always_admits = True

    def __init__(self) -> None:
        pass

    def first_priority(self, rows: TensorDictBase) -> Tensor | None:
        """The rewards.

        Raises:
            ValueError: rows without rewards, or with several each, or a NaN among them.
        """
        reward = rows.get(("next", "reward"), None)
        if reward is None or reward.numel() != rows.shape[0]:
            given = "none" if reward is None else f"shape {list(reward.shape)}"
            raise ValueError(
                f"rows leave by their reward, one for each of {rows.shape[0]} rows in ('next', 'reward'); got {given}. "
                "Nothing was stored"
            )
        reward = reward.detach().reshape(-1).to(torch.float32)
        if bool(reward.isnan().any()):
            positions = reward.isnan().nonzero().flatten().tolist()
            raise ValueError(
                f"rows {positions[:10]} have reward NaN, and rows leave by their reward. Nothing was stored"
            )
        return reward


@recorded
class StochasticSurprise(RetentionRule):
    """The victim is drawn in proportion to ``(1 / (abs(td_error) + offset)) ** exponent``; candidates always enter.

    Surprise is fed back squared and its root taken here, so that the same feedback serves every rule.

    Args:
        exponent: α; 0 draws victims uniformly.
        offset: ε, positive; the paper gives neither number.
    """

    always_admits = takes_surprise = learns = is_stochastic = True

    def __init__(self, exponent: float = 0.6, offset: float = 1e-3) -> None:
        self.exponent = checked_number("exponent", exponent, 0.0)
        self.offset = checked_number("offset", offset, ABOVE_ZERO)

    def chance(self, priority: Tensor) -> Tensor:
        """``(sqrt(surprise) + offset) ** -exponent``."""
        return (priority.sqrt() + self.offset) ** -self.exponent


@recorded
class StochasticExploration(_Weighing, RetentionRule):
    """The victim is drawn in proportion to ``on_policyness ** exponent``: rare actions stay; candidates always enter.

    Args:
        exponent: α; the paper gives no number.
        q_inverse_temperature: β, multiplies Q inside the softmax.
    """

    always_admits = learns = needs_actions = is_stochastic = True

    def __init__(self, exponent: float = 0.6, q_inverse_temperature: float = 1.0) -> None:
        super().__init__(q_inverse_temperature, None)
        self.exponent = checked_number("exponent", exponent, 0.0)

    def first_priority(self, rows: TensorDictBase) -> Tensor | None:
        """1."""
        return torch.ones(rows.shape[0])

    def priority(self, surprise: Tensor, on_policyness: Tensor) -> Tensor:
        """The on-policyness."""
        return on_policyness

    def chance(self, priority: Tensor) -> Tensor:
        """``on_policyness ** exponent``."""
        return priority**self.exponent
