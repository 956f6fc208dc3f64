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
            :class:`RecipeEpisodeReplayBuffer`.

    Raises:
        ValueError: an unknown recipe, unknown options, or values the recipe refuses.

    Example:
        >>> config = replay_config("prioritized", capacity=50_000, priority_exponent=0.6)
        >>> config["recipe"], config["capacity"]
        ('prioritized', 50000)
    """
    # Built once here, and thrown away: what is wrong with the values is said now and not inside a Ray actor.
    RecipeEpisodeReplayBuffer(recipe, **{**options, "memmap": None} if "memmap" in options else options)
    return {"type": RecipeEpisodeReplayBuffer, "recipe": recipe, **options}
