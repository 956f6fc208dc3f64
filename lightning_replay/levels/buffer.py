# SPDX-License-Identifier: Apache-2.0
"""Level buffers: Prioritized Level Replay, teacher-student curriculum learning, and levels without a score yet."""

from __future__ import annotations

import inspect
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_replay.fast_path import overrides
from lightning_replay.levels import scores
from lightning_replay.levels.episodes import ActiveEpisode, Segment
from lightning_replay.levels.known_levels import KnownLevels
from lightning_replay.levels.level_ids import LEVEL_IDS, Actor, checked_level_id
from lightning_replay.levels.level_set import LevelSet
from lightning_replay.levels.prioritization import Greedy, Prioritization, Proportional
from lightning_replay.levels.scores import EpisodeScore, L1ValueLoss, Learnability, Score, SegmentScore, ValueScore
from lightning_replay.levels.selector import LevelSelector
from lightning_replay.levels.table import REFUSED, LevelTable, different_places, draw_different
from lightning_replay.options import (
    ABOVE_ZERO,
    check_kind,
    check_option,
    checked_choice,
    checked_count,
    checked_flag,
    checked_number,
    checked_share,
    with_named_arguments,
)
from lightning_replay.state import uniform

__all__ = ["LearningProgress", "LevelBuffer", "LevelEditor", "LevelGenerator", "plr", "tscl"]

LevelGenerator = Callable[[torch.Generator], int]
LevelEditor = Callable[[int, torch.Generator], int]
_DRAWS = 1_000  # a generator that repeats known levels this often is taken to have no others


class LevelBuffer(LevelSelector):
    """Replays levels of high score or staleness, and otherwise plays new ones.

    Call :meth:`update` with the learner's values before the policy changes. A level is an environment's seed, or
    anything else that an environment builds from a whole number. Jiang et al. 2021, "Prioritized Level Replay",
    https://arxiv.org/abs/2010.03934. Names: ``score_temperature`` is β, ``staleness_weight`` ρ, ``score_step_size`` α,
    ``episodes`` c.

    The defaults are a temperature of 1 and a staleness weight of 0.3. With them, replay was better than uniform levels
    over the run on MultiRoom, +0.083, and on combination locks with two critics, +0.111 and +0.021. With the
    temperature of the paper and its staleness weight for the task, it was better in one of the three cases.
    :func:`plr` has these options.

    Args:
        levels: Distinct ids, their number for 0, 1, 2, ..., or a :class:`LevelSet` of any objects. ``None`` is for an
            unbounded level set, of which the ``capacity`` best levels are kept.
        capacity: Largest number of levels with a score. It is required without ``levels``, and otherwise it is their
            number.
        score: Object of :mod:`~lightning_replay.levels.scores`, a function from a segment to a number, or an
            :class:`EpisodeScore`. If absent, it is ``L1ValueLoss(0.999, 0.95)``. Give it the learner's γ and λ. With a
            :class:`~lightning_replay.levels.scores.Learnability` two options have other defaults, named below.
        prioritization: Object that turns scores into probabilities. If absent, it is ``Rank()``, and for learnability
            ``Proportional()``.
        score_temperature: Temperature above 0 that flattens the distribution of scores, 1 if absent. See
            :class:`LevelSampler`.
        staleness_weight: Share of probability given to staleness.
        replay_probability: Probability of replaying rather than playing a new level. ``None`` is the share of the
            levels that have a score, as in the paper for known levels, and 0.5 without ``levels``.
        replay_in_flight: Whether a replay by score may take a level that is being played or awaits its score. The
            default is ``True``, and for learnability ``False``. ``False`` is for many actors and a low temperature. It
            gives each actor another of the levels that are left, if any, by their ranks, in time linear in the number
            of levels with a score.
        min_fill: Share of the levels, or of ``capacity``, that must have a score before any is replayed. (The paper's
            released code has 1, its text 0.)
        score_step_size: Step of ``score <- (1 - step) old + step new``. 1 replaces the old score.
        first_score: ``"replace"`` takes a level's first score as it is, ``"smooth"`` averages it with 0: ``step new``,
            as the paper's released code does. In an unbounded set a level competes for its place with that number.
        train_on_new_levels: Whether the learner may learn from episodes on new levels, see :meth:`trains_on`. ``False``
            is robust PLR (Jiang et al. 2021, https://arxiv.org/abs/2110.02439).
        editor: Function from a replayed level's id and a generator to the id of a changed level. This level is played
            next, scored, and not learned from: ACCEL (Parker-Holder et al. 2022, https://arxiv.org/abs/2203.01302). It
            works only without ``levels``.
        generate: Function from a generator to the id of a new level, without ``levels``. If absent, ids are uniform
            below 2^31.
        seed: Seed for all random choices. If ``None``, it is taken from torch's global generator.

    Raises:
        ValueError: Options that contradict ``levels``, or no capacity.

    Warns:
        UserWarning: Once, if replays concentrate on few levels although many have a score, see :class:`LevelSampler`.

    Example:
        >>> levels = LevelBuffer(levels=range(100), staleness_weight=0.3, seed=0)
        >>> level_id = levels.next_level(actor=0)
        >>> columns = {"reward": torch.ones(2), "state_value": torch.zeros(2)}
        >>> ends = {name: torch.tensor([False, True]) for name in ("terminated", "done")}
        >>> steps = TensorDict({"state_value": torch.zeros(2), "next": columns | ends}, [2])
        >>> round(levels.update(actor=0, level_id=level_id, steps=steps, episode_done=True), 3)
        1.475
    """

    saved_attributes: tuple[str, ...] = ("capacity", "replayed")

    @with_named_arguments
    def __init__(
        self,
        levels: int | Iterable[int] | LevelSet | None = None,
        *,
        capacity: int | None = None,
        score: Score | EpisodeScore | None = None,
        prioritization: Prioritization | None = None,
        score_temperature: float | None = None,
        staleness_weight: float = 0.3,
        replay_probability: float | None = None,
        replay_in_flight: bool | None = None,
        min_fill: float = 0.0,
        score_step_size: float = 1.0,
        first_score: str = "replace",
        train_on_new_levels: bool = True,
        editor: LevelEditor | None = None,
        generate: LevelGenerator | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(levels)
        ids = None if self.known is None else self.known.ids
        if ids is None and capacity is None:
            raise ValueError("capacity is None; an unbounded level set needs one, or give levels=...")
        self.capacity: int = len(ids or ()) if capacity is None else checked_count("capacity", capacity, of="levels")
        if ids is not None:
            if self.capacity != len(ids):
                raise ValueError(f"capacity is {capacity} for {len(ids)} given levels, all of them kept; leave it out")
            if editor is not None or generate is not None:
                raise ValueError("editor and generate make other levels than those given; leave levels out for them")
        accepted = "a function from a torch.Generator to the id of a level, or None"
        check_kind("generate", generate, Callable | None, accepted)
        check_kind("editor", editor, Callable | None, accepted)
        if replay_probability is not None:
            checked_share("replay_probability", replay_probability)
        if score is None:
            score = L1ValueLoss()
        accepted = "a function from a segment TensorDict [T] to a number, or an object such as L1ValueLoss(0.999, 0.95)"
        check_kind("score", score, Callable | EpisodeScore, accepted)
        if inspect.isfunction(score) and score.__module__ == scores.__name__:
            raise TypeError(f"score is {score!r}, a function of tensors; give one of segments, such as L1ValueLoss()")
        self._of_segments: Any = score
        self.score: Score | EpisodeScore = score
        self.replay_probability = replay_probability
        is_spread = isinstance(score, Learnability)
        if prioritization is None and is_spread:
            prioritization = Proportional()
        if replay_in_flight is None:
            replay_in_flight = not is_spread
        self.replay_in_flight: bool = checked_flag("replay_in_flight", replay_in_flight)
        self.min_fill: float = checked_share("min_fill", min_fill)
        self.score_step_size: float = checked_share("score_step_size", score_step_size, lowest=ABOVE_ZERO)
        self.first_score: str = checked_choice("first_score", first_score, ("replace", "smooth"))
        self.train_on_new_levels: bool = checked_flag("train_on_new_levels", train_on_new_levels)
        self.editor = editor
        self.plays_unlearned: bool = not train_on_new_levels or editor is not None  # new or edited levels
        temperature = 1.0 if score_temperature is None else score_temperature
        self.table: LevelTable = LevelTable(prioritization, temperature, staleness_weight, seed)
        self._set_weights()
        self.replayed: int = 0
        self._new = UnseenLevels(self.known, generate)
        self._edited: deque[int] = deque(maxlen=self.capacity)  # made by the editor and not played yet
        self._of_episodes: EpisodeScore | None = score if isinstance(score, EpisodeScore) else None
        # of_columns reads the lists that a segment has anyway, and bypasses __call__: an update takes half the time.
        self._of_columns: Callable[..., float] | None = None
        if isinstance(score, ValueScore) and not overrides(score, ValueScore, "__call__"):
            self._of_columns = score.of_columns
        is_own = type(score).__module__ != scores.__name__ and not isinstance(score, EpisodeScore)
        self.reads_all_columns: bool = is_own and self._of_columns is None
        self._needs_best_return = isinstance(score, SegmentScore) and score.needs_best_return
        # Largest return of a finished episode by level, if the score needs it.
        self._best_returns: dict[int, float] = {}
        if self._of_episodes is not None:
            if ids is None:
                raise ValueError("a score of whole episodes needs a known set of levels; give levels=...")
            self._at_start = self._of_episodes.state_dict()
        self._place_initial()

    def _place_initial(self) -> None:
        if self._of_episodes is None or self._of_episodes.initial_score is None:
            return
        initial = checked_number("initial_score", self._of_episodes.initial_score)
        for level_id in list(self._new.idle.items):  # all can be replayed from the start
            self.table.place(level_id, initial, 0, self.capacity)
            self._new.remove(level_id)

    @property
    def episodes(self) -> int:
        """Number of episodes that all actors and batches began."""
        return self.table.episodes

    def __len__(self) -> int:
        return len(self.table)

    def _next(self, actor: Actor) -> int:
        level_id, is_edited = self._choose()
        self._play(actor, level_id, is_edited)
        return level_id

    def _choose(self) -> tuple[int, bool]:
        while self._edited:
            level_id = self._edited.popleft()
            if not self._is_known(level_id):  # it may have been drawn as a new level meanwhile
                return level_id, True
        # One random number decides between replay and a new level, and only if both are possible.
        if (
            not self._new.first
            and self._may_replay
            and (len(self) == self.count or uniform(self.table.generator) < self._chance)
        ):
            self.replayed += 1
            return self.table.level_ids[self.table.draw(self._left_out)], False
        return self._new.choose(self.table.generator, self._is_known), False

    def _draw(self, count: int, replace: bool) -> list[int]:
        if self.plays_unlearned:
            raise ValueError(
                "next_levels draws levels to learn from; with editor or train_on_new_levels=False some episodes are "
                "only scored: call next_level(actor) and trains_on(actor, level_id)"
            )
        batch = self.table.episodes + 1
        if replace:
            level_ids: list[int] = []
            for _ in range(count):
                level_ids.append(self._choose()[0])
                self._new.begin(level_ids[-1])
                started = self.table.begin_episode(self.table.row_of(level_ids[-1]))
                self.running.await_scores(level_ids[-1:], batch, started)
            return level_ids
        table = self.table
        generator = table.generator
        replays = 0
        idle = self._new.num_idle
        if self._may_replay:
            chances = torch.rand(count, dtype=torch.float64, generator=generator, device="cpu")
            replays = min(int((chances < self._chance).sum()), len(table) - len(table.rows_among(self._left_out)))
        replays = min(replays, count - min(count, len(self._new.first)))
        if idle is not None:  # If there are too few new levels, more of the others are replayed.
            replays = max(replays, min(count - idle, len(table)))
        level_ids = self._new.choose_different(count - replays, generator, self._is_known)
        new = len(level_ids)
        rows = np.full(count, REFUSED)
        if count - new > len(table):
            raise ValueError(f"generate made {new} new levels and {len(table)} have a score; draw fewer")
        if new < count:
            rows[new:] = table.draw_all(count - new, self._left_out)
            level_ids += [table.level_ids[row] for row in rows[new:].tolist()]
            self.replayed += count - new
        order = torch.randperm(count, generator=generator, device="cpu")
        level_ids = [level_ids[place] for place in order.tolist()]
        rows = rows[order.numpy()]
        table.episodes += count
        is_scored = rows != REFUSED
        stored = rows[is_scored]
        table.put_all(stored, table.scores[stored], np.arange(batch, batch + count)[is_scored])
        for place in np.flatnonzero(~is_scored).tolist():
            self._new.begin(level_ids[place])
        self.running.await_scores(level_ids, batch, batch)
        return level_ids

    def record(self, level_id: object, score: object = None, *, outcomes: object = None) -> Tensor:
        """Scores levels, drawn by :meth:`next_levels` or not, and returns their new scores, float64 ``[n]``.

        A level that comes several times gets one score: the mean of the given scores, or the score of all its outcomes.
        Of each level the draws in the oldest batch end, so record batches in the order in which they were drawn. Of
        levels that processes :meth:`share`, each gives what it has, perhaps nothing, and gets the scores of the ids
        that it gave. Outcomes of retired levels change nothing, and their scores are NaN.

        Args:
            level_id: Integers ``[n]``.
            score: Finite ``[n]``, for a learnability in [0, 1]. They are smoothed by ``score_step_size`` like the
                scores of episodes.
            outcomes: Outcomes instead of scores, for :class:`~lightning_replay.levels.scores.Learnability`: ``[n]`` or
                ``[n, k]``, each from 0 (failure) to 1 (success).

        Raises:
            TypeError: Ids that are no integers.
            ValueError: Unknown ids, both of ``score`` and ``outcomes`` or none, another number of them than of ids, a
                NaN or infinite number, or outcomes outside [0, 1]. Nothing is changed.
            RuntimeError: Another process that shares the levels gave wrong ones, or drew other levels.

        Warns:
            UserWarning: Once, if a level gets more outcomes at a time than the window of the score keeps.
        """
        self.check_process()
        ranks = self._own_ranks
        parts = ranks.gather(lambda: self._checked_feedback(level_id, score, outcomes))
        if any(mark != parts[0][2] for *_, mark in parts):
            raise RuntimeError(
                "the levels of the processes have drawn or learned different things, so nothing was changed; call "
                "next_levels, record, add, and retire equally often in each process, then levels.synchronize()"
            )
        own, values, _ = parts[ranks.rank if ranks.is_connected else 0]
        level_ids = own
        if len(parts) > 1:
            # Each process may have another number of outcomes of a level.
            level_ids = [one for ids, given, _ in parts for one in ids for _ in range(given[:1].size)]
            values = np.concatenate([given.reshape(-1) for _, given, _ in parts])
        is_level = [self.is_level(one) for one in level_ids]
        if not all(is_level):  # Outcomes of retired levels come late.
            level_ids = [*itertools.compress(level_ids, is_level)]
            values = values[is_level]
        different, first, place = np.unique(np.array(level_ids, np.int64), return_index=True, return_inverse=True)
        if outcomes is None:
            scores = np.bincount(place, values) / np.bincount(place)
        else:
            assert isinstance(self.score, Learnability)
            scores = self.score.of_outcomes(level_ids, np.atleast_2d(values.T).T)[first]
        level_ids = different.tolist()
        begun = [self.running.receive_score(level_id, self.table.episodes) for level_id in level_ids]
        if self.count is None:
            scores = np.array(list(map(self._store, level_ids, begun, scores.tolist())), np.float64)
            return torch.from_numpy(scores[np.searchsorted(different, own)])
        # The rest does for all levels together what _store does for one.
        rows = self.table.rows_of(level_ids)
        is_new = rows == REFUSED
        old = np.where(is_new, 0.0, self.table.scores[rows * ~is_new] if len(self) else 0.0)
        smoothed = (1.0 - self.score_step_size) * old + self.score_step_size * scores
        scores = np.where(is_new & (self.first_score == "replace"), scores, smoothed)
        for level_id in self.table.place_all(level_ids, rows, scores, np.array(begun, np.int64)):
            self._new.remove(level_id)
        # A retired level has no score.
        is_own = np.isin(own, different)
        found = np.full(len(own), np.nan)
        found[is_own] = scores[np.searchsorted(different, np.array(own, np.int64)[is_own])]
        return torch.from_numpy(found)

    def _checked_feedback(self, level_id: object, score: object, outcomes: object) -> tuple[list[int], np.ndarray, str]:
        # Returns ids, scores or outcomes, and a mark of the state, which is the same in all processes.
        level_ids = self.checked_ids(level_id)
        if (score is None) == (outcomes is None):
            raise ValueError("record takes one of score and outcomes; give record(level_id, score) or outcomes=...")
        is_rate = isinstance(self.score, Learnability)
        if outcomes is None:
            values = _finite("score", score, level_ids, (1,), is_rate)
        elif is_rate:
            values = _finite("outcomes", outcomes, level_ids, (1, 2), is_rate)
        else:
            raise ValueError(
                f"outcomes are scored by Learnability, and score is {type(self.score).__name__}; build the buffer with "
                "score=scores.Learnability(), or give scores"
            )
        kind = "scores" if outcomes is None else "outcomes"
        return level_ids, values, f"{kind} {self.table.mark()}"

    def forget(self) -> None:
        """Resets all levels to the start, so that they are measured again. Levels in flight stay in flight."""
        self.table.clear()
        self._new.restart()
        self._best_returns.clear()
        if self._of_episodes is not None:
            self._of_episodes.load_state_dict(self._at_start)
        self._place_initial()
        for level_id in sorted(self.running.played):  # a load keeps this order
            self._new.begin(level_id)

    def group_stats(self) -> dict[str, dict[str, float]]:
        """Returns for each group of a :class:`LevelSet` its ``levels``, those ``scored``, ``score_mean`` and ``share``.

        The share is the probability that a replay takes a level of the group.
        """
        if self.known is None or self.levels is None or self.levels.groups is None:
            raise ValueError("the levels have no groups; give LevelSet(..., groups=...)")
        groups = np.array(self.levels.groups)
        rows = self.probabilities()
        scored = groups[rows["level_id"].numpy()]
        stats = {}
        for name in np.unique(groups).tolist():
            mine = scored == name
            stats[name] = {
                "levels": float((groups[self.known.ids] == name).sum()),
                "scored": float(mine.sum()),
                "score_mean": float(rows["score"].numpy()[mine].mean()) if mine.any() else math.nan,
                "share": float(rows["probability"].numpy()[mine].sum()),
            }
        return stats

    @property
    def num_unseen(self) -> int | None:
        """Number of levels without a score that nobody plays, or ``None`` for an unbounded set."""
        return self._new.num_idle

    def replay_chance(self) -> float:
        """Returns the probability that the next episode replays a level with a score, and draws nothing.

        It is 0 while too few levels have a score, or all of them are in flight and none may be replayed. It is also 0
        if an edited level of ACCEL is to be played next. It is 1 if every new level is being played, and otherwise the
        replay probability.
        """
        return self._chance if self._may_replay and all(map(self._is_known, self._edited)) else 0.0

    @property
    def _chance(self) -> float:  # probability of a replay, if levels may be replayed
        if self._new.num_idle == 0:
            return 1.0
        if self.replay_probability is not None:
            return float(self.replay_probability)
        count = self.count
        return 0.5 if count is None else len(self.table) / count  # the paper's for MultiRoom, and for known levels

    @property
    def _left_out(self) -> Collection[int]:  # levels that a replay by score does not draw
        return () if self.replay_in_flight else self.running.played

    @property
    def _may_replay(self) -> bool:
        count = len(self.table)
        if count == 0 or count / self.capacity < self.min_fill:
            return False
        # While all levels with a score are being played, an idle new level is played first.
        return self._new.num_idle == 0 or len(self.table.rows_among(self._left_out)) < count

    def _is_known(self, level_id: int) -> bool:
        return level_id in self.running.played or level_id in self.table

    def _play(self, actor: Actor, level_id: int, is_edited: bool = False) -> None:
        row = self.table.row_of(level_id)
        is_scored = row != REFUSED
        trains = not is_edited and (is_scored or self.train_on_new_levels)
        # The clock goes on for every episode: all levels become one episode staler, this one then has staleness 0.
        self.running.begin(actor, ActiveEpisode(level_id, self.table.begin_episode(row), is_scored, trains))
        self._new.begin(level_id)

    def _learn(self, episode: ActiveEpisode, segment: Segment, is_done: bool) -> float | None:
        child = None
        if is_done and episode.replayed and self.editor is not None:  # first, since the user's editor may raise
            child = checked_level_id(self.editor(episode.level_id, self.table.generator))
        score = self._score(episode, segment, is_done)
        if score is not None:
            score = self._store(episode.level_id, episode.started, score)
        # Only after the parent's score is stored: an error before leaves no child behind.
        if child is not None and not self._is_known(child) and child not in self._edited:
            self._edited.append(child)
        return score

    def learn_all(self, learned: Sequence[tuple[Actor, ActiveEpisode, Segment, bool]]) -> list[float | None]:
        """Scores segments, and rebuilds trees once if many scores change.

        :meta private:
        """
        self.table.defer(sum(is_done for *_, is_done in learned))
        return super().learn_all(learned)

    def _score(self, episode: ActiveEpisode, segment: Segment, is_done: bool) -> float | None:
        level_id = episode.level_id
        episode_return = episode.episode_return + segment.reward_sum
        best = self._best_returns.get(level_id, episode_return)
        if is_done:  # the return of a running episode is not final
            best = max(best, episode_return)
        if self._of_episodes is not None:  # scored once, by the return of the whole episode
            mean = float(self._of_episodes.of_episode(level_id, episode.started, episode_return)) if is_done else 0.0
        elif self._of_columns is not None and segment.columns is not None:
            mean = float(self._of_columns(segment.columns))
        else:
            steps = segment.read()
            if self._needs_best_return:
                returns = torch.full((segment.length,), best, dtype=torch.float64, device="cpu")
                steps = steps.copy().set("best_return", returns)
            mean = float(self._of_segments(steps))
        if not math.isfinite(mean):
            raise ValueError(f"the score of level {level_id} is {mean}; the score function must give a finite number")
        # Everything that may raise is done: an episode is changed as a whole or not at all.
        episode.episode_return = episode_return
        if self._of_episodes is not None:
            return mean if is_done else None
        # The pieces of an episode are joined by their lengths (paper, appendix C).
        count = episode.steps + segment.length
        episode.mean = (mean * segment.length + episode.mean * episode.steps) / count
        episode.steps = count
        if not is_done:
            return None
        if self._needs_best_return:
            self._best_returns[level_id] = best
        return episode.mean

    def _enter(self, level_ids: list[int]) -> None:
        self.capacity += len(level_ids)
        self._set_weights()
        self._new.enter(level_ids)
        self._place_initial()

    def _remove(self, level_ids: set[int]) -> None:
        self.capacity -= len(level_ids)
        self.table.remove(level_ids)
        for level_id in sorted(level_ids):
            self._new.remove(level_id)
            self._best_returns.pop(level_id, None)

    def _set_weights(self) -> None:
        if self.levels is not None:
            self.table.weights = self.levels.weights

    def _store(self, level_id: int, started: int, score: float) -> float:
        if not self.is_level(level_id):
            return score
        row = self.table.row_of(level_id)
        if row != REFUSED or self.first_score == "smooth":
            old = 0.0 if row == REFUSED else float(self.table.scores[row])
            score = (1.0 - self.score_step_size) * old + self.score_step_size * score
        # Smoothed first: in a full table a new level competes for its row with the score it would have.
        placed, evicted = self.table.place(level_id, score, started, self.capacity)
        if row == REFUSED and placed != REFUSED:
            self._new.remove(level_id)
        if evicted is not None and evicted not in self.running.played:  # an episode on it may still be scored
            self._best_returns.pop(evicted, None)
        return score

    def _leave(self, level_id: int) -> None:
        if not self._is_known(level_id) and self.is_level(level_id):  # abandoned, or refused a row
            self._new.end(level_id)
            self._best_returns.pop(level_id, None)

    def flush(self) -> None:
        """Turns partial scores of unfinished episodes into scores, see :meth:`LevelSelector.flush`."""
        for episode in self.running:
            if episode.mean != 0.0:
                self._store(episode.level_id, episode.started, episode.mean)
            episode.mean, episode.steps = 0.0, 0

    def probabilities(self) -> TensorDict:
        """Returns the replay distribution, see :meth:`LevelSelector.probabilities`.

        A learnability adds float64 columns: ``successes`` and ``outcomes`` in its window, and ``uncertainty``, the
        standard deviation of the success rate under a uniform prior.
        """
        columns = {
            "level_id": torch.tensor(self.table.level_ids, dtype=torch.int64, device="cpu"),
            "probability": torch.from_numpy(self.table.probabilities(self._left_out)),
            "score": torch.from_numpy(self.table.scores.copy()),
            "staleness": torch.from_numpy(self.table.staleness),
        }
        if isinstance(self.score, Learnability):
            columns |= self.score.columns(self.table.level_ids)
        return TensorDict(columns, [len(self)])

    def stats(self) -> dict[str, float]:
        """Metrics to log: counts and, once a level has a score, the metrics of :meth:`LevelSampler.stats`."""
        counts = {"replayed": self.replayed, "refused": self.table.refused, "replaced": self.table.replaced}
        return super().stats() | counts | self.table.stats()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state with all scores. See :meth:`LevelSelector.state_dict`."""
        return super().state_dict() | {
            "new": self._new.state_dict(),
            # A load does not read the probability, which follows from the options. A save does not have the options.
            "sampler": self.table.state_dict() | {"probability": self.probabilities()["probability"]},
            "writer": self.table.stored_levels(),
            "edited": list(self._edited),
            "scoring": {
                "best_returns": {
                    "level_id": torch.tensor(list(self._best_returns), dtype=torch.int64, device="cpu"),
                    "best_return": torch.tensor(list(self._best_returns.values()), dtype=torch.float64, device="cpu"),
                },
                "of_episodes": None if self._of_episodes is None else self._of_episodes.state_dict(),
            },
        }

    def _restore(self, state: dict[str, Any], translation: Mapping[int, int] | None) -> None:
        if self.known is None and state["capacity"] != self.capacity:
            raise ValueError(f"the saved buffer keeps {state['capacity']} levels, this one {self.capacity}")
        super()._restore(state, translation)
        if self.known is not None:
            self.capacity = len(self.known)
            self._set_weights()
        if translation is not None:
            state = translated(state, translation)
        fresh: list[int] = []
        if self.known is not None and translation is not None:
            fresh = [one for one in self.known.ids if one not in {*translation.values()}]
        self._new.load_state_dict(state["new"], fresh)
        saved = state["scoring"]["best_returns"]
        of_episodes = state["scoring"]["of_episodes"]
        if (self._of_episodes is None) != (of_episodes is None):
            raise ValueError("the saved levels were scored by segments and these by episodes, or the other way round")
        self._best_returns = dict(zip(saved["level_id"].tolist(), saved["best_return"].tolist(), strict=True))
        if self._of_episodes is not None:
            self._of_episodes.load_state_dict(of_episodes)
        self.table.set_stored_levels(state["writer"])
        self.table.load_state_dict(state["sampler"])
        self._edited = deque(state["edited"], maxlen=self.capacity)


def translated(state: dict[str, Any], translation: Mapping[int, int]) -> dict[str, Any]:
    """Returns a state with the present ids of its levels, and without levels that are no longer there."""
    ids = state["writer"]["level_id"].tolist()
    scoring = state["scoring"]
    of_episodes = scoring["of_episodes"]
    lists = [state["new"]["idle"], state["new"]["played"], scoring["best_returns"]["level_id"]]
    if of_episodes is not None:
        lists.append(of_episodes["level_id"])
    every = {*ids, *(one for values in lists for one in values.tolist())}
    if all(translation.get(one) == one for one in every):
        return state
    of_rows = {name: state["sampler"][name] for name in ("score", "timestamp", "generation")}
    rows = by_level({"level_id": state["writer"]["level_id"], **of_rows}, translation)
    # Sorted lists are built again.
    sampler = state["sampler"] | rows | {"prioritization": {}}
    new = {name: by_level({"level_id": values}, translation)["level_id"] for name, values in state["new"].items()}
    best = by_level(scoring["best_returns"], translation)
    if of_episodes is not None:
        of_episodes = by_level(of_episodes, translation)
    return state | {
        "sampler": sampler,
        "writer": state["writer"] | {"level_id": rows["level_id"]},
        "new": new,
        "scoring": {"best_returns": best, "of_episodes": of_episodes},
    }


def by_level(columns: Mapping[str, Tensor], translation: Mapping[int, int]) -> dict[str, Tensor]:
    """Returns the rows ``[n]`` of columns whose ``level_id`` is still there, with its present id."""
    saved = columns["level_id"].tolist()
    if any(len(column) != len(saved) for column in columns.values()):
        raise ValueError("the score keeps episodes of levels, and the set of levels is another; give the saved set")
    kept = [place for place, one in enumerate(saved) if one in translation]
    present = torch.tensor([translation[saved[place]] for place in kept], dtype=torch.int64, device="cpu")
    return {name: column[kept] for name, column in columns.items()} | {"level_id": present}


def _finite(name: str, given: object, level_ids: list[int], dims: Collection[int], is_rate: bool) -> np.ndarray:
    count = len(level_ids)
    values = _numbers(name, given)
    if values.ndim not in dims or len(values) != count or 0 in values.shape[1:]:
        accepted = f"[{count}]" + (f" or [{count}, k], k at least 1" if 2 in dims else "")
        raise ValueError(
            f"{name} has shape {list(values.shape)} for {count} ids; give {accepted}: one number for each id, where an "
            "id may be repeated, or one row for each"
        )
    if not np.isfinite(values).all():
        place = np.argwhere(~np.isfinite(values))[0, 0]
        raise ValueError(
            f"{name} of level {level_ids[place]} is {values[place].tolist()}; it must be finite. Nothing was changed"
        )
    wrong = np.argwhere(((values < 0.0) | (values > 1.0)) & is_rate)
    if len(wrong):
        place = wrong[0, 0]
        raise ValueError(f"{name} of level {level_ids[place]} is {values[place].tolist()}; it must be in [0, 1]")
    return values


def _numbers(name: str, given: object) -> np.ndarray:
    try:
        if isinstance(given, list | tuple) and any(isinstance(one, Tensor | np.ndarray) for one in given):
            given = [torch.as_tensor(one, dtype=torch.float64, device="cpu").tolist() for one in given]
        return torch.as_tensor(given, dtype=torch.float64, device="cpu").detach().numpy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} is no array of numbers ({error}). Give a tensor, an array, or a list of numbers or of rows of one "
            "length. If levels have different numbers of outcomes, repeat each id: record([4, 4, 9], outcomes=[1.0, "
            "0.0, 1.0])"
        ) from None


class UnseenLevels:
    """Draws a level without a score, if possible one that no actor plays, in constant time if none have weights."""

    def __init__(self, known: KnownLevels | None, generate: LevelGenerator | None) -> None:
        self._known = known
        self._generate = generate
        self.restart()

    def restart(self) -> None:
        """Makes all known levels new again."""
        self.first: list[int] = []  #: Idle levels that were added during the run, which come before others.
        self.idle: _Bag = _Bag([] if self._known is None else self._known.ids)
        self._played = _Bag([])

    @property
    def _weights(self) -> np.ndarray | None:
        levels = None if self._known is None else self._known.levels
        return None if levels is None else levels.weights

    def enter(self, level_ids: list[int]) -> None:
        """Adds levels, which come before others."""
        self.first += level_ids
        for level_id in level_ids:
            self.idle.add(level_id)

    def remove(self, level_id: int) -> None:
        """Removes a level that was retired, or has a score."""
        self.idle.discard(level_id)
        self._played.discard(level_id)
        self._drop_first(level_id)

    def _drop_first(self, level_id: int) -> None:
        if level_id in self.first:
            self.first.remove(level_id)

    @property
    def num_idle(self) -> int | None:
        """Number of new levels that nobody plays, or ``None`` for an unbounded set."""
        return None if self._known is None else len(self.idle.items)

    def choose(self, generator: torch.Generator, is_known: Callable[[int], bool]) -> int:
        """Draws a new level. If all are known, it draws a level that is being played."""
        if self.first:
            return self.first[0]
        if self._known is not None:
            bag = self.idle.items or self._played.items  # two actors on one level, if each level is played
            if self._weights is not None:
                return self._first(bag, 1, generator)[0]
            return bag[int(torch.randint(len(bag), (), generator=generator, device="cpu"))]
        for _ in range(_DRAWS):
            if self._generate is None:
                level_id = int(torch.randint(LEVEL_IDS, (), generator=generator, device="cpu"))
            else:
                level_id = checked_level_id(self._generate(generator))
            if not is_known(level_id):  # it has no score and is not being played
                break
        return level_id  # a known level, if the generator has no others

    def choose_different(self, count: int, generator: torch.Generator, is_known: Callable[[int], bool]) -> list[int]:
        """Draws at most ``count`` different new levels."""
        if self._known is not None:
            first = self.first[:count]
            others = self.idle.items
            if first:
                others = [one for one in others if one not in {*first}]
            idle = first + self._first(others, count - len(first), generator)
            return idle + self._first(self._played.items, count - len(idle), generator)
        found: dict[int, None] = {}
        while len(found) < count:
            level_id = self.choose(generator, lambda one: one in found or is_known(one))
            if level_id in found or is_known(level_id):
                break
            found[level_id] = None
        return list(found)

    def _first(self, bag: list[int], count: int, generator: torch.Generator) -> list[int]:
        count = min(count, len(bag))
        if self._weights is None:
            places = different_places(len(bag), count, generator)
        else:
            places = draw_different(self._weights[bag], count, generator).tolist() if count else []
        return [bag[place] for place in places]

    def begin(self, level_id: int) -> None:
        """Marks a new level as played."""
        if self.idle.discard(level_id):
            self._played.add(level_id)
            self._drop_first(level_id)

    def end(self, level_id: int) -> None:
        """Marks a played level as idle, unless it got a score."""
        if self._played.discard(level_id):  # not if it got a score meanwhile
            self.idle.add(level_id)

    def state_dict(self) -> dict[str, Any]:
        """Returns the order of the levels, from which levels are drawn by position."""
        if self._known is None:
            return {}
        # In the order of the bags, from which levels are drawn by position.
        lists = {"idle": self.idle.items, "played": self._played.items, "first": self.first}
        return {name: torch.tensor(items, dtype=torch.int64, device="cpu") for name, items in lists.items()}

    def load_state_dict(self, state: dict[str, Any], fresh: list[int]) -> None:
        """Restores :meth:`state_dict`. Levels that it does not know, ``fresh``, are new."""
        if self._known is not None:
            self.idle = _Bag([*state["idle"].tolist(), *fresh])
            self._played = _Bag(state["played"].tolist())
            self.first = state["first"].tolist()


class _Bag:
    """Distinct numbers, with removal and access by position in constant time."""

    def __init__(self, items: list[int]) -> None:
        self.items: list[int] = list(items)
        self._position = {item: place for place, item in enumerate(self.items)}

    def add(self, item: int) -> None:
        """Adds a number that is not in the bag."""
        self._position[item] = len(self.items)
        self.items.append(item)

    def discard(self, item: int) -> bool:
        """Removes a number and returns whether the bag had it."""
        place = self._position.pop(item, None)
        if place is not None and (last := self.items.pop()) != item:  # it fills the gap, so that no other moves
            self.items[place], self._position[last] = last, place
        return place is not None


def plr(
    levels: int | Iterable[int] | LevelSet | None = None,
    *,
    score: Score | EpisodeScore | None = None,
    seed: int | None = None,
    **options: Any,
) -> LevelBuffer:
    """Builds Prioritized Level Replay with the options of its paper: temperature 0.1, staleness weight 0.1.

    Jiang et al. 2021, https://arxiv.org/abs/2010.03934, section 4: ranks of the L1 value loss, levels in flight
    included. For MiniGrid, the paper has a staleness weight of 0.3.

    Args:
        levels: Levels, as of :class:`LevelBuffer`.
        score: Score, as of :class:`LevelBuffer`. In RLlib the default is ``L1ValueLoss`` with the learner's γ and λ.
        seed: Seed for the choices.
        options: Further options of :class:`LevelBuffer`, which may replace the options of the paper. Files of
            Lightning do not accept them: give them to :class:`LevelBuffer`.

    Example:
        >>> plr(range(100)).table.staleness_weight
        0.1
    """
    published = {"score_temperature": 0.1, "staleness_weight": 0.1, "replay_in_flight": True}
    return LevelBuffer(levels, score=score, seed=seed, **{**published, **options})


def tscl(
    levels: int | Iterable[int],
    window: int = 10,
    step_size: float = 1.0,
    epsilon: float = 0.5,
    staleness_weight: float = 0.0,
    seed: int | None = None,
    *,
    initial_value: float = 1.0,
) -> LevelBuffer:
    """Builds a teacher-student curriculum over a known set of levels, ε-greedy in learning progress.

    The defaults are the best ones in Jiang et al. 2021. For the Boltzmann variant build
    ``LevelBuffer(levels, score=LearningProgress(), prioritization=Boltzmann(), score_temperature=...)``.

    Args:
        levels: Distinct ids, or their number for 0, 1, 2, ...
        window: Number of returns kept of each level.
        step_size: Step size α of Q.
        epsilon: Share of episodes on any level.
        staleness_weight: Share of probability given to staleness.
        seed: Seed for the choices.
        initial_value: Q of a level before its first episode.
    """
    return LevelBuffer(
        levels,
        score=LearningProgress(window, step_size, initial_value),
        prioritization=Greedy(epsilon),
        staleness_weight=staleness_weight,
        seed=seed,
    )


class LearningProgress:
    """``|Q|`` of a level. Q follows the slope of its last returns over the episodes of all levels.

    ``Q <- step_size * slope + (1 - step_size) * Q``, the slope by least squares over the last ``window`` episodes on
    the level. A level with fewer than two has slope 1, so that with the default ``initial_value`` unseen levels come
    first. The window variant of Matiisen et al. 2017, "Teacher-Student Curriculum Learning",
    https://arxiv.org/abs/1707.00183.

    Give it as the ``score`` of a :class:`~lightning_replay.levels.LevelBuffer` with a known set of levels. All of them
    then have a score from the start. :func:`tscl` puts the usual parts together.

    Args:
        window: Number K of returns kept of each level, at least 2.
        step_size: Step size α, in (0, 1].
        initial_value: Q of a level before its first episode, of either sign. Its magnitude is the level's score until
            then. With less than 1 a level that was played once comes before those never played.

    Attributes:
        initial_score: ``abs(initial_value)``.
    """

    def __init__(self, window: int = 10, step_size: float = 1.0, initial_value: float = 1.0) -> None:
        check_option("window", window, Integral, "a whole number of at least 2, which a slope needs", lowest=2)
        checked_share("step_size", step_size, lowest=ABOVE_ZERO)
        self.window = window
        self.step_size = step_size
        self.initial_value: float = checked_number("initial_value", initial_value)
        self.initial_score: float | None = abs(self.initial_value)
        self._returns: dict[int, deque[tuple[int, float]]] = {}
        self._q: dict[int, float] = {}

    def of_episode(self, level_id: int, episode: int, episode_return: float) -> float:
        """Computes the level's new score from an episode's number among the episodes of all levels, and its return.

        :meta private:
        """
        if not math.isfinite(episode_return):
            raise ValueError(f"the return of an episode on level {level_id} is {episode_return}; it must be finite")
        returns = self._returns.setdefault(level_id, deque(maxlen=self.window))
        returns.append((episode, episode_return))
        slope = 1.0 if len(returns) < 2 else statistics.linear_regression(*zip(*returns, strict=True)).slope
        q = self.step_size * slope + (1.0 - self.step_size) * self._q.get(level_id, self.initial_value)
        self._q[level_id] = q
        return abs(q)

    def values(self) -> dict[int, float]:
        """Returns Q with its sign, below 0 if returns fall, by the id of each level that was played."""
        return dict(self._q)

    def state_dict(self) -> dict[str, Any]:
        """Returns the last returns and Q of each level."""
        points = [point for returns in self._returns.values() for point in returns]
        return {
            "level_id": torch.tensor(list(self._returns), dtype=torch.int64, device="cpu"),
            "length": torch.tensor([len(one) for one in self._returns.values()], dtype=torch.int64, device="cpu"),
            "episode": torch.tensor([episode for episode, _ in points], dtype=torch.int64, device="cpu"),
            "episode_return": torch.tensor([value for _, value in points], dtype=torch.float64, device="cpu"),
            "q": torch.tensor([self._q[level_id] for level_id in self._returns], dtype=torch.float64, device="cpu"),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        level_ids = state["level_id"].tolist()
        points = iter(zip(state["episode"].tolist(), state["episode_return"].tolist(), strict=True))
        self._returns = {
            level_id: deque((next(points) for _ in range(length)), maxlen=self.window)
            for level_id, length in zip(level_ids, state["length"].tolist(), strict=True)
        }
        self._q = dict(zip(level_ids, state["q"].tolist(), strict=True))
