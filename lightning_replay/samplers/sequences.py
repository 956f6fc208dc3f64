# SPDX-License-Identifier: Apache-2.0
"""Draws sequences of steps along episodes, for recurrent agents and world models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from lightning_replay.episodes import kernels
from lightning_replay.episodes.links import EpisodeLinks
from lightning_replay.options import checked_count, checked_share
from lightning_replay.parts import declared_sampler
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.samplers.pairs import DependentSampler, FollowedEpisodes
from lightning_replay.samplers.prioritized import PrioritizedSampler
from lightning_replay.saving.spec import recorded
from lightning_replay.schedules import Schedule
from lightning_replay.storage.packed import device_of, empty_storage, occupancy_of

MAX_SHARE = 0.9  # η of R2D2


def sequence_priorities(td_error: Tensor, counts: Tensor, max_share: float = MAX_SHARE) -> Tensor:
    """Computes ``η max|δ| + (1 - η) mean|δ|`` over the steps that count of each sequence.

    R2D2, Kapturowski et al. 2019, section 2.3, https://openreview.net/forum?id=r1lyTjAqYX.

    Args:
        td_error: ``[B, T]``; where steps do not count it may be anything, NaN included.
        counts: bool ``[B, T]``.
        max_share: η.

    Returns:
        ``[B]``, of the dtype of the errors; 0 where no step counts.

    Example:
        >>> sequence_priorities(torch.tensor([[-4.0, 2.0, torch.nan]]), torch.tensor([[True, True, False]]))
        tensor([3.9000])
    """
    magnitude = torch.where(counts, td_error.abs(), 0)
    mean = magnitude.sum(1) / counts.sum(1).clamp(min=1)
    return max_share * magnitude.amax(1) + (1 - max_share) * mean


class SequenceStarts(PrioritizedSampler):
    """Draws rows in which sequences begin, by the priorities of the sequences; others have no weight in the tree."""

    num_slots = None  # type: ignore[assignment]  # the tree gets the size of the storage with the first rows

    def __init__(
        self, priority_exponent: float, importance_exponent: float | Schedule, priority_offset: float, seed: int
    ) -> None:
        super().__init__(1, priority_exponent, importance_exponent, priority_offset, seed=seed)

    @property
    def uses_priorities(self) -> bool:  # type: ignore[override]
        return self.priority_exponent > 0

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Does nothing: :meth:`begin` and :meth:`on_evict` are called where sequences begin, and where rows leave."""

    def begin(self, slots: Tensor) -> None:
        """Gives new sequences, by their first rows, int64 ``[n]``, the largest priority so far."""
        slots = slots[self._tree.get(slots) == 0]  # a sequence that was drawn before keeps its priority
        super().mark_update(slots)

    def has_any(self) -> bool:
        return self._tree.has_mass()

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        index, info = super().sample(storage, batch_size)
        return index, info if self.uses_priorities else {}

    def _attach_storage(self, storage: Storage | None) -> None:
        if storage is not None and self._tree.capacity != storage.max_size:
            self._tree = PriorityTree(storage.max_size)
        self._has_rows = True
        super()._attach_storage(storage)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._tree = PriorityTree(len(state_dict["tree"]["leaves"]))
        super().load_state_dict(state_dict)


@recorded
class SequenceSampler(DependentSampler):
    """Draws sequences of ``length`` consecutive steps of an episode, a batch ``[B, T]``.

    Sequences begin with the first stored step of an episode and every ``length - overlap`` steps after it: with
    ``overlap=length - 1`` at every step. One can be drawn once all its steps are stored, or the episode has ended. The
    last one of an episode is shorter where it must be to reach the end; it is padded with its last row, and ``mask`` is
    false there. A sequence leaves with its first row, and ends where a row of it has left; none goes over the end of an
    episode, a gap, or a row that starts with another observation than the row before ended with. Rows of several
    environments need ``trajectory`` (or ``("collector", "traj_ids")``) and may be interleaved in any way.

    ::

        steps of an episode      0 1 2 3 4 5 6 7 8      length 4, overlap 2
        sequences                0 1 2 3
                                     2 3 4 5
                                         4 5 6 7
                                             6 7 8 8    mask 1 1 1 0

    All sequences are equally likely, or with a ``priority_exponent`` α drawn in proportion to
    ``(priority + priority_offset) ** α``; new ones get the largest priority so far. ``Replay.update_priority`` takes
    the TD errors of all steps, ``[B, T]``, and sets one priority for each sequence, by :func:`sequence_priorities`;
    padding and burn-in are ignored, whatever they hold. R2D2, Kapturowski et al. 2019,
    https://openreview.net/forum?id=r1lyTjAqYX, draws with ``overlap=length // 2``, α = 0.9 and β = 0.6.

    From the first ``burn_in`` steps nothing is learned: they bring the recurrent state up to date that was stored with
    the first step, as an ordinary column. With ``overlap >= burn_in`` all steps are learned from but the first
    ``burn_in`` of each episode. A draw costs the same whatever the capacity.

    With ``first``, a sampler of rows such as :class:`~lightning_replay.samplers.tables.TableShares`, rows are drawn by
    it, and with each the sequence in which it is the first one that is learned from; the sequence begins earlier where
    the episode would end within it. TD errors become priorities of single rows then, as far as ``first`` has any.

    Args:
        length: T, steps of a sequence, the burn-in included.
        overlap: steps that neighbouring sequences of an episode share.
        burn_in: steps at the beginning from which nothing is learned.
        first: a sampler of rows in place of the priorities of sequences.
        min_steps: fewest steps of a sequence; by default ``burn_in + 1``. ``length`` draws whole sequences alone.
        priority_exponent: α; 0 draws uniformly.
        importance_exponent: β of the correction ``priority_weight``.
        priority_offset: ε, added to every priority.
        max_share: η of the priority of a sequence.
        done_key: the flag of rows that ended their episode, terminated or truncated.
        check_continuity: whether observations are compared, see :class:`~lightning_replay.episodes.links.Continuity`.
        seed: of the sampler's own generator.

    Sampled keys:
        index, generation: int64 ``[B, T]``.
        mask: bool ``[B, T]``, true where the step exists.
        priority_weight: float32 ``[B, T]``, that of the sequence, with a ``priority_exponent``.

    Raises:
        ValueError: options that contradict each other; rows without ``done_key``; at the draw, when episodes ended and
            all of them are shorter than ``min_steps``.
        RuntimeError: at the draw, when no sequence is complete yet.

    Example:
        >>> from tensordict import TensorDict
        >>> from lightning_replay import PackedStorage, Replay
        >>> sampler = SequenceSampler(length=4, overlap=2, check_continuity=False)
        >>> replay = Replay(storage=PackedStorage(9), sampler=sampler, batch_size=2, seed=0)
        >>> done = torch.arange(9).view(9, 1) == 8
        >>> _ = replay.extend(TensorDict({"observation": torch.arange(9.0), "next": {"done": done}}, [9]))
        >>> batch = replay.sample()
        >>> batch["index"], batch["mask"].sum(1)
        (tensor([[6, 7, 8, 8],
                [4, 5, 6, 7]]), tensor([3, 4]))
    """

    _position: np.ndarray  # int32 [capacity], how many steps of its episode came before each row
    _longest_ended: int  # steps of the longest episode that ended
    _has_drawn: bool

    def __init__(
        self,
        length: int,
        overlap: int = 0,
        burn_in: int = 0,
        first: Sampler | None = None,
        min_steps: int | None = None,
        priority_exponent: float = 0.0,
        importance_exponent: float | Schedule = 0.4,
        priority_offset: float = 1e-6,
        max_share: float = MAX_SHARE,
        done_key: NestedKey = ("next", "done"),
        check_continuity: bool = True,
        seed: int | None = None,
    ) -> None:
        self.sequence_length: int = checked_count("length", length, of="steps")
        self.overlap: int = checked_count("overlap", overlap, 0, of="steps")
        self.burn_in: int = checked_count("burn_in", burn_in, 0, of="steps")
        for name, steps, why in (
            ("overlap", overlap, "sequences begin length - overlap steps apart"),
            ("burn_in", burn_in, "nothing would be left to learn from"),
        ):
            if steps >= length:
                raise ValueError(f"{name} is {steps} and length is {length}: {why}. Give at most {length - 1}")
        least = burn_in + 1 if min_steps is None else checked_count("min_steps", min_steps, of="steps")
        if not burn_in < least <= length:
            raise ValueError(
                f"min_steps is {min_steps}; it must be from burn_in + 1 = {burn_in + 1} to length = {length}"
            )
        if first is not None and (overlap or priority_exponent or min_steps is not None):
            raise ValueError(
                "first draws the rows that sequences are of, so overlap, min_steps and priority_exponent would be "
                "ignored; leave them out, or leave first out"
            )
        self.min_steps: int = least
        self.max_share: float = checked_share("max_share", max_share)
        options = (priority_exponent, importance_exponent, priority_offset)
        super().__init__(first, lambda derived: SequenceStarts(*options, derived), seed)
        self._starts: SequenceStarts | None = self.first if isinstance(self.first, SequenceStarts) else None
        self.followed: FollowedEpisodes = FollowedEpisodes(done_key, check_continuity)
        self._forget_rows()

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws ``batch_size`` sequences, int64 ``[B, T]``, with their mask and the columns that ``first`` returns."""
        if not len(storage):
            raise empty_storage()
        device = device_of(storage) or torch.device("cpu")
        if not self._is_attached:
            self._attach_storage(storage, torch.zeros(0, dtype=torch.int64, device=device))
        links, starts = self.followed.links_on(device), self._starts
        if starts is not None and not (self._has_drawn and device.type != "cpu") and not starts.has_any():
            raise self._nothing_to_draw(len(storage))
        self._has_drawn = True  # from now on draws need not wait for a GPU
        index, info = self.first.sample(storage, batch_size)
        index = index.to(device)
        slots, steps = links.chain(index, self.sequence_length) if starts is not None else self._around(index, storage)
        columns = {name: column.to(device).unsqueeze(1).repeat(1, slots.shape[1]) for name, column in info.items()}
        step = torch.arange(slots.shape[1], device=device)
        return slots, {"mask": step < steps.unsqueeze(1), **columns}

    def _around(self, rows: Tensor, storage: Storage) -> tuple[Tensor, Tensor]:
        # The sequences in which these rows are the first to be learned from, or later where the episode ends.
        links, length = self.followed.links_on(rows.device), self.sequence_length
        _, ahead = links.chain(rows, length - self.burn_in)
        begin, place = links.back(rows, length - ahead)
        slots, steps = links.chain(begin, length)
        is_held = occupancy_of(storage).held(slots)
        if is_held is None:
            return slots, steps
        # Of tables: rows before or after that no table refers to any more are left out.
        step, place = torch.arange(length, device=rows.device), place.unsqueeze(1)
        first = torch.where(~is_held & (step < place), step + 1, 0).amax(1)
        steps = torch.minimum(steps, torch.where(~is_held & (step > place), step, length).amin(1)) - first
        return slots.gather(1, first.unsqueeze(1) + torch.minimum(step, steps.unsqueeze(1) - 1)), steps

    def feedback_of_rows(
        self, index: Tensor, td_error: Tensor | None, generation: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns first rows and priorities of sequences, ``[B]`` each, or rows and errors of their steps, ``[n]``."""
        length = self.sequence_length
        if index.ndim != 2 or index.shape[1] != length or td_error is None or td_error.numel() != index.numel():
            given = None if td_error is None else list(td_error.shape)
            raise ValueError(
                f"index is {list(index.shape)} and td_error {given}; sequences of {length} steps take both as "
                f"[B, {length}], a TD error for each step. What it is in padding and burn-in does not matter. No "
                "priority was changed"
            )
        td_error = td_error.reshape(index.shape).to(index.device)
        counts = torch.ones_like(index, dtype=torch.bool)
        counts[:, 1:] = index[:, 1:] != index[:, :-1]  # padding repeats the last row
        counts[:, : self.burn_in] = False
        if self._starts is not None:
            priority = sequence_priorities(td_error.float(), counts, self.max_share)
            return index[:, 0], priority, None if generation is None else generation[:, 0]
        return index[counts], td_error[counts], None if generation is None else generation.to(index.device)[counts]

    def check_rows(self, rows: TensorDictBase) -> None:
        super().check_rows(rows)
        self.followed.check_rows(rows, type(self).__name__, "sequences of steps")

    def on_insert(self, index: Tensor, storage: Storage) -> None:
        device = device_of(storage) or index.device
        index = index.to(device)
        running, broken = index[:0], index[:0]
        if self.followed.links is not None:
            links = self.followed.links_on(device)
            running, broken = links.running_slots(), _before(links, index)
        self.followed.write(index, storage)
        if self._starts is not None:
            links = self.followed.links_on(device)
            if not len(self._position):
                self._position = np.zeros(storage.max_size, dtype=np.int32)
                self._starts._attach_storage(storage)
            slots = index.cpu().numpy()
            kernels.number(links.predecessors(index).cpu().numpy(), slots, self._position)
            self._starts.on_evict(index)
            first = self._position[slots].astype(np.int64) - (self.sequence_length - 1)
            complete = slots[(first >= 0) & (first % self._distance == 0)]
            self._begin(complete, np.full(len(complete), self.sequence_length - 1), links)
            self._end(torch.cat((running, broken, index)), links)
        self.followed.warn()

    def on_evict(self, index: Tensor) -> None:
        declared_sampler(self.first).on_evict(index)
        if self.followed.links is not None:
            links = self.followed.links_on(index.device)
            broken = _before(links, index)
            links.release(index)
            self._end(broken, links)

    def cut(self, index: Tensor, trajectories: Iterable[int | None] = ()) -> None:
        declared_sampler(self.first).cut(index, trajectories)
        if self.followed.links is not None:
            links = self.followed.links_on(index.device)
            running = links.running_slots()
            self.followed.cut(index, trajectories)
            self._end(torch.cat((running, index)), links)

    def _end(self, slots: Tensor, links: EpisodeLinks) -> None:
        # The last sequence of each episode that none of these rows will go on with, and those that got too short.
        ended = links.ended(slots)
        if self._starts is None or not len(ended):
            return
        last = ended.cpu().numpy()
        position = self._position[last].astype(np.int64)
        self._longest_ended = max(self._longest_ended, int(position.max()) + 1)
        # It brings a step that the one before it has not, or is the first one.
        steps = np.where(
            position < self.sequence_length - 1, position, self.overlap + (position - self.overlap) % self._distance
        )
        long_enough = steps >= self.min_steps - 1
        self._begin(last[long_enough], steps[long_enough], links)
        if self.min_steps > 1:  # where a row in the middle left, and sequences before it end now
            back = torch.arange(self.min_steps - 1, device=ended.device)
            too_short, gone = links.back(ended.repeat_interleave(len(back)), back.repeat(len(ended)))
            self._starts.on_evict(too_short[gone == back.repeat(len(ended))])

    def _begin(self, last: np.ndarray, steps: np.ndarray, links: EpisodeLinks) -> None:
        # Sequences by their last rows, and how many steps before these they begin, if that row is still stored.
        if self._starts is not None and len(last):
            device = links.successor.device
            wanted = torch.from_numpy(steps).to(device)
            first, gone = links.back(torch.from_numpy(last).to(device), wanted)
            self._starts.begin(first[gone == wanted])

    @property
    def _distance(self) -> int:
        return self.sequence_length - self.overlap  # between the first steps of neighbouring sequences

    def _nothing_to_draw(self, stored: int) -> Exception:
        length, least, longest = self.sequence_length, self.min_steps, self._longest_ended
        if not longest:
            return RuntimeError(
                f"no sequence of {length} steps is complete among the {stored} stored rows, and no episode has ended. "
                "Store more rows before the first draw (warmup_steps), or build the sampler with a smaller length"
            )
        if longest < least:
            return ValueError(
                f"no sequence of {least} steps or more among the {stored} stored rows: the longest episode that ended "
                f"had {longest}. Build SequenceSampler with min_steps, burn_in + 1 by default, of at most {longest}"
            )
        assert self._starts is not None
        if self._starts.uses_priorities and not self._starts.priority_offset:
            return self._starts._without_mass(stored)
        return RuntimeError(
            f"no sequence begins among the {stored} stored rows: the first rows of all have left, or no later one is "
            f"complete. Raise the capacity to several times length = {length} for each environment"
        )

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.followed.nbytes + self._position.nbytes

    def state_dict(self) -> dict[str, Any]:
        shape = [self.sequence_length, self.overlap, self.burn_in, self.min_steps]
        learned = {
            "position": torch.from_numpy(self._position.copy()),
            "longest_ended": self._longest_ended,
            "length, overlap, burn_in, min_steps": shape,
        }
        return super().state_dict() | {"learned": learned | self.followed.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        learned, shape = state_dict["learned"], "length, overlap, burn_in, min_steps"
        own = [self.sequence_length, self.overlap, self.burn_in, self.min_steps]
        if learned[shape] != own:
            raise ValueError(
                f"the saved sampler has {shape} = {learned[shape]} and this one {own}; build it with the saved ones. "
                "Nothing was loaded"
            )
        super().load_state_dict(state_dict)
        self.followed.load_state_dict(learned)
        self._position = learned["position"].cpu().numpy().copy()
        self._longest_ended, self._has_drawn = learned["longest_ended"], False

    def _empty(self) -> None:
        super()._empty()
        self._forget_rows()

    def _forget_rows(self) -> None:
        self.followed.links = None
        self._position, self._longest_ended, self._has_drawn = np.zeros(0, dtype=np.int32), 0, False

    def __repr__(self) -> str:
        steps = f"length={self.sequence_length}, overlap={self.overlap}, burn_in={self.burn_in}"
        return f"SequenceSampler({steps}, first={self.first!r})"


def _before(links: EpisodeLinks, index: Tensor) -> Tensor:
    """Returns the rows whose next step is in one of these slots, int64 ``[n]``, unless they are in one themselves."""
    before = links.predecessors(index)
    return before[(before >= 0) & ~torch.isin(before, index)]
