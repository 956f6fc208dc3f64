# SPDX-License-Identifier: Apache-2.0
"""Base class of level selectors: active episodes, rollouts split at episode ends, and scores as feedback."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lightning_replay import forking
from lightning_replay.levels.episodes import ActiveEpisode, ActiveEpisodes, Segment, checked_lists
from lightning_replay.levels.known_levels import KnownLevels
from lightning_replay.levels.level_ids import LEVEL_IDS, Actor, broken_off, checked_actor, checked_level_id
from lightning_replay.levels.level_set import LevelSet
from lightning_replay.levels.ranks import Ranks
from lightning_replay.options import checked_count, checked_flag
from lightning_replay.saving import load_state, write_state
from lightning_replay.state import SeededStateful

__all__ = ["LevelSelector", "segments", "update_rollout"]

_FORMAT = 1
# A draw of a batch that nobody recorded ends after so many batches of its size, and not before so many draws. Trainers
# that generate ahead have fewer in flight.
_BATCHES_KEPT = 32
_DRAWS_KEPT = 4096


class LevelSelector(SeededStateful, ABC):
    """Chooses the level each actor plays next. Base class of the level selectors.

    Call :meth:`next_level` at the start of an episode and :meth:`update` with its steps. Steps may arrive after the
    actor's next episode has begun. Therefore an actor may have several active episodes, and an update names its level.

    Args:
        levels: Distinct ids, their number for 0, 1, 2, ..., or a :class:`LevelSet`, or ``None`` if the set is
            unbounded.
    """

    # Whether some episodes may be scored and not learned from, see trains_on.
    plays_unlearned: bool = False
    levels: LevelSet | None = None  #: Objects of the levels, if they were given as a set.
    score: Any = None  #: Score of a segment of an episode, or ``None`` if levels have no scores.
    #: Number of later draws after which a draw by :meth:`next_levels` ends that nobody recorded. ``None`` is 32 batches
    #: of its size, and at least 4,096. A later :meth:`record` still counts.
    expire_after: int | None = None
    reads_all_columns: bool = False  # whether the score is the user's, and may read any column of a rollout

    def __init__(self, levels: int | Iterable[int] | LevelSet | None = None) -> None:
        self._process = forking.process
        self.known: KnownLevels | None = None if levels is None else KnownLevels(levels)
        if isinstance(levels, LevelSet):
            self.levels = levels
        self.running: ActiveEpisodes = ActiveEpisodes()  #: Active episodes of all actors.
        self.ranks: Ranks | None = None  #: Processes that share these levels, see :meth:`share`.

    @property
    @abstractmethod
    def episodes(self) -> int:
        """Number of episodes that all actors began."""

    @property
    def count(self) -> int | None:
        """Number of all levels, with a score or without, or ``None`` if the level set is unbounded."""
        return None if self.known is None else len(self.known)

    def add(
        self, levels: Any, *, groups: Sequence[str] | None = None, weights: Sequence[float] | None = None
    ) -> list[int]:
        """Adds levels during a run, and returns their ids. They are drawn before any other level.

        Processes that :meth:`share` the levels add the same ones, at the same time.

        Args:
            levels: Objects for the :class:`LevelSet`, which gets them, or ids that were never levels before.
            groups: Group of each object, if the set has groups.
            weights: Weight of each object, if the set has weights, 1 if absent.

        Raises:
            ValueError: The set is unbounded, or cannot take these levels. Nothing is added.
        """
        self.check_process()
        if self.known is None:
            raise ValueError("the set of levels is unbounded, so that any id may be drawn; give levels=... to add more")
        new = self.known.add(levels, groups, weights)
        self._enter(new)
        return new

    def retire(self, level_ids: object) -> None:
        """Removes levels for good. Their draws end, and later outcomes or steps of them change nothing.

        Processes that :meth:`share` the levels retire the same ones, at the same time.

        Raises:
            ValueError: Unknown ids, or all levels, or an unbounded set.
        """
        self.check_process()
        if self.known is None:
            raise ValueError("the set of levels is unbounded, so that no level can be retired from it")
        leaving = self.known.members.intersection(self.checked_ids(level_ids))
        if len(leaving) == len(self.known):
            raise ValueError(f"level_ids are all {len(leaving)} levels; add others before these are retired")
        self.known.retire(leaving)
        for level_id, batch in self.running.draws_on(leaving):
            self.running.receive_score(level_id, 0, batch)
        self._remove(leaving)

    def _enter(self, level_ids: list[int]) -> None:
        """Takes notice of new levels."""

    def _remove(self, level_ids: set[int]) -> None:
        """Takes notice of levels that were retired."""

    def __len__(self) -> int:
        return 0  # levels with a score

    def __bool__(self) -> bool:
        return True  # also while no level has a score, so that ``levels or others`` keeps ``levels``

    def __repr__(self) -> str:
        known = "an unbounded set" if self.count is None else f"{self.count} levels"
        return f"{type(self).__name__}({known}, {len(self)} with a score, {self.episodes} episodes)"

    def next_level(self, actor: Actor) -> int:
        """Chooses the level of an actor's next episode. The staleness of all levels grows by one.

        ``actor`` is the number or name of an environment that plays one episode at a time.

        Raises:
            RuntimeError: This selector is a copy in another process, see :meth:`claim`.
        """
        self.check_process()
        actor = checked_actor(actor)
        level_id = self._next(actor)
        for broken_level, steps in broken_off.get():
            episode = self.running.break_off(actor, broken_level, steps)
            if episode is not None:
                self._end(actor, episode)
        return level_id

    def claim(self) -> None:
        """Allows the use of a copy in this process. Call it only if the whole run is in this process.

        If a fork or a pickle brings a selector to another process, the copy refuses to choose levels and to learn.
        Copies beside environments in several processes would all play the same levels, and would receive no scores.
        """
        self._process = forking.process

    def check_process(self) -> None:
        """Raises ``RuntimeError`` if this is a copy in another process, and nobody claimed it there.

        :meta private:
        """
        if self._process != forking.process:
            raise RuntimeError(
                f"this {type(self).__name__} is a copy of one in another process. All copies would play the same "
                "levels, and would get no scores. If each environment has a process, choose the levels in the process "
                "that trains: make_level_vector(env, num_envs, levels, asynchronous=True), "
                "LevelVectorWrapper(AsyncVectorEnv(...), levels), or rllib_ext.configure(config, levels=...). "
                "Otherwise step the environments in one process (SyncVectorEnv, DummyVecEnv, SerialEnv). If the whole "
                "run is in this process, build the levels here, or call levels.claim() first"
            )

    def share(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        divides: bool = True,
        process_group: Any = None,
    ) -> Ranks:
        """Makes these levels one set for all processes that train together, and returns what it found.

        Each process calls this method, with its own levels built from the same set. All take over the state of
        rank 0. From then on, :meth:`next_levels` draws one batch for all and returns the part of this process, and
        :meth:`record` and :meth:`abandon_levels` gather what all processes give. Each process must make these calls
        equally often. Without ``torch.distributed``, give all of them to each process yourself.

        Args:
            rank: Number of this process. If absent, ``torch.distributed`` gives the number.
            world_size: Number of processes. With ``rank=0, world_size=1`` the levels belong to this process alone.
            divides: Whether a process gets its part of a batch, and not the whole batch, which the trainer divides.
            process_group: Processes of ``torch.distributed`` that share the levels, or ``None`` for all.

        Raises:
            ValueError: The levels of the processes are not the same set.
            RuntimeError: Several processes were started and are not connected.
        """
        self.ranks = Ranks.find(rank, world_size, divides, process_group)
        if self.ranks.is_connected:  # A launcher may have brought the levels here by a pickle.
            self.claim()
        self.synchronize()
        return self.ranks

    def synchronize(self) -> None:
        """Takes over the state of rank 0 in all processes that share these levels. Each must call it."""
        ranks = self._own_ranks
        if not ranks.is_connected:
            return
        state = ranks.from_first(self.state_dict() if ranks.rank == 0 else {})
        ranks.gather(lambda: self.load_state_dict(state) if ranks.rank else None)
        sets = ranks.gather(lambda: None if self.known is None else (len(self.known), self.known.fingerprint))
        if len(set(sets)) > 1:
            counts = [None if known is None else known[0] for known in sets]
            raise ValueError(
                f"the processes have {counts} levels, by rank, and these are not the same ones in the same order; "
                "build the same set in each process"
            )

    @property
    def _own_ranks(self) -> Ranks:
        if self.ranks is None:
            found = Ranks.find()
            if found.world_size > 1:
                raise RuntimeError(
                    f"torch.distributed connects {found.world_size} processes, and nothing tells whether they share "
                    "these levels; call levels.share() in each process for one curriculum, or levels.share(rank=0, "
                    "world_size=1) for levels of this process alone, with a seed of its own"
                )
            return found
        return self.ranks

    def next_levels(self, count: int, *, replace: bool = False) -> Tensor:
        """Draws the levels of a batch, int64 ``[count]``, for no actor. They are in flight until :meth:`record`.

        Every draw is one more episode. With ``replace`` levels are drawn one after the other as by :meth:`next_level`,
        and may come twice. Without it each is drawn by the probabilities before the batch from the levels not drawn
        yet. This takes time linear in the number of levels with a score. If too few are left, levels in flight are
        drawn too.

        Of levels that processes :meth:`share`, ``count`` is the number for one process. A draw that nobody recorded
        ends as ``expire_after`` says.

        Raises:
            ValueError: Without ``replace``, more levels than there are, or episodes that are not learned from
                (``editor``, ``train_on_new_levels=False``), which only actors can tell apart.
        """
        ranks = self._own_ranks
        checked_count("count", count, of="levels")
        whole = count * ranks.world_size if ranks.divides else count
        return torch.tensor(ranks.part(self.draw_batch(whole, replace)), dtype=torch.int64, device="cpu")

    def draw_batch(self, whole: int, replace: bool = False) -> list[int]:
        """Draws the levels of the batch of all processes, as :meth:`next_levels`.

        :meta private:
        """
        self.check_draw(whole, replace)
        kept = max(_DRAWS_KEPT, _BATCHES_KEPT * whole) if self.expire_after is None else self.expire_after
        for level_id, batch in self.running.overdue(self.episodes - kept):
            self.running.expired += 1
            self.end_draw(level_id, batch)
        return self._draw(whole, replace)

    @abstractmethod
    def _draw(self, count: int, replace: bool) -> list[int]:
        """Draws the levels of a batch, and awaits their scores."""

    def check_draw(self, count: int, replace: bool) -> None:
        """Refuses, by a ``ValueError``, a batch of more different levels than there are.

        :meta private:
        """
        self.check_process()
        checked_count("count", count, of="levels")
        if not checked_flag("replace", replace) and self.count is not None and count > self.count:
            raise ValueError(
                f"the batch of all processes has {count} different levels, and there are {self.count}; draw at most as "
                "many, or call next_levels with replace=True"
            )

    def record(self, level_id: object, score: object = None, *, outcomes: object = None) -> Any:
        """Ends draws by :meth:`next_levels`. Baselines use no scores."""
        self.check_process()
        self.abandon_levels(level_id)

    def abandon_levels(self, level_id: object) -> None:
        """Ends draws by :meth:`next_levels` that get no score, as after a lost batch: of each level the oldest."""
        parts = self._own_ranks.gather(lambda: self.checked_ids(level_id))
        for one in dict.fromkeys(itertools.chain.from_iterable(parts)):
            if self.is_level(one):
                self.end_draw(one)

    def end_draw(self, level_id: int, batch: int | None = None) -> None:
        """Ends the draw of a level in the batch that began with this episode, or with ``None`` in its oldest one.

        :meta private:
        """
        self.running.receive_score(level_id, 0, batch)
        self._leave(level_id)

    def _leave(self, level_id: int) -> None:
        """Takes notice that an episode or draw on a level has ended."""

    def is_level(self, level_id: int) -> bool:
        """Whether a level may be drawn, and was not retired.

        :meta private:
        """
        return self.known is None or level_id in self.known.members

    def checked_ids(self, level_id: object) -> list[int]:
        """Returns ids ``[n]``, retired ones included. ``TypeError`` for no integers, ``ValueError`` for unknown ones.

        :meta private:
        """
        try:
            ids = torch.as_tensor(level_id, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"level_id is {level_id!r:.80}; give ids, integers [n]. The id of an object is its place in the "
                "LevelSet, which each item has as 'level_id'"
            ) from None
        if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
            raise TypeError(f"level_id is of {ids.dtype}; give the ids as integers [n]")
        known: list[int] = ids.reshape(-1).tolist()
        among: Collection[int] = range(LEVEL_IDS)
        accepted = "ids are from 0 to 2**31 - 1"
        if self.known is not None:
            among = self.known.members
            accepted = f"none of the {self.count} levels. Give ids that were drawn, or that add() returned"
        if unknown := [one for one in known if one not in among and not self._was_retired(one)]:
            raise ValueError(f"level_id has {unknown[:5]}; {accepted}. Nothing was changed")
        return known

    @abstractmethod
    def _next(self, actor: Actor) -> int: ...

    def start(self, actor: Actor, level_id: int) -> None:
        """Begins an episode on a level that was chosen elsewhere. It counts like any other."""
        self.check_process()
        self._play(checked_actor(actor), self.checked(level_id))

    @abstractmethod
    def _play(self, actor: Actor, level_id: int) -> None: ...

    def checked(self, level_id: int) -> int:
        """Returns the id of one of the levels, or raises ``ValueError`` for other ids.

        :meta private:
        """
        whole = checked_level_id(level_id)
        if not self.is_level(whole):
            was = "was retired from" if self._was_retired(whole) else "is none of"
            raise ValueError(f"level {whole} {was} the {self.count} levels that were given")
        return whole

    def _was_retired(self, level_id: int) -> bool:
        return self.known is not None and level_id in self.known.retired

    def check_held_out(self, level_ids: Iterable[int]) -> None:
        """Refuses levels that are trained on. Of an unbounded set none is known beforehand to be.

        :meta private:
        """
        both = [] if self.known is None else [one for one in level_ids if one in self.known.members]
        if both:
            raise ValueError(f"{len(both)} of held_out_levels are trained on, as {both[:3]}; give others, or how many")

    def update(self, actor: Actor, level_id: int, steps: TensorDictBase, episode_done: bool) -> float | None:
        """Scores steps of a level with the learner's values. A long episode may come in several pieces.

        The steps belong to the actor's oldest active episode on this level. Two actors on one level do not interfere.
        Both episodes count, and the later score is kept.

        Args:
            actor: Actor that made the steps.
            level_id: Id of the level that the steps were made on.
            steps: TensorDict ``[T]``, T at least 1: ``state_value``, ``logits`` if the score needs them, ``("next",
                "reward" | "state_value" | "terminated" | "truncated" | "done")``, each ``[T]`` or ``[T, 1]``.
            episode_done: Whether the episode ended with the last step. It equals its ``done``.

        Returns:
            The level's new score, if the episode is done and scored.

        Raises:
            TypeError: Steps that are not a TensorDict.
            ValueError: The actor does not play this level, there are no steps, NaN, or steps of several episodes, or
                the score is not finite. Then, and if the score function fails, nothing is changed.
        """
        segment = Segment(steps, episode_done)  # checked as a whole before anything is learned from it
        episode = self.running.oldest(actor, level_id, segment.length)
        return self.learn_all([(actor, episode, segment, episode_done)])[0]

    def _learn(self, episode: ActiveEpisode, segment: Segment, is_done: bool) -> float | None:
        return None  # scores nothing by default, and an override raises before anything is changed

    def learn_all(self, learned: Sequence[tuple[Actor, ActiveEpisode, Segment, bool]]) -> list[float | None]:
        """As :meth:`update` one by one, of checked segments, and of each whether its episode is done.

        :meta private:
        """
        self.check_process()
        scores = []
        for actor, episode, segment, is_done in learned:
            scores.append(self._learn(episode, segment, is_done))
            # Only now, because an update that raises may be repeated.
            episode.taken += segment.length
            for one in self.running.passed(episode, self.running.of(actor)):
                self._end(actor, one)
            if is_done or episode.taken == episode.length:
                self._end(actor, episode)
        return scores

    def _end(self, actor: Actor, episode: ActiveEpisode) -> None:
        self.running.end(actor, episode)
        self._leave(episode.level_id)

    def flush(self) -> None:
        """Turns non-zero partial scores of unfinished episodes into scores, and resets them.

        The released code of the paper does so after every policy update, so that an episode over three rollouts gets
        three. The paper itself joins the pieces, which happens if this is never called. A partial score of exactly 0
        changes no score, and a level without one remains new. Its steps are dropped too.
        """

    def trains_on(self, actor: Actor, level_id: int) -> bool:
        """Returns whether the learner may learn from the actor's newest episode on this level, which it must play."""
        self.running.oldest(actor, level_id)  # raises if there is none
        return next(one.trains for one in reversed(self.running.of(actor)) if one.level_id == level_id)

    def in_flight(self, actor: Actor) -> list[int]:
        """Returns the levels of the actor's active episodes, oldest first."""
        return [episode.level_id for episode in self.running.of(actor)]

    def abandon(self, actor: Actor) -> int:
        """Drops the active episodes of a lost actor and returns their number."""
        return self._abandon(actor, self.running.of(actor)[:])

    def abandon_all_but_newest(self, actor: Actor) -> int:
        """Drops all but the newest active episode of an actor, as after a resume, and returns their number."""
        return self._abandon(actor, self.running.of(actor)[:-1])

    def _abandon(self, actor: Actor, episodes: list[ActiveEpisode]) -> int:
        for episode in episodes:
            self._end(actor, episode)
        return len(episodes)

    def probabilities(self) -> TensorDict:
        """Returns the replay distribution over the levels with a score, ``[L]``. All others have probability 0.

        ``level_id`` int64, ``probability`` float64, ``score`` float64, ``staleness`` int64 in episodes.
        """
        kinds = {
            "level_id": torch.int64,
            "probability": torch.float64,
            "score": torch.float64,
            "staleness": torch.int64,
        }
        return TensorDict({name: torch.zeros(0, dtype=kind, device="cpu") for name, kind in kinds.items()}, [0])

    def stats(self) -> dict[str, float]:
        """Metrics to log."""
        return {
            "levels": len(self),
            "episodes": self.episodes,
            "in_flight": len(self.running),
            "expired": self.running.expired,
        }

    def state_dict(self) -> dict[str, Any]:
        """State as tensors and plain values. After :meth:`load_state_dict` the next choices are the same.

        Active episodes are kept. If environments start new episodes on resuming, first let every actor choose, then
        drop the old ones with :meth:`abandon_all_but_newest`: the choices then equal the choices of an uninterrupted
        run.
        """
        return {
            "version": _FORMAT,
            "kind": type(self).__name__,
            "running": self.running.state_dict(),
            "known": {} if self.known is None else self.known.state_dict(),
            **self._read_attributes(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict` of a selector built with the same arguments.

        The set may have grown since the save, or have lost levels: ids decide, or the names of a :class:`LevelSet`.

        Raises:
            ValueError: The state is of another format, another class, or other levels. Nothing is changed.
        """
        before = self.state_dict()
        kind = before["kind"]
        if not isinstance(state, dict) or "kind" not in state:
            found = list(state)[:10] if isinstance(state, dict) else f"a {type(state).__name__}"
            raise ValueError(f"the state is {found}, without 'kind'; give what state_dict() of a {kind} returned")
        if state["kind"] != kind:
            raise ValueError(f"the state is that of a {state['kind']}; this is a {kind}. Load it into the former")
        if state.get("version") != _FORMAT:
            raise ValueError(f"the state has version {state.get('version')}; {_FORMAT} can be read")
        if set(state) != set(before):
            raise ValueError(f"the state lacks or adds {sorted(set(state) ^ set(before))}; give what state_dict() gave")
        sets = () if self.known is None else self.known.sets()
        try:
            self._load(state)
            self.checked_ids([*self.running.played])
        except BaseException as error:  # a state that fits in part changes nothing
            if self.known is not None:
                self.known.set_sets(*sets)
            self._load(before)
            if isinstance(error, KeyError):
                raise ValueError(
                    f"the state lacks {error}; give what state_dict() of a {kind} like this gave"
                ) from None
            raise

    def _load(self, state: dict[str, Any]) -> None:
        translation = None
        if (self.known is None) != (not state["known"]):
            raise ValueError("the saved levels are a known set, and this set is unbounded, or the other way round")
        if self.known is not None:
            translation = self.known.translation(state["known"])
            self.known.load_state_dict(state["known"], translation)
        self._restore(state, translation)

    def _restore(self, state: dict[str, Any], translation: Mapping[int, int] | None) -> None:
        """Restores a state, of which ``translation`` has the present ids of the saved levels."""
        self.running.load_state_dict(state["running"], translation)
        self._restore_attributes(state)

    def save(self, path: str | Path) -> None:
        """Writes :meth:`state_dict` as tensors and JSON into ``path``, a directory or a URL of fsspec."""
        write_state(path, self.state_dict(), of=type(self).__name__)

    def load(self, path: str | Path) -> None:
        """Reads what :meth:`save` wrote. Raises ``FileNotFoundError``, ``DamagedFileError``, and ``ValueError``."""
        load_state(path, self.load_state_dict)


def update_rollout(
    levels: LevelSelector, rollout: TensorDictBase, level_id: Tensor, actors: Sequence[Actor] | None = None
) -> None:
    """Updates levels with the steps of a rollout, actor by actor and episode by episode.

    Call it before the policy update, with the values predicted during collection.

    Args:
        levels: Level selector to update.
        rollout: ``[actors, T]`` with the keys of :meth:`LevelSelector.update`. If the score is your own function or
            class, it receives all keys. Other scores ignore the other keys.
        level_id: int64 ``[actors, T]`` or ``[actors, T, 1]``: the level under which each step's observation was made.
        actors: Names of the actors, or 0, 1, 2, ... if absent.

    Raises:
        ValueError: Shapes that do not fit, a level that changes within an episode, or what ``update`` refuses.
    """
    steps, cut = _cut(rollout, level_id, actors, all_columns=levels.reads_all_columns)
    remaining = {actor: levels.running.of(actor)[:] for actor, *_ in cut}
    episodes = []
    for actor, level, place, done in cut:  # a rollout with a wrong level or segment must not be learned in part
        episodes.append(levels.running.oldest(actor, level, place.stop - place.start, remaining[actor]))
        for one in levels.running.passed(episodes[-1], remaining[actor]):
            remaining[actor].remove(one)
        if done:
            remaining[actor].remove(episodes[-1])
    lists = checked_lists(steps)
    learned = []
    for (actor, _, place, done), episode in zip(cut, episodes, strict=True):
        # If there are no lists, a segment is wrong, and raises its error here.
        segment = Segment.of_lists(lists, steps, place) if lists else Segment(steps[place], done)
        learned.append((actor, episode, segment, done))
    levels.learn_all(learned)


def segments(
    rollout: TensorDictBase, level_id: Tensor, actors: Sequence[Actor] | None = None
) -> Iterator[tuple[Actor, int, TensorDictBase, bool]]:
    """Yields actor, level, steps ``[T']`` and whether the episode is done, for every piece of an episode in a rollout.

    Arguments and errors are as in :func:`update_rollout`. The steps have all columns, on the CPU.
    """
    steps, cut = _cut(rollout, level_id, actors, all_columns=True)
    for actor, level, place, done in cut:
        yield actor, level, steps[place], done


def _cut(
    rollout: TensorDictBase, level_id: Tensor, actors: Sequence[Actor] | None, *, all_columns: bool
) -> tuple[TensorDictBase, list[tuple[Actor, int, slice, bool]]]:
    names = list(range(rollout.shape[0]) if actors is None else actors)
    if level_id.ndim == 3 and level_id.shape[-1] == 1:
        level_id = level_id.squeeze(-1)
    if rollout.ndim != 2 or level_id.shape != rollout.shape or len(names) != rollout.shape[0]:
        shapes = f"the rollout has shape {list(rollout.shape)}, level_id {list(level_id.shape)}"
        raise ValueError(f"{shapes} and there are {len(names)} actors; give [actors, T] for both")
    if not all_columns:  # observations may be large
        following = [("next", key) for key in ("reward", "state_value", "terminated", "truncated", "done")]
        rollout = rollout.select("state_value", "logits", *following, strict=False)
    steps = rollout.cpu().flatten()  # one copy off the device, whatever the pieces
    done = steps["next", "done"].reshape(rollout.shape).bool()
    length = rollout.shape[1]
    ends = done.clone()
    ends[:, -1:] = True  # the rollout may end within an episode
    played = level_id.flatten().tolist()
    is_done = done.flatten().tolist()
    cut = []
    start = 0
    for stop in (ends.flatten().nonzero().flatten() + 1).tolist():
        actor = names[start // length]
        if len(different := {*played[start:stop]}) > 1:
            raise ValueError(
                f"steps {start % length} to {(stop - 1) % length} of actor {actor!r} are one episode on the levels "
                f"{sorted(different)}; level_id is that of the step's own observation. If a reset broke an episode "
                "off, mark its last step as truncated and done"
            )
        cut.append((actor, played[start], slice(start, stop), is_done[stop - 1]))
        start = stop
    return steps, cut
