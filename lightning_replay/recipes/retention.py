# SPDX-License-Identifier: Apache-2.0
"""Retention by surprise and on-policyness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.recipes.options import FrameOptions, assemble, prioritized_or_uniform, recipe
from lightning_replay.recipes.storage import frames_at_worst
from lightning_replay.replay import Replay
from lightning_replay.schedules import Schedule
from lightning_replay.transforms import NStepTransitions
from lightning_replay.validation import check_kind, checked_count
from lightning_replay.writers import RetentionRule, RetentionWriter, SurpriseOnPolicyness


@recipe
def surprise_retention(
    capacity: int,
    batch_size: int | None = None,
    *,
    q_inverse_temperature: float = 1.0,
    surprise_exponent: float | Schedule = 1.0,
    draw_discount: float = 1.0,
    rule: RetentionRule | None = None,
    always_admit: bool = False,
    initial_surprise: Callable[[TensorDictBase], Tensor] | None = None,
    priority_exponent: float = 0.5,
    importance_exponent: float | Schedule = 0.4,
    priority_offset: float = 1e-6,
    **options: Unpack[FrameOptions],
) -> Replay:
    """Evicts the row of lowest surprise times on-policyness, for small buffers (https://openreview.net/forum?id=SPRHpBKzJE).

    "Memory-efficient reinforcement learning with priority based on surprise and on-policyness" (2022). A full buffer
    refuses a new row that is itself lowest; ``extend`` returns the slots of the rows stored. Draws are prioritized
    independently. After every update call ``replay.update_priority(batch, td_error, action_values=...,
    action=batch["action"])``, which sets both priorities; without ``action_values``, as of agents with continuous
    actions, rows are ranked by surprise alone. Not for sparse rewards: while all surprise is 0 the first rows are
    never evicted.

    Args:
        q_inverse_temperature: β, multiplies the action values inside the softmax of on-policyness.
        surprise_exponent: of the surprise; a schedule of ``updates`` or ``env_steps`` that falls towards 0 keeps long
            runs with large buffers from accumulating outliers.
        draw_discount: factor of the priority for each time that a row was drawn and its TD error reported, in (0, 1].
            With chance (sticky actions, returns over several steps) give 0.9, which is of this library: errors that no
            training removes then leave. 1 is the paper's rule.
        rule: another of :mod:`lightning_replay.writers`, such as ``StochasticSurprise()``, in place of the three above.
        always_admit: store every new row, even the lowest.
        initial_surprise: surprise ``[M]`` of new transitions ``[M]``; without it they get the largest priority so far.
            Rules without surprise do not call it. See :class:`~lightning_replay.writers.RetentionWriter` for saves.
        priority_exponent: α of prioritized draws; 0 draws uniformly.
        priority_offset: ε, added to every sampling priority.
        n_steps: rewards summed into one return; transitions are formed before they are stored, n - 1 steps later.
        device: where transitions are kept; the retention priorities are always on the CPU.
        frame_capacity: most frames kept; a full frame store evicts the lowest transitions until a new one fits. Kept
            rows are scattered and share few frames: by default each has ``frame_stack + n_steps`` of its own, at most
            ``2 * frame_stack``.

    Sampled keys:
        discount, steps_to_next_obs: ``[B, 1]``, with ``n_steps`` above 1.

    Raises:
        ValueError: ``rule`` with options of the rule it replaces, ``n_steps`` below 1, or a capacity below ``n_steps``
            (with frames below ``frame_stack + n_steps``).
    """
    if rule is None:
        rule = SurpriseOnPolicyness(
            q_inverse_temperature, surprise_exponent=surprise_exponent, draw_discount=draw_discount
        )
    else:
        check_kind("rule", rule, RetentionRule, "an object of lightning_replay.writers, such as StochasticSurprise()")
        given = {
            "q_inverse_temperature": q_inverse_temperature,
            "surprise_exponent": surprise_exponent,
            "draw_discount": draw_discount,
        }
        ignored = ", ".join(f"{name}={value}" for name, value in given.items() if value != 1.0)
        if ignored:
            raise ValueError(
                f"rule is {type(rule).__name__}, so {ignored} would be ignored; leave it out, or give it to the "
                "rule if that has such an option"
            )
    n_steps = options["n_steps"]
    if checked_count("capacity", capacity, of="transitions") < checked_count("n_steps", n_steps):
        raise ValueError(
            f"capacity {capacity} is below n_steps {n_steps}: a single return spans more steps than are kept. "
            "Raise the capacity"
        )
    return assemble(
        Replay,
        capacity,
        batch_size,
        options,
        prioritized_or_uniform(capacity, priority_exponent, importance_exponent, priority_offset),
        default_frame_capacity=frames_at_worst(capacity, options["frame_stack"], n_steps),
        writer=RetentionWriter(rule, initial_surprise=initial_surprise, always_admit=always_admit),
        transform=None if n_steps == 1 else NStepTransitions(n_steps, options["discount"], options["check_continuity"]),
        n_steps=1,  # of draws: the transform forms the returns
    )
