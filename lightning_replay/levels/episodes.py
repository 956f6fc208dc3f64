# SPDX-License-Identifier: Apache-2.0
"""Active episodes: the level each actor plays, and the checked steps of an episode."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any, Self

import torch
from tensordict import TensorDictBase

from lightning_replay.levels.level_ids import Actor
from lightning_replay.levels.scores import ValueColumns


@dataclass(eq=False)  # two episodes on one level are two
class ActiveEpisode:
    """An episode that has begun and has no score yet."""

    level_id: int
    started: int  # number of the episode, among all actors'
    replayed: bool  # whether the level had a score when the episode began
    trains: bool  # whether the learner learns from the episode, instead of only scoring it
    mean: float = 0.0  # partial score, over the steps scored so far
    steps: int = 0  # scored so far
    episode_return: float = 0.0  # so far
    taken: int = 0  # steps that the selector received
    length: int | None = None  # all steps of an episode that a reset broke off


class ActiveEpisodes:
    """Active episodes of every actor, oldest first. An actor may have several, even on one level."""

    def __init__(self) -> None:
        self._of: dict[Actor, list[ActiveEpisode]] = {}
        # Numbers of the active episodes by level. An actor's are by minus the number. Of the draws for no actor, the
        # newest of each batch is by the first of the batch.
        self.played: dict[int, dict[int, int]] = {}
        # The levels of each batch that await a score, in the order in which the batches were drawn.
        self._batches: dict[int, set[int]] = {}
        self.expired: int = 0  #: Number of draws that ended because nobody recorded them.

    def __len__(self) -> int:
        return sum(map(len, self.played.values())) - sum(one.length is not None for one in self)

    def __iter__(self) -> Iterator[ActiveEpisode]:
        return itertools.chain.from_iterable(self._of.values())

    @property
    def num_draws(self) -> int:
        """Number of draws that await a score. A level counts once a batch."""
        return sum(map(len, self._batches.values()))

    def of(self, actor: Actor) -> list[ActiveEpisode]:
        """Returns the active episodes of an actor, oldest first."""
        return self._of.get(actor, [])

    def begin(self, actor: Actor, episode: ActiveEpisode) -> None:
        """Adds an episode as the newest of its actor."""
        self._of.setdefault(actor, []).append(episode)
        self.played.setdefault(episode.level_id, {})[-episode.started] = episode.started

    def oldest(
        self, actor: Actor, level_id: int, steps: int = 0, among: list[ActiveEpisode] | None = None
    ) -> ActiveEpisode:
        """Returns the oldest episode on a level with room for more steps, or raises ``ValueError`` if there is none."""
        episodes = self.of(actor)
        for episode in (
            episodes if among is None else among
        ):  # the oldest first: steps may come after the actor began the level again
            if episode.level_id == level_id and episode.taken + steps <= (episode.length or math.inf):
                return episode
        if not self.of(actor):
            named = f"{list(self._of)[:8]}{' and more' if len(self._of) > 8 else ''}" if self._of else "none"
            raise ValueError(f"actor {actor!r} plays no level; those that do are {named}. Call next_level(actor) first")
        raise ValueError(
            f"actor {actor!r} does not play level {level_id!r}; it plays {[one.level_id for one in episodes]}. Name "
            "the level under which the steps were made, give each episode's end once, and call start(actor, level_id) "
            "for a level that next_level did not choose"
        )

    def passed(self, episode: ActiveEpisode, among: list[ActiveEpisode]) -> list[ActiveEpisode]:
        """Returns the broken-off episodes before this one, whose steps can no longer arrive."""
        return [*itertools.takewhile(lambda one: one is not episode and one.length is not None, among)]

    def break_off(self, actor: Actor, level_id: int | None, steps: int) -> ActiveEpisode | None:
        """Notes that a reset broke off an actor's last episode on a level, and returns it if all its steps arrived."""
        for episode in reversed(self.of(actor)[:-1]):
            if episode.level_id == level_id and episode.length is None:
                episode.length = steps
                return episode if episode.taken >= steps else None
        return None  # the selector knows its end already, from a TimeLimit around the LevelWrapper

    def end(self, actor: Actor, episode: ActiveEpisode) -> None:
        """Removes an episode."""
        episodes = self._of[actor]
        episodes.remove(episode)
        if not episodes:
            del self._of[actor]
        self._leave(episode.level_id, -episode.started)

    def _leave(self, level_id: int, key: int) -> int:
        own = self.played[level_id]
        started = own.pop(key)
        if not own:  # played has only levels of active episodes
            del self.played[level_id]
        return started

    def await_scores(self, level_ids: Iterable[int], batch: int, first: int) -> None:
        """Adds draws of a batch, which are numbered from ``first`` on."""
        awaited = self._batches.setdefault(batch, set())
        for started, level_id in enumerate(level_ids, first):
            self.played.setdefault(level_id, {})[batch] = started
            awaited.add(level_id)

    def receive_score(self, level_id: int, otherwise: int, batch: int | None = None) -> int:
        """Ends the level's draws in its oldest batch, and returns the newest episode of these, or ``otherwise``."""
        for key in self.played.get(level_id, ()) if batch is None else (batch,):
            if key > 0:
                awaited = self._batches[key]
                awaited.discard(level_id)
                if not awaited:
                    del self._batches[key]
                return self._leave(level_id, key)
        return otherwise

    def overdue(self, last: int) -> list[tuple[int, int]]:
        """Returns level and batch of each draw that awaits a score, of the batches that began up to ``last``."""
        batches = itertools.takewhile(lambda batch: batch <= last, self._batches)
        return [(level_id, batch) for batch in batches for level_id in sorted(self._batches[batch])]

    def draws_on(self, level_ids: Collection[int]) -> list[tuple[int, int]]:
        """Returns level and batch of each draw on these levels that awaits a score."""
        return [(one, batch) for one in sorted(level_ids) for batch in self.played.get(one, ()) if batch > 0]

    def draws(self) -> list[tuple[int, int, int]]:
        """Batch, newest episode and level of each draw that awaits a score, oldest first."""
        every = ((key, started, level) for level, own in self.played.items() for key, started in own.items() if key > 0)
        return sorted(every)

    def state_dict(self) -> dict[str, Any]:
        """Returns all active episodes and the draws that await a score."""
        episodes = [[list(astuple(episode)) for episode in episodes] for episodes in self._of.values()]
        awaited = torch.tensor(self.draws(), dtype=torch.int64, device="cpu").reshape(-1, 3)[:, [2, 0, 1]]
        return {"actors": list(self._of), "episodes": episodes, "awaited": awaited, "expired": self.expired}

    def load_state_dict(self, state: dict[str, Any], translation: Mapping[int, int] | None = None) -> None:
        """Restores :meth:`state_dict`, with the present ids of the saved levels. Draws on other levels end."""
        self._of, self.played, self._batches = {}, {}, {}
        self.expired = int(state["expired"])
        for saved, batch, started in state["awaited"].tolist():
            level_id = saved if translation is None else translation.get(saved)
            if level_id is not None:
                self.await_scores([level_id], batch, started)
        for actor, episodes in zip(state["actors"], state["episodes"], strict=True):
            for saved, *rest in episodes:
                level_id = saved if translation is None else translation.get(saved)
                if level_id is not None:
                    self.begin(actor, ActiveEpisode(level_id, *rest))


def checked_lists(steps: TensorDictBase) -> list[list[Any]] | None:
    """Reads :class:`ValueColumns` of many segments, or ``None`` if a column is missing or wrong in one of them."""
    if not len(steps):
        return None
    names = ("reward", "state_value", "terminated", "done", "truncated")
    given = [steps.get("state_value", None), *(steps["next"].get(name, None) for name in names)]
    given[-1] = given[-2] if given[-1] is None else given[-1]
    if any(leaf is None or leaf.numel() != len(steps) for leaf in given):
        return None
    value, reward, following, terminated, done, truncated = (leaf.reshape(-1) for leaf in given)
    largest = [leaf.abs().max() for leaf in (reward, value, following)]
    if "logits" in steps:
        largest.append(steps["logits"].max())
    if not all(one < math.inf for one in largest) or not torch.equal(terminated.bool() | truncated.bool(), done.bool()):
        return None
    return [leaf.tolist() for leaf in (reward, value, following, terminated, done)]


class Segment:
    """Consecutive steps of one episode, ``[T]``, checked before anything is learned from them."""

    def __init__(self, steps: TensorDictBase, episode_done: bool) -> None:
        if not isinstance(steps, TensorDictBase):
            raise TypeError(f"steps are a {type(steps).__name__}; give a TensorDict [T] of steps of one episode")
        if steps.ndim != 1 or steps.shape[0] == 0:
            raise ValueError(f"steps have shape {list(steps.shape)}; give [T] of at least one step of one episode")
        self.read: Callable[[], TensorDictBase] = lambda: steps
        self.length: int = steps.shape[0]
        given = dict(steps.items())  # a tenth of the time of lookups in a TensorDict
        following = dict(given.get("next", {}).items())
        value = given.get("state_value")
        lists: dict[str, list[Any]] = {} if value is None else {"state_value": value.reshape(-1).tolist()}
        for name in ("done", "reward", "terminated", "truncated", "next state_value"):
            leaf = following.get(name.removeprefix("next "))
            if leaf is not None:
                lists[name] = (leaf if leaf.ndim == 1 else leaf.reshape(-1)).tolist()
            elif name in ("done", "reward"):
                raise ValueError(
                    f"steps have the keys {sorted(map(str, steps.keys(True, True)))}; ('next', 'done') and ('next', "
                    "'reward') are needed, in TorchRL's layout"
                )
        for name in ("done", "reward", "terminated", "truncated"):
            if len(lists.get(name, lists["done"])) != self.length:
                raise ValueError(
                    f"of {self.length} steps {name} has shape {list(following[name].shape)}; give [T] or [T, 1]"
                )
        done = lists["done"]
        for name in ("terminated", "truncated"):
            for flag, end in zip(lists.get(name, ()), done, strict=False):
                if flag and not end:
                    raise ValueError(f"a step is {name} and not done; done is terminated or truncated")
        if bool(done[-1]) != bool(episode_done):
            raise ValueError(f"episode_done is {episode_done}, but the last step's done is {bool(done[-1])}")
        if episode_done and not (lists.get("terminated", done)[-1] or lists.get("truncated", done)[-1]):
            raise ValueError("the last step is done and neither terminated nor truncated; set the one that it is")
        if any(done[:-1]):
            raise ValueError(f"an episode ends at step {done.index(True)} of {len(done)}; cut it or use update_rollout")
        self.reward_sum: float = float(sum(lists["reward"]))
        for name in ("reward", "state_value", "next state_value"):  # one number that is not finite makes the sum so
            if not math.isfinite(sum(lists.get(name, ()))):
                raise ValueError(f"{name} of the segment is NaN or infinite; the level's score would be so too")
        logits = given.get("logits")
        if logits is not None and not logits.max() < math.inf:  # NaN is the largest, -inf is an action without a chance
            raise ValueError("logits of the segment are NaN or infinite; the level's score would be so too")
        # A score of values takes these lists. A score of other columns reads the steps.
        columns = [lists.get(name, ()) for name in ("reward", "state_value", "next state_value", "terminated", "done")]
        is_whole = {*map(len, columns)} == {self.length}
        self.columns: ValueColumns | None = ValueColumns._make(columns) if is_whole else None

    @classmethod
    def of_lists(cls, lists: list[list[Any]], steps: TensorDictBase, place: slice) -> Self:
        """A place in steps that were read and checked by :func:`checked_lists`."""
        segment = cls.__new__(cls)
        segment.read = lambda: steps[place]
        segment.columns = ValueColumns._make([column[place] for column in lists])
        segment.length = place.stop - place.start
        segment.reward_sum = float(sum(segment.columns.reward))
        return segment
