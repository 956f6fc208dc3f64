# SPDX-License-Identifier: Apache-2.0
"""Draws sequences of steps along episodes, for recurrent agents and world models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from lightning_replay.ages import Age
from lightning_replay.deferred_checks import DeferredChecks
from lightning_replay.episodes import kernels
from lightning_replay.episodes.running import FollowedEpisodes
from lightning_replay.options import checked_count, checked_share
from lightning_replay.samplers.distinct import checked_replace
from lightning_replay.samplers.pairs import FollowsEpisodes, SamplerWrapper, check_capacities
from lightning_replay.samplers.sequence_starts import DeviceStarts, SequenceStarts
from lightning_replay.saving.spec import rebuildable
from lightning_replay.schedules import Schedule
from lightning_replay.storage.packed import empty_storage, occupancy_of

# The value of η in R2D2.
MAX_SHARE = 0.9


def sequence_priorities(td_error: Tensor, counts: Tensor, max_share: float = MAX_SHARE) -> Tensor:
    """Computes ``η max|δ| + (1 - η) mean|δ|`` over the steps that count of each sequence.

    R2D2, Kapturowski et al. 2019, section 2.3, https://openreview.net/forum?id=r1lyTjAqYX. Errors and ``counts``, bool,
    are ``[B, T]``, and the result ``[B]``. The value of an error that does not count does not matter, not even NaN.

    Example:
        >>> sequence_priorities(torch.tensor([[-4.0, 2.0, torch.nan]]), torch.tensor([[True, True, False]]))
        tensor([3.9000])
    """
    magnitude = torch.where(counts, td_error.abs(), 0)
    mean = magnitude.sum(1) / counts.sum(1).clamp(min=1)
    return max_share * magnitude.amax(1) + (1 - max_share) * mean


@rebuildable
class SequenceSampler(FollowsEpisodes, SamplerWrapper):
    """Draws sequences of ``length`` consecutive steps of an episode, a batch ``[B, T]``.

    Sequences begin with the first step of an episode and every ``length - overlap`` steps after it. One can be drawn
    once all its steps are stored, or the episode has ended, and until a row of it leaves. The last one of an episode
    is padded with its last row, and ``mask`` is false there. None goes over the end of an episode or a gap. Rows of
    several environments need ``trajectory`` (or ``("collector", "traj_ids")``) and may be interleaved in any way.

    ::

        steps of an episode      0 1 2 3 4 5 6 7 8      length 4, overlap 2
        sequences                0 1 2 3
                                     2 3 4 5
                                         4 5 6 7
                                             6 7 8 8    mask 1 1 1 0

    All are equally likely, or drawn by priority as in R2D2, Kapturowski et al. 2019,
    https://openreview.net/forum?id=r1lyTjAqYX (``overlap=length // 2``, α = 0.9, β = 0.6). ``Replay.update_priority``
    takes TD errors ``[B, T]`` and makes one priority of each sequence, see :func:`sequence_priorities`, without the
    errors of padding and burn-in. From the first ``burn_in`` steps nothing is learned: they bring the recurrent state
    up to date, which is stored with each step as an ordinary column. A draw costs the same whatever the capacity.

    If ``base_sampler`` is given, such as :class:`~lightning_replay.samplers.tables.TableShares`, it draws rows. With
    each row comes the sequence in which it is the first one that is learned from, or a later one if the episode ends
    within it. TD errors become priorities of single rows then, as far as ``base_sampler`` has any.

    If a ``device`` is given, sequences are drawn on it, and no call waits for it after the first draw. All sequences
    are equally likely then.

    Args:
        length: Number T of steps of a sequence, with the burn-in.
        overlap: Number of steps that neighboring sequences of an episode share.
        burn_in: Number of steps at the beginning from which nothing is learned.
        base_sampler: Sampler of rows in place of the priorities of sequences.
        min_steps: Fewest steps of a sequence. The default is ``burn_in + 1``. With ``length`` only whole sequences are
            drawn.
        priority_exponent, importance_exponent, priority_offset, seed: as :class:`PrioritizedSampler`.
        max_share: Share η of the maximum in the priority of a sequence.
        done_key, check_continuity: as in :class:`ContinuousTransitionSampler`.
        device: Device of the rows, on which sequences are drawn. By default they are drawn on the CPU.
        age: :class:`~lightning_replay.Age`, or a mapping of its options, by which sequences become less likely as they
            age. A sequence is born at the end of the insertion that completes it.
        replace: Whether a batch may contain a sequence several times, as :class:`PrioritizedSampler`. Sequences that
            overlap still share rows. A ``base_sampler`` has its own option.

    Sampled keys:
        index, generation: int64 ``[B, T]``.
        mask: bool ``[B, T]``, true if the step exists.
        priority_weight: float32 ``[B, T]``, that of the sequence, with a ``priority_exponent``.

    Raises:
        ValueError: at the draw, when all episodes that ended are shorter than ``min_steps``.
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
        (tensor([[2, 3, 4, 5],
                [6, 7, 8, 8]]), tensor([4, 3]))
    """

    saved_attributes: tuple[str, ...] = ("_position", "_longest_ended")
    stored_options: tuple[str, ...] = (*FollowsEpisodes.stored_options, "overlap", "min_steps")
    _purpose = "sequences of steps"
    _shown = ("sequence_length", "overlap", "burn_in")

    def __init__(
        self,
        length: int,
        overlap: int = 0,
        burn_in: int = 0,
        base_sampler: Sampler | None = None,
        min_steps: int | None = None,
        priority_exponent: float = 0.0,
        importance_exponent: float | Schedule = 0.4,
        priority_offset: float = 1e-6,
        max_share: float = MAX_SHARE,
        done_key: NestedKey = ("next", "done"),
        check_continuity: bool = True,
        seed: int | None = None,
        device: str | torch.device | None = None,
        age: Age | Mapping[str, Any] | None = None,
        replace: bool = True,
    ) -> None:
        self.replace: bool = checked_replace(replace, device)
        self.sequence_length: int = checked_count("length", length, of="steps")
        self.overlap: int = checked_count("overlap", overlap, 0, of="steps")
        self.burn_in: int = checked_count("burn_in", burn_in, 0, of="steps")
        for name, steps in (("overlap", overlap), ("burn_in", burn_in)):
            if steps >= length:
                raise ValueError(f"{name} is {steps} and length is {length}; give {name} of at most {length - 1}")
        least = burn_in + 1 if min_steps is None else checked_count("min_steps", min_steps, of="steps")
        if not burn_in < least <= length:
            raise ValueError(f"min_steps is {least}; it must be from burn_in + 1 = {burn_in + 1} to length = {length}")
        ordered = overlap or priority_exponent or min_steps is not None or age is not None
        if base_sampler is not None and (ordered or not replace):
            raise ValueError(
                "base_sampler draws the rows; leave out base_sampler, or overlap, min_steps, priority_exponent, age, "
                "and replace"
            )
        self.min_steps: int = least
        self.max_share: float = checked_share("max_share", max_share)
        self.followed: FollowedEpisodes = FollowedEpisodes(done_key, check_continuity, device, counts_steps=True)
        there = self.followed.device
        self.draw_device: torch.device | None = there
        if there is not None and (base_sampler is not None or priority_exponent or age is not None):
            raise ValueError(
                f"SequenceSampler got device={str(device)!r} with a base_sampler, a priority_exponent, or an age; "
                "sequences drawn on a device are all equally likely. Leave these out, or device"
            )

        exponents = (priority_exponent, importance_exponent, priority_offset)

        def starts(seed: int) -> Sampler:
            if there is None:
                return SequenceStarts(1, *exponents, seed=seed, age=age, replace=replace)
            return DeviceStarts(length, overlap, least, there, seed)

        super().__init__(base_sampler, starts, seed)
        self._forget()

    def _forget(self) -> None:
        # The number of earlier steps of its episode, for each row.
        self._position = np.zeros(0, dtype=np.int32)
        # The number of steps of the longest episode that ended.
        self._longest_ended = 0

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws ``batch_size`` sequences, int64 ``[B, T]``, with their mask and the columns of ``base_sampler``."""
        if not len(storage):
            raise empty_storage()
        if not self._is_attached:
            self._attach_storage(storage, torch.zeros(0, dtype=torch.int64, device="cpu"))
        sampler = self.base_sampler
        if self.awaits_rows(storage):
            raise self._nothing_to_draw(len(storage))
        index, info = sampler.sample(storage, batch_size)
        links = self.followed.links
        length = self.sequence_length
        # A loaded state may be of another capacity, and compiled loops check no bounds.
        check_capacities(links.capacity, storage.max_size)
        if isinstance(sampler, SequenceStarts | DeviceStarts):
            slots, steps = links.chain(index, length)
        else:
            slots, steps = self._sequences_around(index, storage)
        if isinstance(sampler, DeviceStarts):  # Since the last read, all sequences may have left.
            steps = torch.where(sampler.number() > 0, steps, 0)
        columns = {name: column.unsqueeze(1).repeat(1, length) for name, column in info.items()}
        return slots, {"mask": torch.arange(length, device=slots.device) < steps.unsqueeze(1), **columns}

    def defer_reads(self, checks: DeferredChecks) -> None:
        """Has the number of sequences read with the refusals, and what the links need.

        :meta private:
        """
        assert isinstance(self.base_sampler, DeviceStarts)
        checks.register(self.base_sampler.number, self.base_sampler.receive)
        self.followed.defer_reads(checks)

    def awaits_rows(self, storage: Storage) -> bool:
        """Returns whether no sequence of the stored rows is complete.

        :meta private:
        """
        sampler = self.base_sampler
        if isinstance(sampler, DeviceStarts):
            return self._is_attached and not sampler.has_sequences()
        return isinstance(sampler, SequenceStarts) and self._is_attached and not sampler._tree.has_mass()

    def _sequences_around(self, rows: Tensor, storage: Storage) -> tuple[Tensor, Tensor]:
        """Returns the slots ``[B, T]`` of a sequence for each drawn row, and how many of its steps exist, ``[B]``."""
        # Length 6 and burn-in 2. The drawn row d follows the burn-in steps b, or more steps if the episode ends soon:
        #
        #     steps of an episode    0 1 2 3 4 5 6 7 8 9
        #     drawn row 3              b b d . . .          ahead = 4 steps from d on, begin = 1, place of d = 2
        #     drawn row 8                    b b . . d .    ahead = 2 steps from d on, begin = 4, place of d = 4
        links = self.followed.links
        length = self.sequence_length
        _, ahead = links.chain(rows, length - self.burn_in)
        begin, place = links.walk(rows, length - ahead, back=True)
        slots, steps = links.chain(begin, length)
        is_held = occupancy_of(storage).held(slots)
        if is_held is None:
            return slots, steps
        # Rows that no table refers to are left out.
        step = torch.arange(length, device="cpu")
        place = place.unsqueeze(1)
        first = torch.where(~is_held & (step < place), step + 1, 0).amax(1)
        steps = torch.minimum(steps, torch.where(~is_held & (step > place), step, length).amin(1)) - first
        return slots.gather(1, first.unsqueeze(1) + torch.minimum(step, steps.unsqueeze(1) - 1)), steps

    def feedback_of_rows(
        self, index: Tensor, td_error: Tensor | None, generation: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns first rows and priorities of sequences, ``[B]`` each, or rows and errors of their steps, ``[n]``.

        :meta private:
        """
        length = self.sequence_length
        if index.ndim != 2 or index.shape[1] != length or td_error is None or td_error.numel() != index.numel():
            given = None if td_error is None else list(td_error.shape)
            raise ValueError(
                f"index is {list(index.shape)} and td_error {given}; sequences of {length} steps take both as "
                f"[B, {length}], a TD error for each step, also in padding and burn-in. No priority was changed"
            )
        td_error = td_error.reshape(index.shape)
        counts = torch.ones_like(index, dtype=torch.bool)
        # Padding repeats the last row.
        counts[:, 1:] = index[:, 1:] != index[:, :-1]
        counts[:, : self.burn_in] = False
        if not isinstance(self.base_sampler, SequenceStarts):
            return index[counts], td_error[counts], None if generation is None else generation[counts]
        priority = sequence_priorities(td_error.float(), counts, self.max_share)
        return index[:, 0], priority, None if generation is None else generation[:, 0]

    def on_insert(self, index: Tensor, storage: Storage) -> None:
        """Links new rows to their episodes and makes the sequences that they complete available.

        :meta private:
        """
        self._leave(index)
        sampler = self.base_sampler
        self.followed.mark_update(index, storage)
        if isinstance(sampler, SequenceStarts):
            if len(self._position) != storage.max_size:
                self._position = np.zeros(storage.max_size, dtype=np.int32)
                sampler._attach_storage(storage)
            links = self.followed.links
            stride = self.sequence_length - self.overlap
            new = index.numpy()
            is_complete = kernels.number(links.before(index), new, self._position, self.sequence_length, stride)
            ended = links.ended(np.concatenate((links.stopped, new)) if len(links.stopped) else new)
            # Most single rows complete no sequence.
            if is_complete or len(ended):
                self._add_sequences(new, ended)
        self._update_starts()
        self.followed.warn()

    def _update_starts(self) -> None:
        if isinstance(self.base_sampler, DeviceStarts) and self.followed.links is not None:
            self.base_sampler.update(self.followed.links)

    def on_evict(self, index: Tensor) -> None:
        """Removes the sequences that evicted rows belong to."""
        self._leave(index)
        super().on_evict(index)
        self._update_starts()

    def end_episodes(self, slots: Tensor, trajectories: Iterable[int | None] = ()) -> None:
        """Ends episodes and makes their last sequences available, padded to ``length``."""
        draws_starts = isinstance(self.base_sampler, SequenceStarts) and self.followed.links is not None
        running = self.followed.links.running if draws_starts else np.zeros(0, dtype=np.int64)
        super().end_episodes(slots, trajectories)
        if draws_starts:
            self._add_sequences(slots.numpy()[:0], self.followed.links.ended(np.concatenate((running, slots.numpy()))))
        self._update_starts()

    def _leave(self, index: Tensor) -> None:
        # A sequence leaves with the first of its rows.
        sampler = self.base_sampler
        links = self.followed.links
        if not isinstance(sampler, SequenceStarts) or links is None:
            return
        sampler.on_evict(index)
        before = links.before(index)
        # In a ring the rows before these have left already.
        if before.max(initial=-1) >= 0:
            stays = np.setdiff1d(before[before >= 0], index.numpy())
            steps = np.arange(self.sequence_length - 1)
            sampler.on_evict(self._back(stays.repeat(len(steps)), np.tile(steps, len(stays))))

    def _add_sequences(self, new: np.ndarray, ended: np.ndarray) -> None:
        """Lets the sequences be drawn that new rows complete, and the last one of each episode that ended."""
        # Length 4 and overlap 2, so that a sequence begins every 2 steps. Each number is the position of a last row:
        #
        #     steps of an episode    0 1 2 3 4 5 6 7 8
        #     position 5, new            2 3 4 5            complete, begins 3 steps before
        #     position 6, new                4 5 6          2 steps before: not complete, waits for step 7
        #     position 8, ended                  6 7 8      2 steps before: the episode ended, from min_steps on
        assert isinstance(self.base_sampler, SequenceStarts)
        self._longest_ended = int((self._position[ended] + 1).max(initial=self._longest_ended))
        # One compiled loop takes a third of the time of NumPy's calls for 4,096 rows.
        starts = kernels.starts(
            self.followed.links.predecessor.numpy(),
            self._position,
            np.concatenate((new, ended)),
            len(new),
            self.sequence_length,
            self.overlap,
            self.min_steps,
        )
        if len(starts):
            self.base_sampler.begin(torch.from_numpy(starts))

    def _back(self, slots: np.ndarray, steps: np.ndarray) -> Tensor:
        # Rows that are no longer stored are left out.
        assert self.followed.links is not None
        wanted = torch.from_numpy(steps)
        found, gone = self.followed.links.walk(torch.from_numpy(slots), wanted, back=True)
        return found[gone == wanted]

    def _nothing_to_draw(self, stored: int) -> Exception:
        length = self.sequence_length
        starts: Any = self.base_sampler
        is_there = isinstance(starts, DeviceStarts)
        longest = starts.longest_ended(self.followed.links) if is_there else self._longest_ended
        if 0 < longest < self.min_steps:
            return ValueError(
                f"no sequence of {self.min_steps} steps or more among the {stored} stored rows: the longest episode "
                f"that ended had {longest}. Build the sampler with min_steps, or burn_in + 1, of at most {longest}"
            )
        if starts.uses_priorities and not starts.priority_offset and longest:
            return starts._without_mass(stored)
        return RuntimeError(
            f"no sequence of {length} steps is complete among the {stored} stored rows. Store more before the first "
            "draw (warmup_steps), or give a smaller length, or a capacity of several lengths for each environment"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the sampler. On a device, the state is the same as on the CPU."""
        state = super().state_dict()
        links = self.followed.links
        starts = self.base_sampler
        if isinstance(starts, DeviceStarts) and links is not None:
            state["position"] = links.position.cpu().clamp(min=0).int()
            state["longest_ended"] = starts.longest_ended(links)
        return state

    @property
    def nbytes(self) -> int:
        """Size of the base sampler, the episode links, and the step positions in bytes."""
        return super().nbytes + self._position.nbytes

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a saved state. Raises ``ValueError`` if its parts differ in their number of slots."""
        links = state_dict["learned"]["links"]
        draws_starts = isinstance(self.base_sampler, SequenceStarts | DeviceStarts)
        if draws_starts and links is not None:
            leaves = state_dict["base_sampler"]["tree"]["leaves"]
            check_capacities(len(links["successor"]), len(leaves), len(state_dict["position"]))
        super().load_state_dict(state_dict)
        if draws_starts and links is not None and self.followed.device is not None:
            self.followed.links.restore_position(torch.as_tensor(state_dict["position"], device="cpu"), leaves > 0)
            self._update_starts()
