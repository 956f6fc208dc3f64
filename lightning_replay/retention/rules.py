# SPDX-License-Identifier: Apache-2.0
"""Rules of eviction from a full buffer: they give rows a retention priority and choose a victim."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.options import ABOVE_ZERO, checked_number, checked_share
from lightning_replay.retention.surprise import greedy_on_policyness, on_policyness, retention_priority
from lightning_replay.saving.spec import rebuildable
from lightning_replay.schedules import Constant, Schedule, checked_schedule


class RetentionRule:
    """Retention priorities for :class:`~lightning_replay.writers.RetentionWriter`. The lowest row is evicted.

    Attributes:
        always_admits: Whether a candidate enters a full buffer even if its priority is the lowest.
        takes_surprise: Whether the priority of a new row is its surprise (``initial_surprise`` of the writer).
        learns: Whether feedback changes priorities.
        weighs_actions: Whether feedback may have ``action_values`` and ``action``.
        needs_actions: Whether feedback without them is refused.
        is_stochastic: Whether the victim is drawn, in proportion to :meth:`chance`.
        surprise_exponent: Exponent of the surprise in the priority, or ``None`` if there is none.
        draw_discount: Factor of the priority for each feedback for the row. 1 changes nothing.
    """

    always_admits = takes_surprise = learns = needs_actions = weighs_actions = is_stochastic = False
    surprise_exponent: float | None = None
    draw_discount: float = 1.0

    def __init__(self) -> None:
        pass  # The constructor of object takes any arguments. This one makes a rebuildable rule refuse them by name.

    def first_priority(self, rows: TensorDictBase) -> Tensor | None:
        """Returns priorities ``[M]`` of new rows, or ``None`` if priorities depend on surprise or feedback."""
        return None

    def on_policyness(self, action_values: Tensor, action: Tensor) -> Tensor:
        """Returns the second factor of the priority, ``[B]`` from ``[B, A]`` and ``[B]``."""
        return on_policyness(action_values, action)

    def priority(self, surprise: Tensor, on_policyness: Tensor) -> Tensor:
        """Returns priorities ``[B]`` of the two factors ``[B]``."""
        return surprise

    def chance(self, priority: Tensor) -> Tensor:
        """Returns how likely a stochastic rule evicts each row, positive, up to a common factor."""
        raise NotImplementedError

    @property
    def schedule(self) -> Schedule | None:
        """Schedule that changes the priorities of stored rows, or ``None`` if there is none."""
        return None

    def follow(self, value: float) -> bool:
        """Sets the present value of :attr:`schedule`, and returns whether priorities change."""
        return False


class _Surprising(RetentionRule):
    """Rules with surprise, raised to an exponent that may be annealed."""

    takes_surprise = learns = True
    draw_discount: float
    surprise_exponent: float
    exponent_step: float = 0.01  # Smaller changes leave the stored priorities unchanged.

    def __init__(self, surprise_exponent: float | Schedule = 1.0, draw_discount: float = 1.0) -> None:
        self.draw_discount = checked_number("draw_discount", draw_discount, ABOVE_ZERO, 1.0)
        schedule = checked_schedule("surprise_exponent", surprise_exponent)
        if not isinstance(schedule, Constant) and schedule.clock == "draws":
            raise ValueError(
                "surprise_exponent follows the clock 'draws', which a writer does not have; use a schedule of "
                "'updates' or 'env_steps', and set these clocks with replay.advance"
            )
        self._schedule = schedule
        self.surprise_exponent = schedule(0)

    @property
    def schedule(self) -> Schedule | None:
        """Schedule of the exponent, or ``None`` for a constant."""
        return None if isinstance(self._schedule, Constant) else self._schedule

    def follow(self, value: float) -> bool:
        """Sets the exponent in steps of a hundredth, because every change computes all priorities again."""
        moved = abs(value - self.surprise_exponent)
        if moved < self.exponent_step and not (moved and value in (0.0, 1.0)):
            return False
        self.surprise_exponent = max(float(value), 0.0)
        return True

    def priority(self, surprise: Tensor, on_policyness: Tensor) -> Tensor:
        """``surprise ** surprise_exponent * on_policyness``."""
        return retention_priority(surprise, on_policyness, surprise_exponent=self.surprise_exponent)


class _Weighing:
    """Options and formula of the on-policyness."""

    weighs_actions = True

    def __init__(self, q_inverse_temperature: float = 1.0, greedy_epsilon: float | None = None) -> None:
        self.q_inverse_temperature: float = checked_number("q_inverse_temperature", q_inverse_temperature, 0.0)
        self.greedy_epsilon: float | None = (
            None if greedy_epsilon is None else checked_share("greedy_epsilon", greedy_epsilon)
        )

    def on_policyness(self, action_values: Tensor, action: Tensor) -> Tensor:
        """Returns the softmax of the values at the action, or 1 for greedy actions and ε for others."""
        if self.greedy_epsilon is None:
            return on_policyness(action_values, action, q_inverse_temperature=self.q_inverse_temperature)
        return greedy_on_policyness(action_values, action, epsilon=self.greedy_epsilon)


class _WeighingAlone(_Weighing, RetentionRule):
    """Rules without surprise. The on-policyness of new rows is 1, because the present policy chose their actions."""

    learns = needs_actions = True

    def first_priority(self, rows: TensorDictBase) -> Tensor | None:
        """Returns 1 for each row."""
        return torch.ones(rows.shape[0], dtype=torch.float32, device="cpu")

    def priority(self, surprise: Tensor, on_policyness: Tensor) -> Tensor:
        """Returns the on-policyness."""
        return on_policyness


@rebuildable
class SurpriseOnPolicyness(_Weighing, _Surprising):
    """The rule of the paper: surprise times on-policyness. The lowest row leaves, and it may be the candidate.

    Feedback without ``action_values`` counts as on-policyness 1, so that only surprise decides.

    Args:
        q_inverse_temperature: Inverse temperature β, which multiplies Q inside the softmax. With 0, only surprise
            decides.
        greedy_epsilon: On-policyness of actions that are not greedy, in place of the softmax. It is slightly worse.
        surprise_exponent: Exponent of the surprise. A schedule anneals all stored priorities.
        draw_discount: Factor in (0, 1] by which each reported TD error multiplies the priority of its row. Rows with
            irreducible error therefore leave after some draws. 1 is the rule of the paper. docs/retention.md shows
            measurements of 0.9.
    """

    def __init__(
        self,
        q_inverse_temperature: float = 1.0,
        greedy_epsilon: float | None = None,
        surprise_exponent: float | Schedule = 1.0,
        draw_discount: float = 1.0,
    ) -> None:
        _Weighing.__init__(self, q_inverse_temperature, greedy_epsilon)
        _Surprising.__init__(self, surprise_exponent, draw_discount)


@rebuildable
class SurpriseOnly(_Surprising):
    """The ablation without on-policyness: ``action_values`` are ignored.

    Args:
        surprise_exponent: Exponent of the surprise. It does not change the order of stored rows.
        draw_discount: Factor for each draw, see :class:`SurpriseOnPolicyness`.
    """

    def priority(self, surprise: Tensor, on_policyness: Tensor) -> Tensor:
        """``surprise ** surprise_exponent``."""
        return super().priority(surprise, torch.ones_like(surprise))


@rebuildable
class OnPolicynessOnly(_WeighingAlone):
    """The ablation without surprise: only on-policyness decides.

    Args:
        q_inverse_temperature, greedy_epsilon: Options of the on-policyness, see :class:`SurpriseOnPolicyness`.
    """


@rebuildable
class OldestLeaves(RetentionRule):
    """First in, first out: all priorities are equal, so that the oldest row leaves. Feedback is ignored."""

    always_admits = True

    def first_priority(self, rows: TensorDictBase) -> Tensor | None:
        """Returns 0 for each row.

        :meta private:
        """
        return torch.zeros(rows.shape[0], dtype=torch.float32, device="cpu")


@rebuildable
class SmallestReturnLeaves(RetentionRule):
    """The row of the smallest ``("next", "reward")`` leaves, a discounted sum over n steps. Feedback is ignored."""

    always_admits = True

    def first_priority(self, rows: TensorDictBase) -> Tensor | None:
        """Returns the rewards, or raises ``ValueError`` unless each row has one number that is not NaN.

        :meta private:
        """
        reward = rows.get(("next", "reward"), None)
        if reward is None or reward.numel() != rows.shape[0] or bool(reward.isnan().any()):
            given = "none" if reward is None else f"shape {list(reward.shape)}, {int(reward.isnan().sum())} of them NaN"
            raise ValueError(
                f"rows leave by their reward, one for each of {rows.shape[0]} rows in ('next', 'reward'); got {given}. "
                "Nothing was stored"
            )
        return reward.detach().reshape(-1).to(torch.float32)


@rebuildable
class StochasticSurprise(RetentionRule):
    """The victim is drawn in proportion to ``(1 / (abs(td_error) + offset)) ** exponent``. Candidates always enter.

    Feedback is the surprise, which is the squared TD error, so this rule takes its square root.

    Args:
        exponent: Exponent α. 0 draws victims uniformly.
        offset: Offset ε, positive. The paper gives neither number.
    """

    always_admits = takes_surprise = learns = is_stochastic = True

    def __init__(self, exponent: float = 0.6, offset: float = 1e-3) -> None:
        self.exponent: float = checked_number("exponent", exponent, 0.0)
        self.offset: float = checked_number("offset", offset, ABOVE_ZERO)

    def chance(self, priority: Tensor) -> Tensor:
        """``(sqrt(surprise) + offset) ** -exponent``."""
        return (priority.sqrt() + self.offset) ** -self.exponent


@rebuildable
class StochasticExploration(_WeighingAlone):
    """The victim is drawn in proportion to ``on_policyness ** exponent``: rare actions stay. Candidates always enter.

    Args:
        exponent: Exponent α. The paper gives no number.
        q_inverse_temperature: Inverse temperature β, which multiplies Q inside the softmax.
    """

    always_admits = is_stochastic = True

    def __init__(self, exponent: float = 0.6, q_inverse_temperature: float = 1.0) -> None:
        super().__init__(q_inverse_temperature)
        self.exponent: float = checked_number("exponent", exponent, 0.0)

    def chance(self, priority: Tensor) -> Tensor:
        """``on_policyness ** exponent``."""
        return priority**self.exponent
