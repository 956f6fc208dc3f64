# SPDX-License-Identifier: Apache-2.0
"""Errors for unknown arguments, which give our name where other libraries use another."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import ParamSpec, TypeVar

from lightning_replay.validation import did_you_mean

__all__ = ["accepted_names", "hint_for", "method_for", "refuse_unknown", "with_named_arguments"]

P = ParamSpec("P")
R = TypeVar("R")

# Our names, and those of TorchRL, RLlib, Stable-Baselines3, cpprb, tianshou, Dopamine and Reverb.
_NAMES_ELSEWHERE = {
    "capacity": "buffer_size max_capacity max_size maxlen replay_capacity size",
    "capacity_per_task": "buffer_size capacity max_capacity max_size maxlen replay_capacity size",
    "batch_size": "batch_size_B minibatch_size sample_batch_size train_batch_size",
    "priority_exponent": "alpha alpha0 prioritized_replay_alpha",
    "importance_exponent": "beta beta0 importance_sampling_exponent prioritized_replay_beta",
    "priority_offset": "eps epsilon prioritized_replay_eps",
    "normalize_over_batch": "weight_norm",
    "n_steps": "Nstep estimation_step n_step nstep update_horizon",
    "discount": "gamma",
    "frame_stack": "frame_stacks num_stack stack_num stack_size",
    "memmap": "scratch_dir",
    "num_neighbors": "k knn n_neighbors num_neighbours",
    "mixup_concentration": "alpha",
    "sigma": "noise_std std",
    "table_shares": "eta probs ratios",
    "default_share": "eta",
    "event_share": "eta",
    "share": "eta",
    "history_length": "lookback tau window",
    "exploration": "gamma",
    "weight_sharing": "alpha",
    "exponent": "alpha",
    "offset": "eps epsilon",
    "greedy_epsilon": "eps epsilon",
    "q_inverse_temperature": "beta",
    "min_size": "min_size_to_sample",
    "score_step_size": "alpha score_smoothing",
    "seed": "random_seed",
}


_METHODS_ELSEWHERE = {
    "rows are stored with extend, one transition with add": "append insert push put remember store store_transition",
    "a batch is drawn with sample()": "draw get_batch sample_batch sample_transitions",
    "its length is len(replay), and its room replay.capacity": "buffer_size max_size num_samples size",
    "priorities are updated with update_priority(batch, td_error)": "update_priorities",
    "it is emptied with empty()": "clear reset",
}


def method_for(given: str) -> str | None:
    """Returns what to call in place of a replay buffer's method of another library; ``None`` for other names."""
    return next((ours for ours, names in _METHODS_ELSEWHERE.items() if given in names.split()), None)


def hint_for(given: str, accepted: Iterable[str]) -> str:
    """Returns ``"; it is named capacity here"`` or ``". Did you mean 'seed'?"``, or nothing."""
    accepted = list(accepted)
    ours = [name for name in accepted if given in _NAMES_ELSEWHERE.get(name, "").split()]
    return f"; it is named {' or '.join(ours)} here" if ours else did_you_mean(given, accepted)


def accepted_names(function: Callable[..., object]) -> list[str] | None:
    """Returns the names a function can be called with, or ``None`` where it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.name != "self"]


def refuse_unknown(owner: str, given: Iterable[str], accepted: Collection[str] | None) -> None:
    """Raises ``TypeError`` for names of arguments that are not ``accepted``, of which ``None`` stands for all.

    The error names the ``owner``, a class or a function, and our name for the first of them, where there is one.
    """
    for name in given:
        if accepted is not None and name not in accepted:
            hint = hint_for(name, accepted) or f"; accepted are {', '.join(accepted) or 'none'}"
            raise TypeError(f"{owner} has no argument {name!r}{hint}")


def with_named_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: unknown arguments are refused with our name for them; signature and documentation stay."""
    accepted = accepted_names(function)
    known = None if accepted is None else set(accepted)
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if known is not None and not known.issuperset(kwargs):
            refuse_unknown(owner, kwargs, accepted)
        return function(*args, **kwargs)

    return checked
