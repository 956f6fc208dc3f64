# SPDX-License-Identifier: Apache-2.0
"""Two replay buffers that one batch is drawn from: rows that are collected, and rows that were there before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from lightning_replay.feedback import given_feedback, judged, row_numbers, td_error_of
from lightning_replay.options import check_kind, checked_count, checked_seed
from lightning_replay.parts import declared_writer
from lightning_replay.replay import Replay, given_batch_size
from lightning_replay.saving.spec import recorded
from lightning_replay.schedules import Schedule, checked_schedule
from lightning_replay.state import Seeded, uniform
from lightning_replay.storage.rows import gather_branch, nest
from lightning_replay.training_replay import TrainingReplay

OFFLINE_INDEX = 1 << 40  #: What the ``index`` of offline rows has added.
_NO_PARTNER = -1  # second of a pair, in the rows of a side that draws single rows
_SIDES = ("online", "offline")


@recorded
class MixedReplay(Seeded, TrainingReplay):
    """Draws a part of each batch from ``offline``, the rest from ``online``; new rows are stored in ``online`` alone.

    "Symmetric sampling" of RLPD (Ball et al. 2023, section 4.1, https://arxiv.org/abs/2302.02948) with ``share=0.5``.
    Each side may be of any recipe and draws, weighs and transforms its rows as by itself. Offline rows are neither
    evicted nor changed; give their buffer rows before the first draw, ``replay.offline.extend(rows)``. Methods are
    those of :class:`~lightning_replay.Replay`: :meth:`update_priority` returns TD errors to the side of each row.

    While ``online`` holds fewer rows than its part of the batch, all rows are offline ones.

    Args:
        online: buffer of the rows that are collected.
        offline: buffer of rows that stay.
        share: part of each batch that is offline, in [0, 1]; a schedule follows its clock, of which "draws" are those
            of this object. Where it is no whole number of rows, that number is rounded up or down at random, so that
            its expectation is exact: 0.3 of 64 is 19 rows, and 20 in one draw of five.
        batch_size: rows of a batch; by default 256, or the capacity of both where it is smaller. A side draws ahead
            (``prefetch``) where its own batch size is its number of rows.
        seed: of all draws, as by :meth:`seed`; ``None`` leaves the generators of both sides as they are.

    Sampled keys:
        index: int64 ``[B]``, of offline rows with 2^40 added. ``[B, 2]`` where a side draws pairs; the second is -1
            in rows of a side that does not.
        generation: int64, in the same way.
        is_offline: bool ``[B]``; online rows are first.
        priority_weight: float32 ``[B]``, where a side draws by priority: as that side normalizes its own, at most 1 by
            its largest; 1 in rows of a side without.
        steps_to_next_obs: int64 ``[B, 1]``, where a side forms returns; 1 in rows of a side without.

    Other columns are those that both sides have.

    Raises:
        TypeError: something else than two buffers, or an option of another kind.
        ValueError: the same buffer twice, a share outside of [0, 1], returns with two discounts, or rows of ``offline``
            that lack columns of ``online`` or have others (when both first hold rows; all are named).

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
        self.online: Replay = online
        self.offline: Replay = offline
        self.share: Schedule = checked_schedule("share", share, highest=1.0)
        self.batch_size: int = given_batch_size(batch_size, self.capacity)
        self._clocks = {"draws": 0, "updates": 0, "env_steps": 0}
        self._fits = False  # whether rows of both sides were compared
        discounts = {discount for _, discount in self.returns}
        if len(discounts) > 1:
            raise ValueError(f"returns of the two sides have the discounts {sorted(discounts)}; give both the same")
        self._check_columns()
        self._seed_generator(None)
        if seed is not None:
            self.seed(seed)

    def _check_columns(self) -> None:
        if self._fits or not (len(self.online) and len(self.offline)):
            return
        online, offline = _columns_of(self.online), _columns_of(self.offline)
        not_learned = ("trajectory", "collector", self.priority_key)  # names of episodes, priorities of new rows
        wrong = [
            f"{'/'.join(key)} ({offline.get(key, 'missing')}, online {column})"
            for key, column in online.items()
            if offline.get(key) != column and key[0] not in not_learned
        ]
        if wrong:
            raise ValueError(
                f"rows of offline do not fit those of online: {', '.join(wrong)}. Fill offline with rows of the same "
                "environment, with these columns and dtypes. Nothing was stored"
            )
        self._fits = True

    def extend(self, tensordicts: TensorDictBase, **options: Any) -> Tensor:
        """Stores transitions in ``online``, as :meth:`~lightning_replay.Replay.extend`."""
        return self._stored(self.online.extend, tensordicts, **options)

    def extend_columns(self, columns: Mapping[NestedKey, Tensor | np.ndarray]) -> Tensor:
        """Stores transitions in ``online``, as :meth:`~lightning_replay.Replay.extend_columns`."""
        return self._stored(self.online.extend_columns, columns)

    def _stored(self, store: Callable[..., Tensor], rows: Any, **options: Any) -> Tensor:
        if self._fits:
            return store(rows, **options)
        self._check_columns()
        slots = store(rows, **options)
        try:
            self._check_columns()
        except ValueError:
            self.online.empty()  # of these rows, the first
            raise
        return slots

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """Draws a batch, TensorDict ``[B]``, of ``batch_size`` rows when other than the buffer's own.

        Raises:
            RuntimeError: ``offline`` is empty, or, with a share of 0, ``online``.
            ValueError: ``batch_size`` is not positive, or rows of the two sides do not fit.
        """
        count = self.batch_size if batch_size is None else checked_count("batch_size", batch_size, of="transitions")
        self._check_columns()
        exact = round(self.share(self._clocks[self.share.clock]) * count, 9)  # 0.7 * 10 is 7.000000000000001
        offline = int(exact)
        if exact > offline:
            offline += uniform(self._generator) < exact - offline
        if offline and len(self.online) < count - offline:
            offline = count
        if offline and not len(self.offline):
            raise RuntimeError("offline is empty; call offline.extend(rows) before the first draw, or give share=0")
        drawn = [side.sample(rows) for side, rows in ((self.online, count - offline), (self.offline, offline)) if rows]
        self._clocks["draws"] += 1
        return self._joined(drawn, count - offline)

    def _joined(self, drawn: list[TensorDictBase], online: int) -> TensorDictBase:
        parts = [
            {key if isinstance(key, tuple) else (key,): rows for key, rows in one.items(True, True)} for one in drawn
        ]
        device = parts[0]["index",].device
        names = [name for name in ("index", "generation") if all((name,) in part for part in parts)]
        pairs = {name: max(part[name,].ndim for part in parts) for name in names}
        filled: list[tuple[str, torch.dtype, list[int]]] = (
            [("priority_weight", torch.float32, [])] if self.is_prioritized else []
        )
        if any(("steps_to_next_obs",) in part for part in parts):
            filled.append(("steps_to_next_obs", torch.int64, [1]))
        for place, part in enumerate(parts):
            is_offline, rows = place == 1 or not online, len(part["index",])
            if is_offline:
                part["index",] = part["index",] + OFFLINE_INDEX
            for name, ndim in pairs.items():
                if part[name,].ndim < ndim:
                    part[name,] = torch.stack([part[name,], torch.full_like(part[name,], _NO_PARTNER)], -1)
            for name, dtype, shape in filled:
                if (name,) not in part:
                    part[name,] = torch.ones(rows, *shape, dtype=dtype, device=device)
            part["is_offline",] = torch.full((rows,), is_offline, device=device)
        columns = {
            key: torch.cat([part[key].to(device) for part in parts])
            for key in parts[0]
            if all(key in part for part in parts)
        }
        return gather_branch(nest(columns), columns, columns["is_offline",].shape, device)

    def update_priority(
        self,
        index: Tensor | TensorDictBase,
        td_error: Tensor | None = None,
        *,
        generation: Tensor | None = None,
        **signals: Any,
    ) -> None:
        """Returns TD errors and signals to their rows, as :meth:`~lightning_replay.Replay.update_priority`.

        Where one side refuses, neither is changed.
        """
        td_error = td_error_of(td_error, signals)
        index, td_error, generation = given_feedback(index, td_error, generation)
        first = index if index.ndim == 1 else index[:, 0]
        given_rows: dict[str, Any] = {} if td_error is None else {"td_error": td_error}
        for name, value in signals.items():
            signals[name] = given_rows[name] = row_numbers(name, value, "a tensor [B, ...]")
        for name, value in given_rows.items():
            if value.shape[:1] != index.shape[:1]:
                raise ValueError(
                    f"{name} must hold one value for each of the {len(index)} rows of the batch; got shape "
                    f"{list(value.shape)}. No priority was changed"
                )
        if td_error is None and self.is_prioritized:
            raise ValueError("td_error is None, and a side draws by TD errors; give one for each row of the batch")
        parts: list[tuple[Replay, Tensor, Any, Any, dict[str, Any]]] = []
        for side, is_own, offset in (
            (self.online, first < OFFLINE_INDEX, 0),
            (self.offline, first >= OFFLINE_INDEX, OFFLINE_INDEX),
        ):
            if not bool(is_own.any()):
                continue
            own = _of_single(index[is_own])
            errors, given = (None if one is None else one[is_own.to(one.device)] for one in (td_error, generation))
            of_rows = {name: value[is_own.to(value.device)] for name, value in signals.items()}
            part = (side, own - offset, errors, None if given is None else _of_single(given), of_rows)
            if side.takes_feedback:  # refuses before anything is changed
                judged(*part[1:4], side.storage)
                declared_writer(side.writer).read_feedback(len(own), errors, of_rows)
            parts.append(part)
        for side, own, errors, given, of_rows in parts:
            side.update_priority(own, errors, generation=given, **of_rows)

    add: Any = Replay.add
    update_tensordict_priority: Any = Replay.update_tensordict_priority
    save: Any = Replay.save  # without a file for rows that an earlier save has, such as those of offline
    load: Any = Replay.load

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clocks of schedules, of ``share`` and of both sides."""
        given = {"env_steps": env_steps, "updates": updates}
        readings = {name: checked_count(name, value, 0) for name, value in given.items() if value is not None}
        for side in (self.online, self.offline):
            side.advance(**readings)
        self._clocks |= readings

    def seed(self, seed: int) -> None:
        """Restarts all draws from ``seed``, the two sides from numbers of their own."""
        checked_seed(seed)
        self.reseed(seed)
        self.online.seed(seed)
        self.offline.seed(seed ^ 1 << 31)  # equal samplers would draw alike

    def draw_stamp(self) -> bytes:
        own = self._generator.get_state().numpy().tobytes()
        return own + self.online.draw_stamp() + self.offline.draw_stamp()

    def stats(self) -> dict[str, Any]:
        """Returns the statistics of both sides, under ``online`` and ``offline``, and the present ``share``."""
        sides = {name: getattr(self, name).stats() for name in _SIDES}
        return sides | {"share": self.share(self._clocks[self.share.clock]), "nbytes": self.nbytes}

    def __len__(self) -> int:
        """Rows of both sides."""
        return len(self.online) + len(self.offline)

    @property
    def capacity(self) -> int:
        """Most transitions kept, of both sides together."""
        return self.online.capacity + self.offline.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of both sides."""
        return self.online.nbytes + self.offline.nbytes

    @property
    def sampler_name(self) -> str:
        """Names of the classes of both samplers."""
        return f"{self.online.sampler_name} and offline {self.offline.sampler_name}"

    @property
    def returns(self) -> list[tuple[int, float]]:
        """Lengths above 1 and discounts of the returns of both sides, each once."""
        return list(dict.fromkeys([*self.online.returns, *self.offline.returns]))

    @property
    def is_prioritized(self) -> bool:
        """Whether TD errors change what a side draws."""
        return self.online.is_prioritized or self.offline.is_prioritized

    @property
    def takes_feedback(self) -> bool:
        """Whether :meth:`update_priority` changes what a side draws or keeps."""
        return self.online.takes_feedback or self.offline.takes_feedback

    @property
    def awaits_priorities(self) -> bool:
        """Whether a side takes feedback and has had none since its last draw."""
        return self.online.awaits_priorities or self.offline.awaits_priorities

    @property
    def awaits_new_episodes(self) -> bool:
        """Whether the episodes that ran in loaded files end before the next rows are stored."""
        return self.online.awaits_new_episodes

    @awaits_new_episodes.setter
    def awaits_new_episodes(self, ends: bool) -> None:
        self.online.awaits_new_episodes = ends

    # Those of ``online``, which alone is written to.
    write_count: Any = property(attrgetter("online.write_count"))
    priority_key: Any = property(attrgetter("online.priority_key"))
    end_episodes: Any = property(attrgetter("online.end_episodes"))
    tasks: Any = property(attrgetter("online.tasks"))
    progress: Any = property(attrgetter("online.progress"))
    actor_tasks: Any = property(attrgetter("online.actor_tasks"))
    needs_consecutive_rows: Any = property(attrgetter("online.needs_consecutive_rows"))
    needs_initial_surprise: Any = property(attrgetter("online.needs_initial_surprise"))
    set_initial_surprise: Any = property(attrgetter("online.set_initial_surprise"))

    @property
    def has_snapshots(self) -> bool:
        return self.online.has_snapshots and self.offline.has_snapshots

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of all that decides the next draws, of both sides at one moment."""
        with self.online.unchanged(), self.offline.unchanged():
            return super().state_dict()

    @contextmanager
    def frozen_state(self) -> Iterator[dict[str, Any]]:
        with ExitStack() as until_read:
            with self.online.unchanged(), self.offline.unchanged():
                state = {name: until_read.enter_context(getattr(self, name).frozen_state()) for name in _SIDES}
                state |= {"clocks": dict(self._clocks), **self._generator_state(), "length": len(self)}
            yield state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned; the state of other buffers is refused, and nothing is changed."""
        before = self.online.state_dict()
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self.online.load_state_dict(before)
            raise
        self._fits = False


def _columns_of(side: Replay) -> dict[tuple[str, ...], str]:
    # Of the storage, not of a draw, whose transforms may refuse single rows.
    row = side._collate_fn(side.storage.get(torch.zeros(1, dtype=torch.int64, device="cpu")))
    columns = {key if isinstance(key, tuple) else (key,): row.get(key) for key in row.keys(True, True)}
    return {
        key: f"{column.dtype} {list(column.shape[1:])}"
        for key, column in columns.items()
        if key not in (("index",), ("generation",))
    }


def _of_single(rows: Tensor) -> Tensor:
    # Rows [n, 2] of a side that draws single rows, of which the batch has pairs for the other side.
    return rows[:, 0] if rows.ndim == 2 and bool((rows[:, 1] == _NO_PARTNER).all()) else rows
