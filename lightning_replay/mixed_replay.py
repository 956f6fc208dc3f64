# SPDX-License-Identifier: Apache-2.0
"""Two replay buffers that one batch is drawn from: rows that are collected, and rows that were there before."""

from __future__ import annotations

import math
import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lightning_replay.feedback import own_td_error, parse_td_errors, row_numbers, td_error_of
from lightning_replay.forking import ForkGuard
from lightning_replay.options import check_kind, checked_count
from lightning_replay.replay import Replay, given_batch_size
from lightning_replay.saving.spec import rebuildable
from lightning_replay.schedules import Constant, Schedule, checked_schedule
from lightning_replay.state import SeededStateful, uniform
from lightning_replay.torchrl_compat import collated
from lightning_replay.training_replay import TrainingReplay

OFFLINE_INDEX = 1 << 40  #: What the ``index`` of offline rows has added.
_NO_PARTNER = -1  # second of a pair, in the rows of a side that draws single rows
_SIDES = ("online", "offline")
_BOOKKEEPING = ("trajectory", "collector", "done", "terminated", "truncated")


def _of_online(name: str) -> Any:
    return property(attrgetter(f"online.{name}"), lambda mixed, value: setattr(mixed.online, name, value))


def _of_both(name: str, joined: Callable[[Any, Any], Any]) -> Any:
    of_each = attrgetter(f"online.{name}", f"offline.{name}")
    return property(lambda mixed: joined(*of_each(mixed)))


@rebuildable
class MixedReplay(SeededStateful, TrainingReplay):
    """Draws a part of each batch from ``offline``, the rest from ``online``. New rows are stored in ``online`` alone.

    "Symmetric sampling" of RLPD (Ball et al. 2023, section 4.1, https://arxiv.org/abs/2302.02948) with ``share=0.5``.
    Each side may be of any recipe and draws, weighs and transforms its rows as by itself. Offline rows are neither
    evicted nor changed. Give their buffer rows before the first draw, ``replay.offline.extend(rows)``. Methods match
    :class:`~lightning_replay.Replay`: :meth:`update_priority` returns TD errors to the side of each row, and if one
    side refuses, neither is changed. Stored rows are read and emptied by side: ``replay.online[:]``.

    While ``online`` holds fewer rows than its part of the batch, or no complete sequence, all rows are offline ones.
    With a ``share`` of 0 all are online ones, and with a schedule that has fallen to 0 once ``online`` holds a batch.

    Args:
        online: buffer of the rows that are collected.
        offline: buffer of rows that stay.
        share: part of each batch that is offline, in [0, 1]. A schedule follows its clock, of which "draws" are the
            draws of this object. If it is not a whole number of rows, that number is rounded up or down at random, so
            that its expectation is exact: 0.3 of 64 is 19 rows, and 20 in one draw of five.
        batch_size: rows of a batch, by default 256, or the capacity of both if it is smaller. A side draws ahead
            (``prefetch``) if its own batch size is its number of rows.
        seed: of all draws, as by :meth:`seed`. ``None`` leaves the generators of both sides as they are.

    Sampled keys:
        index: int64 ``[B]``, of sequences ``[B, T]`` as all columns, of offline rows with 2^40 added. ``[B, 2]`` if a
            side draws pairs. The second is -1 in rows of a side that does not.
        generation: int64, in the same way.
        is_offline: bool ``[B]``. Online rows are first.
        priority_weight: float32 ``[B]``, if a side draws by priority: as that side normalizes its own, at most 1 by
            its largest, and 1 in rows of a side without.
        steps_to_next_obs: int64 ``[B, 1]``, if both sides form returns.

    Other columns are the ones that both sides have. If ``offline`` lacks a column that a policy wrote for ``online``,
    such as ``action_value``, the first draw warns. The flags and ``is_init`` of a step's start, which TorchRL's
    collectors add, may be missing.

    Raises:
        TypeError: something else than two buffers, or an option of another kind.
        ValueError: the same buffer twice, a share outside of [0, 1], returns with two discounts or of two lengths,
            sequences on one side or of two lengths, or rows of ``offline`` that lack actions, observations, or columns
            under ``"next"``, or have a column of another dtype or shape (when the second side gets its first rows, of
            which none is stored then, and all columns are named).

    Example:
        >>> from tensordict import TensorDict
        >>> from lightning_replay import recipes
        >>> rows = TensorDict({"observation": torch.zeros(40, 3)}, [40])
        >>> demonstrations = recipes.uniform(capacity=100)
        >>> _ = demonstrations.extend(rows)
        >>> replay = MixedReplay(recipes.prioritized(capacity=1_000), demonstrations, share=0.25, batch_size=8)
        >>> _ = replay.extend(rows)
        >>> replay.sample()["is_offline"].tolist()
        [False, False, False, False, False, False, True, True]
    """

    saved_attributes: tuple[str, ...] = ("_clocks",)
    saved_parts: tuple[str, ...] = _SIDES

    def __init__(
        self,
        online: Replay,
        offline: Replay,
        share: float | Schedule = 0.5,
        batch_size: int | None = None,
        seed: int | None = None,
    ) -> None:
        for name, side in zip(_SIDES, (online, offline), strict=True):
            check_kind(name, side, Replay, "a Replay, such as lightning_replay.recipes.uniform(capacity=100_000)")
        if online is offline:
            raise ValueError("online and offline are the same buffer, whose rows would leave; give two")
        if online.parts.ragged is not None or offline.parts.ragged is not None:
            raise ValueError(
                "a side has the option ragged, and batches of the two sides would be padded to different lengths; draw "
                "from both buffers, and join what the loss makes of each batch"
            )
        self.online: Replay = online
        self.offline: Replay = offline
        self.share: Schedule = checked_schedule("share", share, highest=1.0)
        self.batch_size: int = given_batch_size(batch_size, self.capacity)
        of_online = math.ceil(round(self.batch_size * (0.0 if isinstance(share, Schedule) else 1 - share), 9))
        if online.capacity < of_online:  # of a schedule any number of rows; with fewer none would ever be drawn
            raise ValueError(
                f"the capacity of online is {online.capacity}, below the {of_online} rows of each batch that it draws; "
                "raise it, or lower the batch size"
            )
        self._clocks = {"draws": 0, "updates": 0, "env_steps": 0}
        discounts = {discount for _, discount in self.returns}
        if len(discounts) > 1:
            raise ValueError(f"returns of the two sides have the discounts {sorted(discounts)}; give both the same")
        lengths = [max((n_steps for n_steps, _ in side.returns), default=1) for side in (online, offline)]
        if lengths[0] != lengths[1]:
            raise ValueError(
                f"n_steps is {lengths[0]} in online and {lengths[1]} in offline, and a batch would mix returns of both "
                "lengths; give both sides the same n_steps"
            )
        online_steps, offline_steps = ((side.sequence_length, side.burn_in) for side in (online, offline))
        if online_steps != offline_steps:
            raise ValueError(
                f"length and burn-in of sequences are {online_steps} in online and {offline_steps} in offline, None "
                "where rows are drawn; build both with recipes.sequences and the same lengths, or with recipes of rows"
            )
        self._has_compared = False  # stored rows of the two sides
        self._compare()
        for name in () if self._has_compared else _SIDES:
            self._sides[name]._check_first = partial(self._compare, name)
        self._seed_generator(None)
        self._begin_life()
        if seed is not None:
            self.seed(seed)

    def _begin_life(self) -> None:
        # Taken before the locks of the sides, so that no state is one within a draw or an update of both.
        self._lock = threading.RLock()
        self._guard = ForkGuard(self)

    def after_fork(self) -> None:
        """Replaces the lock in a forked process, in which both sides refuse to work if another thread held it.

        :meta private:
        """
        self._lock = self._guard.renew(self._lock)
        if self._guard.refusal is not None:
            self.online.fork_guard.refusal = self._guard.refusal
            self.offline.fork_guard.refusal = self._guard.refusal

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_guard")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_life()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other threads from writing, drawing and updating while the body runs."""
        with self._lock, self.online.locked(), self.offline.locked():
            yield

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("a MixedReplay has rows on two sides; read replay.online[...] or replay.offline[...]")

    if not TYPE_CHECKING:  # which would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            remedy = "sampler, writer and rows are those of its sides, replay.online and replay.offline"
            raise AttributeError(f"a MixedReplay has no attribute {name!r}; {remedy}", name=name, obj=self)

    @property
    def _sides(self) -> dict[str, Replay]:
        return {"online": self.online, "offline": self.offline}

    def _compare(self, name: str = "", first: TensorDictBase | None = None, depth: int = 3) -> None:
        # Of the side ``name`` the first rows, which are not stored yet.
        columns: list[dict[tuple[str, ...], str]] = []
        for one in _SIDES:
            side, rows = self._sides[one], first if one == name else None
            if rows is None and not len(side):
                return
            if rows is None:  # of the storage, not of a draw, whose transforms may refuse single rows
                rows = collated(side, side.storage.get(torch.zeros(1, dtype=torch.int64, device="cpu")))
            columns.append(
                {
                    (key,) if isinstance(key, str) else key: f"{column.dtype} {list(column.shape[1:])}"
                    for key, column in rows.items(True, True)
                    if key not in ("index", "generation")
                }
            )
        online, offline = columns
        differing = [
            key for key, column in online.items() if offline.get(key) != column and not self._is_bookkeeping(key)
        ]
        # What only online has is needed if it describes a transition. The rest was written by a policy.
        needed = [
            key for key in differing if key in offline or key[0] in ("next", "action") or ("next", *key) in online
        ]
        wrong = [f"{'/'.join(key)} ({offline.get(key, 'missing')}, online {online[key]})" for key in needed]
        if wrong:
            raise ValueError(
                f"rows of offline do not fit those of online: {', '.join(wrong)}. Fill offline with rows of the same "
                "environment, with these columns and dtypes. Nothing was stored"
            )
        if first is None:
            self._has_compared = True
            self.online._check_first = self.offline._check_first = None  # and neither keeps the other alive
            if differing:
                names = ", ".join("/".join(key) for key in differing)
                warnings.warn(
                    f"rows of offline lack columns of online, and no batch contains them: {names}. If the loss reads "
                    "one, fill offline with rows that contain it",
                    stacklevel=depth,
                )

    def _is_bookkeeping(self, key: tuple[str, ...]) -> bool:
        # Names of episodes, priorities of new rows, and the flags of a step's start that TorchRL's collectors add.
        return key[0] in (*_BOOKKEEPING, self.priority_key) or key[-1] == "is_init"

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """Draws a batch, TensorDict ``[B]``, of ``batch_size`` rows when other than the buffer's own.

        Raises:
            RuntimeError: ``offline`` is empty and the share is above 0, or ``online`` is and the share is 0.
            ValueError: ``batch_size`` is not positive, or rows of the two sides do not fit.
        """
        count = self.batch_size if batch_size is None else checked_count("batch_size", batch_size, of="transitions")
        with self._lock:
            if not self._has_compared:  # at the first draw, also with rows that a side has loaded
                self._compare(depth=4)  # below torch.compiler.disable
            exact = round(self.share(self._clocks[self.share.clock]) * count, 9)  # 0.7 * 10 is 7.000000000000001
            if exact and not len(self.offline):
                raise RuntimeError("offline is empty; call offline.extend(rows) before the first draw, or give share=0")
            offline = int(exact)
            # Of the two roundings the one with more online rows decides whether online holds enough.
            needed = min(count - offline, self.online.capacity)
            if exact > offline:
                offline += uniform(self._generator) < exact - offline
            # If all are of one side, its own error names what it lacks.
            may_wait = needed and len(self.offline) and (exact or not isinstance(self.share, Constant))
            lacks = len(self.online) < needed
            if may_wait and (lacks or self.online.parts.sampler.awaits_rows(self.online._storage)):
                offline = count
            rows_of = ((self.online, count - offline), (self.offline, offline))
            drawn = [side.sample(rows) for side, rows in rows_of if rows]
            self._clocks["draws"] += 1
        return self._joined(drawn, first_offline=count - offline)

    def __iter__(self) -> Iterator[TensorDictBase]:
        # TorchRL's trainers draw so.
        while True:
            yield self.sample()

    @torch.inference_mode(False)  # Batches of one side can also be trained on.
    def _joined(self, drawn: list[TensorDictBase], first_offline: int) -> TensorDictBase:
        parts = [{key: part.get(key) for key in part.keys(True, True)} for part in drawn]
        device, shape = parts[0]["index"].device, drawn[0].shape[1:]
        filled: dict[str, Tensor] = {}  # a row of what a side may not have
        if self.is_prioritized:
            filled["priority_weight"] = torch.ones(1, *shape, dtype=torch.float32, device=device)
        pairs = [
            name for name in ("index", "generation") if {part[name].ndim for part in parts if name in part} == {1, 2}
        ]
        for place, part in enumerate(parts):
            is_offline, rows = place == 1 or not first_offline, len(part["index"])
            part |= {
                "index": part["index"] + OFFLINE_INDEX * is_offline,
                "is_offline": torch.full((rows, *shape), is_offline, dtype=torch.bool, device=device),
            }
            for name in pairs:
                if part[name].ndim == 1:
                    part[name] = torch.stack([part[name], torch.full_like(part[name], _NO_PARTNER)], -1)
            for name, one in filled.items():
                part.setdefault(name, one.expand(rows, *one.shape[1:]))
        common = [key for key in parts[0] if all(key in part for part in parts)]
        joined = {key: torch.cat([part[key].to(device) for part in parts]) for key in common}
        return TensorDict(joined, joined["is_offline"].shape, device=device)

    def update_priority(
        self,
        index: Tensor | TensorDictBase,
        td_error: Tensor | None = None,
        *,
        generation: Tensor | None = None,
        **signals: Any,
    ) -> None:
        """Passes TD errors and signals on to their rows, see :meth:`~lightning_replay.Replay.update_priority`."""
        td_error = td_error_of(td_error, signals, self.online.signals + self.offline.signals)
        td_error = own_td_error(index, td_error, signals, self.priority_key)
        index, td_error, generation = parse_td_errors(index, td_error, generation)
        first, of_rows = index if index.ndim == 1 else index[:, 0], {"td_error": td_error, "generation": generation}
        of_rows |= {name: row_numbers(name, value, "a tensor [B, ...]") for name, value in signals.items()}
        for name, value in of_rows.items():
            if value is not None and value.shape[:1] != index.shape[:1]:
                raise ValueError(
                    f"{name} must hold one value for each of the {len(index)} rows of the batch; got shape "
                    f"{list(value.shape)}. No priority was changed"
                )
        parts: list[tuple[Replay, Tensor, dict[str, Any]]] = []
        for side, is_own, offset in (
            (self.online, first < OFFLINE_INDEX, 0),
            (self.offline, first >= OFFLINE_INDEX, OFFLINE_INDEX),
        ):
            if bool(is_own.any()):
                own = {
                    name: None if value is None else value[is_own.to(value.device)]
                    for name, value in of_rows.items()
                    if name in ("td_error", "generation", *side.signals)
                }
                own["generation"] = _of_single(own["generation"])
                parts.append((side, _of_single(index[is_own]) - offset, own))
        with self._lock:
            for side, slots, own in parts:  # refuses before anything is changed
                if side.takes_feedback:
                    side.read_feedback(slots, **own)
            for side, slots, own in parts:
                side.update_priority(slots, **own)

    add: Any = Replay.add
    update_tensordict_priority: Any = Replay.update_tensordict_priority
    save: Any = Replay.save  # without a file for rows that an earlier save has, such as those of offline
    load: Any = Replay.load

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clocks of schedules, of ``share`` and of both sides."""
        given = {"env_steps": env_steps, "updates": updates}
        with self._lock:
            for side in self._sides.values():
                side.advance(**given)
            self._clocks |= {name: int(value) for name, value in given.items() if value is not None}

    def seed(self, seed: int) -> None:
        """Restarts all draws from ``seed``, the two sides from separate numbers."""
        with self._lock:
            self.online.seed(seed)
            self.offline.seed(seed ^ 1 << 31)  # equal samplers would draw alike
            self.reseed(seed)

    def generator_fingerprint(self) -> bytes:
        own = self._generator.get_state().numpy().tobytes()
        return own + self.online.generator_fingerprint() + self.offline.generator_fingerprint()

    def stats(self) -> dict[str, Any]:
        """Returns the statistics of both sides, under ``online`` and ``offline``, and the present ``share``."""
        sides = {name: side.stats() for name, side in self._sides.items()}
        return sides | {"share": self.share(self._clocks[self.share.clock]), "nbytes": self.nbytes}

    def __len__(self) -> int:
        """Rows of both sides."""
        return len(self.online) + len(self.offline)

    capacity: Any = _of_both("capacity", operator.add)
    nbytes: Any = _of_both("nbytes", operator.add)
    sampler_name: Any = _of_both("sampler_name", "{} and offline {}".format)
    returns: Any = _of_both("returns", lambda online, offline: list(dict.fromkeys(online + offline)))
    is_prioritized: Any = _of_both("is_prioritized", operator.or_)
    takes_feedback: Any = _of_both("takes_feedback", operator.or_)
    awaits_priorities: Any = _of_both("awaits_priorities", operator.or_)
    has_snapshots: Any = _of_both("has_snapshots", operator.and_)
    sequence_length: Any = _of_online("sequence_length")  # the same in both
    burn_in: Any = _of_online("burn_in")
    # The attribute is that of ``online``, because only ``online`` is written to.
    extend: Any = _of_online("extend")
    extend_columns: Any = _of_online("extend_columns")
    write_count: Any = _of_online("write_count")
    storage: Any = _of_online("storage")  # of which TorchRL's trainers read the device
    entered: Any = property(attrgetter("online"))
    priority_key: Any = _of_online("priority_key")
    end_episodes: Any = _of_online("end_episodes")
    tasks: Any = _of_online("tasks")
    progress: Any = _of_online("progress")
    actor_tasks: Any = _of_online("actor_tasks")
    needs_consecutive_rows: Any = _of_online("needs_consecutive_rows")
    needs_initial_surprise: Any = _of_online("needs_initial_surprise")
    set_initial_surprise: Any = _of_online("set_initial_surprise")
    awaits_new_episodes: Any = _of_online("awaits_new_episodes")

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of all that decides the next draws, of both sides at one moment."""
        with self.locked():
            return super().state_dict()

    @contextmanager
    def frozen_state(self) -> Iterator[dict[str, Any]]:
        with ExitStack() as until_read:
            with self.locked():
                state: dict[str, Any] = {
                    **{name: until_read.enter_context(side.frozen_state()) for name, side in self._sides.items()},
                    "clocks": dict(self._clocks),
                    **self._generator_state(),
                    "length": len(self),
                }
            yield state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned. The state of other buffers is refused, and nothing is changed."""
        check_kind("the state", state_dict, Mapping, "what state_dict() of a mixed replay returned")
        clocks = state_dict.get("clocks")
        if not isinstance(clocks, Mapping) or clocks.keys() != self._clocks.keys():
            raise ValueError(f"the state has the clocks {clocks!r}; give what state_dict() of a mixed replay returned")
        with self.locked():
            before = self.state_dict()
            try:
                super().load_state_dict(state_dict)
            except BaseException:
                super().load_state_dict(before)
                raise
            self._has_compared = False


def _of_single(rows: Any) -> Any:
    # Rows [n, 2] of a side that draws single rows, of which the batch has pairs for the other side.
    is_single = rows is not None and rows.shape[1:] == (2,) and bool((rows[:, 1] == _NO_PARTNER).all())
    return rows[:, 0] if is_single else rows
