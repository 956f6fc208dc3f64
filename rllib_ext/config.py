# SPDX-License-Identifier: Apache-2.0
"""The replay methods of lightning_replay as an RLlib ``replay_buffer_config``."""

from __future__ import annotations

from typing import Any

from rllib_ext.episode_buffer import RecipeEpisodeReplayBuffer


def replay_config(recipe: str, **options: Any) -> dict[str, Any]:
    """Settings for ``AlgorithmConfig.training(replay_buffer_config=...)`` of DQN, SAC and TQC, new API stack.

    Nothing else of the algorithm's configuration changes: ``n_step``, ``gamma``, the batch size and ``seed`` are
    RLlib's and are followed. Annealing (``importance_exponent=Linear(...)``) happens inside the buffer.

    Args:
        recipe: a function of :mod:`lightning_replay.recipes` by name.
        options: its arguments (``capacity``, ``num_neighbors``, ...), and ``layout`` and ``num_learners`` of
            :class:`~rllib_ext.episode_buffer.RecipeEpisodeReplayBuffer`. With two or more Learners say how many
            there are, or TD errors of a prioritized recipe may reach other rows.

    Raises:
        ValueError: an unknown recipe, unknown options, or values the recipe refuses.

    Example:
        >>> config = replay_config("prioritized", capacity=50_000, priority_exponent=0.6)
        >>> config["recipe"], config["capacity"]
        ('prioritized', 50000)
    """
    # Built once here, and thrown away: what is wrong with the values is said now and not inside a Ray actor.
    # With a seed, because without one it would draw its own from torch's global generator.
    trial: dict[str, Any] = {**options, "seed": 0 if options.get("seed") is None else options["seed"]}
    if "memmap" in options:
        trial["memmap"] = None
    RecipeEpisodeReplayBuffer(recipe, **trial)
    return {"type": RecipeEpisodeReplayBuffer, "recipe": recipe, **options}
