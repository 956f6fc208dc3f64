# SPDX-License-Identifier: Apache-2.0
"""The test protocol in RLlib's evaluation: returns on held-out levels and on training levels."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from lightning_replay.levels.environments import LevelWrapper
from rllib_ext.rllib_compat import Attached

logger: logging.Logger = logging.getLogger(__name__)
T = TypeVar("T")
DrawnLevel = tuple[str, Callable[[], int]]  # RLlib's id of the episode, and what waits for its level
LEVEL_ID = "level_id"  # in infos, and in the custom data of episodes
RESULTS = "levels"  # key of results
_STEPS = 10  # of each environment at a time, where an episode on each level is waited for


def measure_gap(*, algorithm: Any, evaluation_metrics: dict[str, Any], **ignored: Any) -> None:
    """Adds mean returns on training levels and on held-out levels, and the first minus the second, under ``levels``.

    The callback ``on_evaluate_end``. RLlib's evaluation plays the held-out levels, see :class:`LevelTest`. (RLlib's own
    figures are of the episodes that ended first, which favours short ones.) Then as many levels are drawn uniformly
    from those trained on so far, and the same EnvRunners play an episode on each.
    """
    answers = [answer for answer in _each(algorithm, _finish) if answer is not None]  # None: it never played any
    held_out = [value for _, returns in answers for value in returns]
    figures: dict[str, float] = {"held_out_episodes": len(held_out), "held_out_return_mean": _mean(held_out)}
    training = algorithm.levels.played_levels()
    if held_out and training:
        rounds = -(-len(held_out) // len(training))  # as few levels twice as possible
        generator = algorithm.levels.gap_generator
        drawn = np.concatenate([generator.permutation(np.asarray(training)) for _ in range(rounds)])
        parts = np.array_split(drawn[: len(held_out)], len(answers))
        shares = {runner: part.tolist() for (runner, _), part in zip(answers, parts, strict=True)}
        played = [value for returns in _each(algorithm, functools.partial(_play, shares=shares)) for value in returns]
        figures |= {"training_episodes": len(played), "training_return_mean": _mean(played)}
        figures["generalization_gap"] = _mean(played) - _mean(held_out)
    evaluation_metrics[RESULTS] = figures


def check_evaluation(*, algorithm: Any, held_out: Sequence[int], **ignored: Any) -> None:
    """Refuses an evaluation on the EnvRunners that train; warns of held-out levels that were trained on."""
    if algorithm.eval_env_runner_group is None:
        raise ValueError(
            "evaluate() would run on the EnvRunners that train, on levels of the training buffer; give evaluation its "
            "own, .evaluation(evaluation_interval=...) or .evaluation(evaluation_num_env_runners=...)"
        )
    both = sorted({*held_out} & {*algorithm.levels.played_levels()})
    if both:
        logger.warning("%d of held_out_levels were trained on, such as %s", len(both), both[:3])


def note_return(
    *, episode: Any, env_runner: Any, env_index: int, prev_episode_chunks: Sequence[Any] = (), **ignored: Any
) -> None:
    """Notes the return of an episode played to evaluate; the callback ``on_episode_end``."""
    test = _TEST.of(env_runner)
    if test is not None:
        test.turns.end(env_index, float(sum(piece.get_return() for piece in (*prev_episode_chunks, episode))))


def test_of(env_runner: Any, held_out: Sequence[int]) -> LevelTest:
    test = _TEST.of(env_runner)
    if test is None:
        config, place = env_runner.config, max(env_runner.worker_index or 0, 1) - 1
        test = LevelTest(held_out, place, max(config.num_env_runners, 1))
        _TEST.set(env_runner, test)
    return test


class LevelTest:
    """Chooses the levels of an EnvRunner that evaluates, every ``stride``-th from ``first`` on; collects their returns.

    RLlib's evaluation stops when enough episodes have ended, and breaks off the others, which are the long ones.
    Therefore the levels count whose turn came first: one whose episode was broken off is played again.
    """

    def __init__(self, held_out: Sequence[int], first: int, stride: int) -> None:
        self._held_out = _Turns(held_out, first, stride)
        self.turns: _Turns = self._held_out

    def level_of(self, env_index: int, env: PlayedLevel) -> int:
        """Returns the level of an episode that begins; the last one again if it was not played to its end."""
        if not (env.is_waiting or env.is_running or env.level_id is None):  # None: rebuilt
            self.turns.given.pop(env_index, None)  # it ended, though its return may be missing
        return self.turns.begin(env_index)

    def play(self, env_runner: Any, levels: Sequence[int]) -> list[float]:
        """Plays one whole episode on each of these levels and returns their returns; other turns are kept."""
        if not levels:
            return []
        turns = self.turns = _Turns(levels)
        try:
            # Environments without a level left repeat some until the others are done, which are not counted.
            is_first = True
            while not turns.returns.keys() >= set(range(len(levels))):
                env_runner.sample(num_timesteps=_STEPS * env_runner.num_envs, force_reset=is_first)
                is_first = False
        finally:
            self.turns = self._held_out
            env_runner._needs_initial_reset = True  # no episode on these levels continues
        env_runner.get_metrics()  # which would count as returns on held-out levels
        return [turns.returns[turn] for turn in range(len(levels))]

    def finish(self, env_runner: Any) -> list[float]:
        """Returns the returns on as many held-out levels, in turn, as episodes ended since the last call."""
        returns, late = self._held_out.close()
        return returns + self.play(env_runner, late)


_TEST = Attached[LevelTest]("level_test")


class _Turns:
    """Assigns every ``stride``-th level from ``first`` on in turn, and keeps the return of the episode on each."""

    def __init__(self, levels: Sequence[int], first: int = 0, stride: int = 1) -> None:
        self._levels, self._first, self._stride = levels, first, stride
        self._start = self._following = 0  # turns, counted from 0
        self.given: dict[int, int] = {}  # turn by environment
        self.returns: dict[int, float] = {}  # by turn

    def begin(self, env_index: int) -> int:
        if env_index not in self.given:  # otherwise the level again of an episode that did not end
            self.given[env_index], self._following = self._following, self._following + 1
        return self._level(self.given[env_index])

    def end(self, env_index: int, value: float) -> None:
        turn = self.given.pop(env_index, None)
        if turn is not None:
            self.returns[turn] = value

    def close(self) -> tuple[list[float], list[int]]:
        """Ends as many turns as episodes ended; returns their returns, and the levels without. Later ones repeat."""
        turns = range(self._start, self._start + len(self.returns))
        returns = [self.returns[turn] for turn in turns if turn in self.returns]
        late = [self._level(turn) for turn in turns if turn not in self.returns]
        self._start = self._following = turns.stop
        self.given, self.returns = {}, {}
        return returns, late

    def _level(self, turn: int) -> int:
        return self._levels[(self._first + turn * self._stride) % len(self._levels)]


class PlayedLevel(LevelWrapper):
    """Plays the level that was set last, and tracks the episode."""

    drawn: DrawnLevel = ("", int)  # none yet
    supply: Any = None  # of which a step may begin a round
    is_waiting: bool = False  # whether the episode on that level has not begun
    is_running: bool = False  # whether it has begun and is not done

    def set_next(self, drawn: DrawnLevel, choose: Callable[[], int]) -> None:
        self.drawn, self._choose, self.is_waiting, self.is_running = drawn, choose, True, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self.is_waiting:
            self.set_level(self._choose())
        self.is_waiting, self.is_running = False, True
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.supply is not None and self.supply.is_due:
            self.supply.begin_round()
        result = super().step(action)
        self.is_running = not (result[2] or result[3])
        return result


def _each(algorithm: Any, function: Callable[[Any], T]) -> list[T]:
    group, timeout = algorithm.eval_env_runner_group, algorithm.config.evaluation_sample_timeout_s
    has_remote = group.num_remote_env_runners() > 0
    return list(group.foreach_env_runner(function, local_env_runner=not has_remote, timeout_seconds=timeout))


def _finish(env_runner: Any) -> tuple[int, list[float]] | None:
    test = _TEST.of(env_runner)
    return None if test is None else (env_runner.worker_index or 0, test.finish(env_runner))


def _play(env_runner: Any, shares: Mapping[int, Sequence[int]]) -> list[float]:
    test = _TEST.of(env_runner)
    return [] if test is None else test.play(env_runner, shares.get(env_runner.worker_index or 0, []))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
