# SPDX-License-Identifier: Apache-2.0
"""Episodes of a storage: links updated from its columns, and n-step rows drawn along them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes.links import TRAJECTORY_KEYS, Continuity, EpisodeLinks, trajectory_name, trajectory_of
from lightning_replay.episodes.n_step import bootstrap_discounts, n_step_returns, refuse_formed
from lightning_replay.storage.access import device_of, occupancy_of, read_columns, stored_before
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.validation import checked_count, checked_flag, checked_share


def read_trajectory(storage: Storage, index: Tensor) -> Tensor | None:
    """Returns the running episode of each stored row, int64 ``[N]``; ``None`` when the rows name none."""
    if isinstance(storage, PackedStorage):
        key = next((key for key in TRAJECTORY_KEYS if storage.has_column(key)), None)
        trajectory = None if key is None else storage.column(key, index)
        return None if trajectory is None else trajectory.flatten()
    trajectory = trajectory_of(storage.get(slice(0, len(storage))))
    return None if trajectory is None else trajectory[index].flatten()


def require_columns(rows: TensorDictBase, purpose: str) -> None:
    """Raises ``ValueError`` for rows ``[N]`` without one reward, terminated and done each; ``purpose`` needs them."""
    for name in ("reward", "terminated", "done"):
        require_one_each(rows, ("next", name), purpose, is_flag=name != "reward")
    trajectory = trajectory_of(rows)
    if trajectory is not None and trajectory.numel() != rows.shape[0]:
        raise ValueError(
            f"the column {trajectory_name(rows)} has the shape {list(trajectory.shape)} for {rows.shape[0]} rows, and "
            f"{purpose} need the episode of each row, int64 [{rows.shape[0]}]. Nothing was stored"
        )


def require_one_each(rows: TensorDictBase, key: NestedKey, purpose: str, *, is_flag: bool) -> None:
    """Raises ``ValueError`` for rows ``[N]`` without one number, or one flag, for each row under ``key``."""
    column, count = rows.get(key, None), rows.shape[0]
    if column is None:
        raise ValueError(
            f"the transitions have no {key!r}, which {purpose} need; nothing was stored. "
            "Store reward, terminated, truncated and done under 'next' of every transition"
        )
    wrong_dtype = (column.dtype == torch.bool) != is_flag or column.is_complex()
    if column.numel() != count or wrong_dtype:
        kind = "bool" if is_flag else "a number"
        raise ValueError(
            f"{key!r} is {column.dtype} {list(column.shape)}, and {purpose} need {kind} for each row, [{count}] or "
            f"[{count}, 1]; nothing was stored"
        )


class EpisodeTracker:
    """Follows the episodes in a storage and turns drawn rows into n-step rows.

    Call :meth:`mark_update` after every write. A return never crosses an episode end, the newest row, another
    trajectory or a row that was overwritten, nor a row that starts with another observation than the row before ended
    with; it is shortened there. Sutton and Barto, section 7.1.

    Args:
        n_steps: rewards summed into one return.
        discount: γ per environment step.
        check_continuity: whether observations are compared, see :class:`~lightning_replay.episodes.links.Continuity`.
    """

    def __init__(self, n_steps: int, discount: float, check_continuity: bool = True) -> None:
        self.n_steps: int = checked_count("n_steps", n_steps, of="rewards in a return")
        self.discount: float = checked_share("discount", discount)
        self.check_continuity: bool = checked_flag("check_continuity", check_continuity)
        self.links: EpisodeLinks | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.links is None else self.links.nbytes

    def check_rows(self, rows: TensorDictBase) -> None:
        """Refuses first rows ``[N]`` without the columns of a return, or whose rewards are returns already.

        Later rows have the columns of the first.
        """
        if self.links is None:
            refuse_formed(rows, self.n_steps)
            require_columns(rows, f"returns over {self.n_steps} steps")

    def mark_update(self, index: Tensor, storage: Storage) -> None:
        """Links the rows just written into the slots ``index``, int64 ``[N]`` in insertion order.

        The first call also links rows that were stored before, in the order of their slots.
        """
        if self.links is None:
            self.links = self._new_links(storage)
            index = torch.cat((stored_before(storage, index), index))
        (done,) = read_columns(storage, index, [("next", "done")])
        self.links.write(index, read_trajectory(storage, index), done.flatten())

    def _new_links(self, storage: Storage) -> EpisodeLinks:
        continuity = Continuity(storage) if self.check_continuity else None
        return EpisodeLinks(storage.max_size, device=device_of(storage) or "cpu", continuity=continuity)

    def warn(self) -> None:
        """Warns once where most rows do not continue the row before them, once all parts have the new rows."""
        if self.links is not None and self.links.continuity is not None:
            self.links.continuity.warn()

    def draw(self, data: TensorDictBase, index: Tensor, storage: Storage) -> TensorDictBase:
        """Turns the rows drawn at ``index`` into n-step rows.

        Args:
            data: TensorDict of the shape of ``index``, ``[B]`` or ``[B, 2]``.

        Returns:
            ``data`` with ``next`` taken from the last step, the summed ``("next", "reward")``, ``discount``
            float32 ``[..., 1]`` (``discount**steps``, 0 where terminated) and ``steps_to_next_obs`` int64 ``[..., 1]``.
        """
        slots, last, steps_used = self._chain(index, storage)
        shape = (*index.shape, 1)
        following = storage.get(last.view(index.shape)).get("next")
        if following.is_locked:  # TorchRL's memory-mapped rows
            following = following.copy()
        following.set("reward", self._summed(slots, steps_used, storage).view(shape))
        data.set("next", following)
        remaining = bootstrap_discounts(steps_used, following.get("terminated").flatten(), self.discount)
        data.set("discount", remaining.to(torch.float32).view(shape))
        data.set("steps_to_next_obs", steps_used.view(shape))
        return data

    def returns(self, index: Tensor, storage: Storage) -> Tensor:
        """Returns the sums ``[N]`` over up to :attr:`n_steps` rewards from the rows ``index`` on, int64 ``[N]``."""
        slots, _, steps_used = EpisodeTracker._chain(self, index, storage)  # a subclass may draw the lengths
        return self._summed(slots, steps_used, storage)

    def _chain(self, index: Tensor, storage: Storage) -> tuple[Tensor, Tensor, Tensor]:
        """Slots along each return, int64 ``[N, n_steps]``, the last one used and how many are, int64 ``[N]``."""
        if self.links is None:  # rows were stored before the tracker came
            self.mark_update(occupancy_of(storage).slots().to(index.device), storage)
        assert self.links is not None
        slots, steps_used = self.links.chain(index.flatten(), self.n_steps)
        return slots, slots[:, -1], steps_used

    def _summed(self, slots: Tensor, steps_used: Tensor, storage: Storage) -> Tensor:
        """Returns discounted sums ``[N]`` of the first ``steps_used`` rewards in ``slots``, int64 ``[N, n]``."""
        (reward,) = read_columns(storage, slots.flatten(), [("next", "reward")])
        return n_step_returns(reward.reshape(slots.shape), steps_used, self.discount)

    def cut(self, index: Tensor) -> None:
        if self.links is not None:
            self.links.cut(index)

    def break_episodes(self, trajectories: Iterable[int | None]) -> None:
        if self.links is not None:
            self.links.break_episodes(trajectories)

    def on_evict(self, index: Tensor) -> None:
        """Unlinks rows that left without being overwritten, int64 ``[n]``: no return goes through them."""
        if self.links is not None:
            self.links.release(index)

    def clear(self) -> None:
        self.links = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the links."""
        return {"links": None if self.links is None else self.links.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], storage: Storage) -> None:
        self.links = None
        if state_dict["links"] is not None:
            self.links = self._new_links(storage)
            self.links.load_state_dict(state_dict["links"])
