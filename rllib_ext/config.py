# SPDX-License-Identifier: Apache-2.0
"""The replay methods of lightning_replay as an RLlib ``replay_buffer_config``."""

from __future__ import annotations

from typing import Any

from rllib_ext.episode_buffer import RecipeEpisodeReplayBuffer


def replay_config(recipe: str | None = None, **options: Any) -> dict[str, Any]:
    """Settings for ``AlgorithmConfig.training(replay_buffer_config=...)`` of DQN, SAC and TQC, new API stack.

    Nothing else of the algorithm's configuration changes: ``n_step``, ``gamma``, the batch size and ``seed`` are
    RLlib's and are followed. Annealing (``importance_exponent=Linear(...)``) happens inside the buffer. Checkpoints,
    several Learners and the fastest path need :func:`rllib_ext.configure` as well.

    Args:
        recipe: a function of :mod:`lightning_replay.recipes` by name; left out where ``sampler``, ``writer`` or
            ``transform`` say by class path what the buffer is put together from.
        options: the recipe's arguments (``capacity``, ``num_neighbors``, ...), or ``capacity``, ``device``,
            ``memmap``, ``seed`` and the parts; and ``layout``, ``num_learners`` and ``modules`` of
            :class:`~rllib_ext.episode_buffer.RecipeEpisodeReplayBuffer`. A value may be a class path with arguments,
            ``{"class_path": "lightning_replay.schedules.Linear", "init_args": {...}}``.

    Raises:
        ValueError: an unknown recipe, class or option, or values that are refused.
        TypeError: a class that is not what its place takes.

    Example:
        >>> config = replay_config("prioritized", capacity=50_000, priority_exponent=0.6)
        >>> config["recipe"], config["capacity"]
        ('prioritized', 50000)
        >>> config = replay_config(capacity=50_000, sampler="lightning_replay.samplers.RandomPairSampler",
        ...                        transform="lightning_replay.transforms.MixPairs")
    """
    # Built once here, and thrown away: what is wrong with the values is said now and not inside a Ray actor.
    # With a seed, because without one it would draw its own from torch's global generator.
    trial: dict[str, Any] = {**options, "seed": 0 if options.get("seed") is None else options["seed"]}
    if "memmap" in options:
        trial["memmap"] = None
    buffer = RecipeEpisodeReplayBuffer(recipe, **trial)
    for name in options.get("modules") or {}:
        buffer.try_options_of(name)
    return {"type": RecipeEpisodeReplayBuffer, "recipe": recipe, **options}
