# SPDX-License-Identifier: Apache-2.0
"""The test protocol: returns on held-out levels beside returns on training levels, by RLlib's evaluation."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rllib_ext.levels.playing import PlayedLevel

logger = logging.getLogger(__name__)

RESULTS = "levels"  # key of results
_ATTRIBUTE = "level_test"  # of EnvRunners


class LevelTest:
    """What an EnvRunner that evaluates plays, and the returns it made.

    Held-out levels are played in turn: of all environments that evaluate, each takes every ``stride``-th level from its
    own place on, so that together they play each level equally often.

    Args:
        held_out: levels.
        first: place of the runner's first environment.
        stride: environments that evaluate.
    """

    def __init__(self, held_out: Sequence[int], first: int, stride: int) -> None:
        self._held_out, self._first, self._stride = held_out, first, stride
        self._begun: dict[int, int] = {}
        self._training: list[int] = []
        self._place = 0
        self.returns: list[float] = []

    def level_of(self, env_index: int, env: PlayedLevel) -> int:
        """The level of an episode that begins; that of the episode before, if it never began."""
        if env.waits:
            return env.told
        if self._training:
            self._place += 1
            return self._training[(self._place - 1) % len(self._training)]
        turn = self._begun.get(env_index, 0)
        self._begun[env_index] = turn + 1
        return self._held_out[(self._first + env_index + turn * self._stride) % len(self._held_out)]

    def play(self, env_runner: Any, levels: list[int]) -> list[float]:
        """Returns of one episode on each of these levels; where held-out ones stand, they go on."""
        environments = env_runner.env.unwrapped.envs
        waiting = [(env, env.told if env.waits else None) for env in environments]
        for env in environments:
            env.waits = False
        self._training, self._place = levels, 0
        env_runner.sample(num_episodes=len(levels))
        env_runner.get_metrics()  # which would count as returns on held-out levels
        self._training = []
        for env, level_id in waiting:
            env.told, env.waits = (level_id or 0), level_id is not None
        return self.take_returns()

    def take_returns(self) -> list[float]:
        """Of the episodes that ended since the last call."""
        returns, self.returns = self.returns, []
        return returns


class GeneralizationGap:
    """Mean return on training levels minus that on held-out levels, with every evaluation.

    RLlib's evaluation plays the held-out levels. After it as many episodes are played on levels drawn uniformly from
    those trained on so far, by the same EnvRunners in the same way.

    Args:
        seed: of the draws.
    """

    def __init__(self, seed: int | None) -> None:
        self._generator = np.random.default_rng(seed)

    def measure(self, algorithm: Any, results: dict[str, Any]) -> None:
        """Adds both means and the gap to the results of an evaluation, under ``levels``."""
        held_out = [value for returns in _each(algorithm, _take_returns) for value in returns]
        figures: dict[str, float] = {"held_out_episodes": len(held_out), "held_out_return_mean": _mean(held_out)}
        training = algorithm.levels.played_levels()
        if held_out and training:
            drawn = self._draw(training, len(held_out))
            runners = max(algorithm.eval_env_runner_group.num_healthy_remote_workers(), 1)
            shares = [share.tolist() for share in np.array_split(drawn, min(runners, len(drawn)))]
            played = [
                value for returns in _each(algorithm, functools.partial(_play, shares=shares)) for value in returns
            ]
            figures |= {"training_episodes": len(played), "training_return_mean": _mean(played)}
            figures["generalization_gap"] = _mean(played) - _mean(held_out)
        results[RESULTS] = figures

    def _draw(self, levels: Sequence[int], count: int) -> np.ndarray:
        """As few of them twice as possible."""
        rounds = -(-count // len(levels))
        return np.concatenate([self._generator.permutation(np.asarray(levels)) for _ in range(rounds)])[:count]


def test_of(env_runner: Any, held_out: Sequence[int]) -> LevelTest:
    """The test of an EnvRunner that evaluates."""
    test: LevelTest | None = getattr(env_runner, _ATTRIBUTE, None)
    if test is None:
        config, place = env_runner.config, max(env_runner.worker_index or 0, 1) - 1
        each = config.num_envs_per_env_runner
        test = LevelTest(held_out, place * each, max(config.num_env_runners, 1) * each)
        setattr(env_runner, _ATTRIBUTE, test)
    return test


def note_return(*, episode: Any, env_runner: Any, prev_episode_chunks: Sequence[Any] = (), **ignored: Any) -> None:
    """What RLlib calls as ``on_episode_end``: notes the return of an episode played to evaluate.

    Args:
        episode: that ended, or its last piece.
        env_runner: that played it.
        prev_episode_chunks: its other pieces.
        ignored: what else RLlib passes.
    """
    test: LevelTest | None = getattr(env_runner, _ATTRIBUTE, None)
    if test is not None:
        test.returns.append(float(sum(piece.get_return() for piece in (*prev_episode_chunks, episode))))


def check_evaluation(*, algorithm: Any, held_out: Sequence[int], **ignored: Any) -> None:
    """What RLlib calls as ``on_evaluate_start``: evaluation has EnvRunners of its own, and levels.

    Levels drawn without end may come to be held-out ones some day, which is warned of.

    Args:
        algorithm: that is about to evaluate.
        held_out: levels it will play.
        ignored: what else RLlib passes.

    Raises:
        ValueError: it has not, and would play training levels that are never scored.
    """
    if algorithm.eval_env_runner_group is None:
        raise ValueError(
            "evaluate() would run on the EnvRunners that train, on levels of the training buffer; give evaluation its "
            "own, .evaluation(evaluation_interval=...) or .evaluation(evaluation_num_env_runners=...)"
        )
    both = sorted({*held_out} & {*algorithm.levels.played_levels()})
    if both:
        logger.warning("%d of held_out_levels were trained on, such as %s", len(both), both[:3])


def measure_gap(*, algorithm: Any, evaluation_metrics: dict[str, Any], **ignored: Any) -> None:
    """What RLlib calls as ``on_evaluate_end``: see :class:`GeneralizationGap`."""
    algorithm.levels.gap.measure(algorithm, evaluation_metrics)


def _each(algorithm: Any, function: Any) -> list[Any]:
    """What a function of each EnvRunner that evaluates gives."""
    group = algorithm.eval_env_runner_group
    remote = group.num_remote_env_runners() > 0
    return list(
        group.foreach_env_runner(
            function,
            local_env_runner=not remote,
            timeout_seconds=algorithm.config.evaluation_sample_timeout_s,
        )
    )


def _take_returns(env_runner: Any) -> list[float]:
    test: LevelTest | None = getattr(env_runner, _ATTRIBUTE, None)
    return [] if test is None else test.take_returns()


def _play(env_runner: Any, shares: list[list[int]]) -> list[float]:
    test: LevelTest | None = getattr(env_runner, _ATTRIBUTE, None)
    place = max(env_runner.worker_index or 0, 1) - 1
    return [] if test is None or place >= len(shares) else test.play(env_runner, shares[place])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
