# SPDX-License-Identifier: Apache-2.0
"""The test protocol in RLlib's evaluation: returns on held-out levels and on training levels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_replay.levels.environments import LevelWrapper
from rllib_ext.rllib_compat import Attached, reset_at_next_sample

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm import Algorithm
    from ray.rllib.env.env_runner import EnvRunner

logger: logging.Logger = logging.getLogger(__name__)
DrawnLevel = tuple[str, Callable[[], int]]  # RLlib's id of the episode, and what waits for its level
# Name in infos, and in the custom data of episodes.
LEVEL_ID = "level_id"
# Name in the last infos of an episode.
EPISODE_RETURN = "level_return"
RESULTS = "levels"  # key of results
# Steps of each environment at a time, until every level has an episode.
_STEPS = 10


def measure_gap(*, algorithm: Algorithm, evaluation_metrics: dict[str, Any], **ignored: Any) -> None:
    """Adds mean returns on training levels and on held-out levels, and the first minus the second, under ``levels``.

    The callback ``on_evaluate_end``. RLlib's evaluation plays the held-out levels. Then as many levels are drawn
    uniformly from those trained on so far, and the same EnvRunners play an episode on each.
    """
    answers = _each(algorithm, LevelTest.finish)
    held_out = [value for _, returns in answers for value in returns]
    figures: dict[str, float] = {"held_out_episodes": len(held_out), "held_out_return_mean": _mean(held_out)}
    training = algorithm.levels.played_levels()
    if held_out and training:
        # As few levels as possible are played twice.
        rounds = -(-len(held_out) // len(training))
        generator = algorithm.levels.gap_generator
        drawn = np.concatenate([generator.permutation(np.asarray(training)) for _ in range(rounds)])
        parts = np.array_split(drawn[: len(held_out)], len(answers))
        shares = {runner: part.tolist() for (runner, _), part in zip(answers, parts, strict=True)}
        answers = _each(algorithm, lambda test, runner: test.play(runner, shares.get(runner.worker_index or 0, [])))
        played = [value for _, returns in answers for value in returns]
        figures |= {"training_episodes": len(played), "training_return_mean": _mean(played)}
        figures["generalization_gap"] = _mean(played) - _mean(held_out)
    evaluation_metrics[RESULTS] = figures


def check_evaluation(*, algorithm: Algorithm, held_out: Sequence[int], **ignored: Any) -> None:
    """Refuses an evaluation on the EnvRunners that train. Warns of held-out levels that were trained on."""
    if algorithm.eval_env_runner_group is None:
        raise ValueError(
            "evaluate() would run on the EnvRunners that train, on levels of the training buffer; give evaluation its "
            "own, .evaluation(evaluation_interval=...) or .evaluation(evaluation_num_env_runners=...)"
        )
    both = sorted({*held_out} & {*algorithm.levels.played_levels()})
    if both:
        logger.warning("%d of held_out_levels were trained on, such as %s", len(both), both[:3])


def note_return(
    *, episode: Any, env_runner: EnvRunner, env_index: int, prev_episode_chunks: Sequence[Any] = (), **ignored: Any
) -> None:
    """Notes the return of an episode played to evaluate. The callback ``on_episode_end``."""
    test = _TEST.of(env_runner)
    if test is not None:
        test.turns.end(env_index, float(sum(piece.get_return() for piece in (*prev_episode_chunks, episode))))


def test_of(env_runner: EnvRunner, held_out: Sequence[int]) -> LevelTest:
    """Returns the test of an EnvRunner, which is made at the first call."""
    test = _TEST.of(env_runner)
    if test is None:
        first = max(env_runner.worker_index or 0, 1) - 1
        stride = max(env_runner.config.num_env_runners, 1)
        test = LevelTest([held_out[(first + turn * stride) % len(held_out)] for turn in range(len(held_out))])
        _TEST.set(env_runner, test)
    return test


class LevelTest:
    """Chooses the levels of an EnvRunner that evaluates, in turn, and collects their returns.

    RLlib's evaluation stops when enough episodes have ended, and breaks off the others, which are the long ones.
    Therefore the levels count whose turn came first: one whose episode was broken off is played again.
    """

    def __init__(self, held_out: Sequence[int]) -> None:
        self._held_out = _Turns(held_out)
        self.turns: _Turns = self._held_out

    def level_of(self, env_index: int, env: PlayedLevel) -> int:
        """Returns the level of an episode that begins, or the last one again if it was not played to its end."""
        if not (env.is_waiting or env.is_running or env.level_id is None):  # None: rebuilt
            self.turns.given.pop(env_index, None)  # it ended, though its return may be missing
        return self.turns.begin(env_index)

    def play(self, env_runner: EnvRunner, levels: Sequence[int]) -> list[float]:
        """Plays one whole episode on each of these levels and returns their returns. Other turns are kept."""
        if not levels:
            return []
        turns = self.turns = _Turns(levels)
        try:
            # Environments without a level left repeat some until the others are done, which are not counted.
            reset_at_next_sample(env_runner)
            while not turns.returns.keys() >= set(range(len(levels))):
                env_runner.sample(num_timesteps=_STEPS * env_runner.num_envs)
        finally:
            self.turns = self._held_out
            # No episode on these levels continues.
            reset_at_next_sample(env_runner)
        # These metrics would count as returns on held-out levels.
        env_runner.get_metrics()
        return [turns.returns[turn] for turn in range(len(levels))]

    def finish(self, env_runner: EnvRunner) -> list[float]:
        """Returns the returns on as many held-out levels, in turn, as episodes ended since the last call."""
        returns, late = self._held_out.close()
        return returns + self.play(env_runner, late)


_TEST = Attached[LevelTest]("level_test")


class _Turns:
    """Assigns levels in turn, and keeps the return of the episode on each."""

    def __init__(self, levels: Sequence[int]) -> None:
        self._levels = levels
        self._start = self._following = 0  # turns, counted from 0
        self.given: dict[int, int] = {}  # turn by environment
        self.returns: dict[int, float] = {}  #: Return of each turn.

    def begin(self, env_index: int) -> int:
        """Returns the level of the next turn. An episode that did not end gets its level again."""
        if env_index not in self.given:  # otherwise the level again of an episode that did not end
            self.given[env_index] = self._following
            self._following = self._following + 1
        return self._levels[self.given[env_index] % len(self._levels)]

    def end(self, env_index: int, value: float) -> None:
        """Notes the return of the turn that an environment has played."""
        if env_index in self.given:
            self.returns[self.given.pop(env_index)] = value

    def close(self) -> tuple[list[float], list[int]]:
        """Ends as many turns as episodes ended. Returns their returns, and the levels without. Later ones repeat."""
        turns = range(self._start, self._start + len(self.returns))
        returns = [self.returns[turn] for turn in turns if turn in self.returns]
        late = [self._levels[turn % len(self._levels)] for turn in turns if turn not in self.returns]
        self._start = self._following = turns.stop
        self.given = {}
        self.returns = {}
        return returns, late


class PlayedLevel(LevelWrapper):
    """Plays the level that was set last, and tracks the episode."""

    drawn: DrawnLevel = ("", int)  # none yet
    choose: Any = int  # waits for the level that was drawn, when its episode begins
    supply: Any = None  #: Supply of levels; a step may begin a round.
    is_waiting: bool = False  # whether the episode on that level has not begun
    is_running: bool = False  # whether it has begun and is not done
    episode_return: float = 0.0  # so far, of the environment's own rewards

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Sets the chosen level, and resets the environment."""
        if self.is_waiting:
            self.set_level(self.choose())
        self.is_waiting = False
        self.is_running = True
        self.episode_return = 0.0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the environment, and adds its reward to the return of the episode."""
        if self.supply is not None and self.supply.is_due:
            self.supply.begin_round()
        result = super().step(action)
        self.episode_return += float(result[1])
        self.is_running = not (result[2] or result[3])
        if not self.is_running:  # connectors change the rewards of an episode, and not its infos
            result[4][EPISODE_RETURN] = self.episode_return
        return result


def _each(algorithm: Algorithm, function: Callable[[LevelTest, Any], list[float]]) -> list[tuple[int, list[float]]]:
    # By index, of the EnvRunners that have played held-out levels.
    def answer(env_runner: EnvRunner) -> tuple[int, list[float]] | None:
        """Returns the number of an EnvRunner and the returns of its test."""
        test = _TEST.of(env_runner)
        return None if test is None else (env_runner.worker_index or 0, function(test, env_runner))

    group = algorithm.eval_env_runner_group
    timeout = algorithm.config.evaluation_sample_timeout_s
    is_local = group.num_remote_env_runners() == 0
    answers = group.foreach_env_runner(answer, local_env_runner=is_local, timeout_seconds=timeout)
    return [one for one in answers if one is not None]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
