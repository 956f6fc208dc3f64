# SPDX-License-Identifier: Apache-2.0
"""Returns over several steps: formed at the draw along stored rows, or before transitions are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes.links import Continuity, EpisodeLinks, trajectory_of
from lightning_replay.episodes.running import FollowedEpisodes, require_columns
from lightning_replay.options import checked_count, checked_flag, checked_share
from lightning_replay.parts import ReplayTransform
from lightning_replay.saving.spec import rebuildable
from lightning_replay.storage.packed import read_columns

_MOST_RUNNING = 1_024  # episodes whose steps wait, or twice the rows of a call
_Column = tuple[str, str, str]  # name, dtype and shape of a column
# Columns of rows whose rewards are returns, as this library, TorchRL's transform and its collectors' MultiStep have.
FORMED_KEYS = ("steps_to_next_obs", ("next", "original_reward"))


def refuse_formed(rows: TensorDictBase, n_steps: int) -> None:
    """Raises ``ValueError`` for rows whose rewards are returns already, if ``n_steps`` is above 1."""
    found = next((key for key in FORMED_KEYS if rows.get(key, None) is not None), None)
    if n_steps > 1 and found is not None:
        raise ValueError(
            f"the rewards of the transitions are returns over several steps already, as their column {found!r} shows, "
            f"and returns over n_steps={n_steps} would sum them again; nothing was stored. Form returns once: store "
            "single steps, without MultiStep or another n-step transform, or build the buffer with n_steps=1"
        )


def n_step_returns(reward: Tensor, steps_used: Tensor, discount: float) -> Tensor:
    """Computes ``sum(discount**t * reward[:, t] for t < steps_used)`` of rewards ``[B, n]`` along a chain of links.

    Rewards after ``steps_used``, int64 ``[B]`` from 1 to n, are ignored. The result ``[B]`` has the dtype of the
    rewards, or float32 for integers and for floats of fewer bits, in which a sum may be infinite.
    """
    if not reward.is_floating_point() or reward.itemsize < torch.float32.itemsize:
        reward = reward.to(torch.float32)  # powers of a discount below 1 are no integers
    step = torch.arange(reward.shape[1], device=reward.device)
    factors = _powers(discount, len(step), reward.dtype, reward.device)
    # A product with 0 would keep NaN, which the ignored rewards may be.
    return torch.where(step < steps_used.unsqueeze(1), reward * factors, 0).sum(1)


def _powers(discount: float, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.tensor([discount**power for power in range(count)], dtype=dtype, device=device)
    # A copy to another device would wait for it.
    step = torch.arange(count, device=device)
    return torch.full((count,), discount, dtype=torch.float64, device=device).pow(step).to(dtype)


def bootstrap_discounts(steps_used: Tensor, terminated: Tensor, discount: float) -> Tensor:
    """Computes ``discount**steps_used``, or 0 if the last step used terminated, float64 ``[B]``."""
    factors = torch.pow(torch.full((), discount, dtype=torch.float64, device=steps_used.device), steps_used)
    return factors.masked_fill(terminated, 0.0)


class EpisodeTracker(FollowedEpisodes):
    """Follows the episodes in a storage and turns drawn rows into n-step rows.

    A return never crosses an episode end, the newest row, another trajectory, or a row that was overwritten. It also
    ends before a row that starts with another observation than the row before ended with. Sutton and Barto, section
    7.1.

    Args:
        n_steps: Number of rewards in the longest return.
        discount: Discount γ.
        check_continuity: Whether observations are compared, see :class:`~lightning_replay.episodes.links.Continuity`.
        device: Device of rows, links, and drawn slots. ``None`` follows episodes on the CPU.
    """

    def __init__(
        self,
        n_steps: int,
        discount: float,
        check_continuity: bool = True,
        device: str | torch.device | None = None,
    ) -> None:
        self.n_steps: int = checked_count("n_steps", n_steps, of="rewards in a return")
        self.discount: float = checked_share("discount", discount)
        super().__init__(("next", "done"), check_continuity, device)

    def check_rows(self, rows: TensorDictBase) -> None:
        """Refuses first rows ``[N]`` without the columns of a return, or whose rewards are returns already."""
        if self.links is None:  # later rows have the columns of the first
            refuse_formed(rows, self.n_steps)
            purpose = f"returns over {self.n_steps} steps" if self.n_steps > 1 else "transforms that follow episodes"
            require_columns(rows, purpose)

    def draw(self, data: TensorDictBase, index: Tensor, storage: Storage) -> TensorDictBase:
        """Turns the rows ``data`` drawn at ``index``, ``[B]`` or ``[B, 2]``, into rows of several steps.

        ``next`` is that of the last step, and its reward is the sum. The columns are as in :class:`NStepTransitions`,
        ``[..., 1]``.
        """
        # The rows of a return are found when it is drawn, not when they are stored. Until its episode ends or has n
        # more rows, a return grows with every step.
        slots, last, steps_used = self._chain(index, storage)
        shape = (*index.shape, 1)
        # The state to bootstrap from is that after the last reward of the sum.
        following = storage.get(last.view(index.shape)).get("next")
        if following.is_locked:  # TorchRL's memory-mapped rows
            following = following.copy()
        steps_used = steps_used.to(following.get("reward").device, non_blocking=True)
        following.set("reward", self._summed(slots, steps_used, storage).view(shape))
        data.set("next", following)
        # Truncation does not count: there the value of the last state is still part of the return.
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
            self.mark_update(index.flatten()[:0], storage)
        slots, steps_used = self.links.chain(index.flatten(), self.n_steps)
        return slots, slots[:, -1], steps_used

    def _summed(self, slots: Tensor, steps_used: Tensor, storage: Storage) -> Tensor:
        (reward,) = read_columns(storage, slots.flatten(), [("next", "reward")])
        return n_step_returns(reward.reshape(slots.shape), steps_used.to(reward.device), self.discount)

    def load_state_dict(self, state_dict: Mapping[str, Any], storage: Storage) -> None:  # type: ignore[override]
        """Restores what :meth:`state_dict` returned, or raises ``ValueError`` for links of another number of slots."""
        slots = storage.max_size if state_dict["links"] is None else len(state_dict["links"]["successor"])
        if slots != storage.max_size:  # compiled loops check no bounds
            raise ValueError(f"links of {slots} slots are saved, of {storage.max_size} needed; give the saved capacity")
        super().load_state_dict(state_dict)


@rebuildable
class NStepTransitions(ReplayTransform):
    """Stores ``(s_t, a_t, sum of discount**i * r_{t+i} for i < n, s_{t+n})`` instead of single steps.

    A transition is formed n - 1 steps later, so ``extend`` may store fewer rows than it was given, or none. At the end
    of an episode the remaining ones are shorter. Everything under ``"next"`` but the reward is that of the last step:
    after truncation the bootstrap is from the last observation, after termination there is none. Rows of several
    running episodes may be interleaved (``trajectory`` or ``("collector", "traj_ids")``). Without these ids they are
    one environment in order. If more than 1,024 episodes run, and twice as many as a call has rows, the episodes
    continued longest ago are taken as broken off. No return goes on over a step that starts with another observation
    than the step before ended with. ``Replay(n_steps=...)`` forms the same transitions when they are drawn, without the
    delay. Use this transform in other buffers, or if stored rows must be final (retention by priority). Use ``extend``,
    not ``add``: one step may form several transitions.

    Args:
        n_steps: Number n of rewards in the longest return.
        discount: Discount γ.
        check_continuity: Whether observations are compared, see :class:`~lightning_replay.episodes.links.Continuity`.

    Stored keys:
        discount: float32 ``[N, 1]``, γ to the power of the steps used, 0 if the last one terminated.
        steps_to_next_obs: int64 ``[N, 1]``, the steps used, 1 to n.

    Example:
        >>> steps = TensorDict({"observation": torch.arange(3.0), "next": {
        ...     "observation": torch.arange(1.0, 4.0), "reward": torch.ones(3, 1),
        ...     "terminated": torch.zeros(3, 1, dtype=torch.bool), "done": torch.zeros(3, 1, dtype=torch.bool)}}, [3])
        >>> formed = NStepTransitions(n_steps=2, discount=0.5).inv(steps)
        >>> formed["next", "reward"].flatten(), formed["next", "observation"]
        (tensor([1.5000, 1.5000]), tensor([2., 3.]))
    """

    stored_options: tuple[str, ...] = ("n_steps", "discount", "check_continuity")

    def __init__(self, n_steps: int, discount: float, check_continuity: bool = True) -> None:
        super().__init__()
        self.n_steps: int = checked_count("n_steps", n_steps, of="rewards in a return")
        self.discount: float = checked_share("discount", discount)
        self.check_continuity: bool = checked_flag("check_continuity", check_continuity)
        # Waiting steps, and the columns of the first steps, which later ones must have too.
        self.pending: tuple[TensorDictBase | None, frozenset[_Column] | None] = (None, None)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the batch unchanged, because stored transitions are formed already."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        if tensordict.ndim != 1:
            raise ValueError(
                f"steps have batch size {list(tensordict.shape)}; give rows [N] in time order, one as step.unsqueeze(0)"
            )
        waiting, columns = self.pending
        if columns is None:
            refuse_formed(tensordict, self.n_steps)
        require_columns(tensordict, f"returns over {self.n_steps} steps")
        given = frozenset(
            (str(key), str(value.dtype), str(list(value.shape[1:]))) for key, value in tensordict.items(True, True)
        )
        if columns is not None and given != columns:
            raise ValueError(
                "steps must have the columns of the steps before; nothing was changed. "
                f"Different: given {sorted(given - columns)}, before {sorted(columns - given)}"
            )
        most_waiting = self.n_steps * max(_MOST_RUNNING, 2 * len(tensordict))
        if waiting is not None:  # Steps that were loaded from files are on the CPU.
            tensordict = torch.cat([waiting.to(tensordict.get(("next", "done")).device), tensordict])
        slots, steps_used, ended = self._chain(tensordict)
        complete = (steps_used == self.n_steps) | ended
        # The oldest of too many wait for steps that will not come: nothing marked the ends of their episodes.
        complete[(~complete).nonzero().flatten()[:-most_waiting]] = True
        formed = self._form(tensordict, complete, slots, steps_used, ended)
        waiting = tensordict[~complete]
        self.pending = waiting if len(waiting) else None, given
        return formed

    def form_pending(self, trajectories: Iterable[int] | None = None) -> TensorDictBase | None:
        """Forms the waiting transitions with fewer steps, because no further step comes. Returns ``None`` if none wait.

        They bootstrap from the last observation. :meth:`Replay.end_episodes <lightning_replay.Replay.end_episodes>`
        stores them. In other buffers, store them with ``buffer.writer.extend``, which does not apply the transform.

        Args:
            trajectories: Ids of the episodes that do not continue, or ``None`` for all.

        :meta private:
        """
        steps, columns = self.pending
        if steps is None:
            return None
        remaining = None
        if trajectories is not None:
            trajectory = trajectory_of(steps)
            if trajectory is None:
                raise ValueError("steps without trajectory ids are of one environment; end the episodes of all steps")
            named = torch.tensor(list(trajectories), dtype=torch.int64, device=trajectory.device)
            chosen = torch.isin(trajectory.reshape(-1), named)
            if not bool(chosen.any()):
                return None
            if not bool(chosen.all()):
                remaining = steps[~chosen]
            steps = steps[chosen]
        self.pending = remaining, columns
        slots, steps_used, ended = self._chain(steps)
        return self._form(steps, torch.ones_like(ended), slots, steps_used, ended)

    def clear(self) -> None:
        """Forgets the waiting steps and the known columns."""
        self.pending = None, None

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the waiting steps and the known columns. TorchRL saves them with the buffer."""
        waiting, columns = self.pending
        return {
            "length": 0 if waiting is None else len(waiting),
            "waiting": {} if waiting is None else waiting.to_dict(),
            "columns": None if columns is None else [list(column) for column in sorted(columns)],
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`get_extra_state` returned."""
        waiting = TensorDict(state["waiting"], [state["length"]]) if state["length"] else None
        given = state["columns"]
        self.pending = waiting, None if given is None else frozenset(tuple(column) for column in given)

    def _chain(self, steps: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the positions of each step's return ``[N, n]``, how many are used, and whether nothing follows it."""
        done = steps.get(("next", "done")).flatten()
        position = torch.arange(done.numel(), device="cpu")
        links = EpisodeLinks(done.numel(), Continuity(steps) if self.check_continuity else None)
        links.write(position, trajectory_of(steps), done)
        slots, steps_used = links.chain(position, self.n_steps)
        is_last = links.successor < 0
        is_last[torch.from_numpy(links.running)] = False
        return slots.to(done.device), steps_used.to(done.device), is_last[slots[:, -1]].to(done.device)

    def _form(
        self, steps: TensorDictBase, complete: Tensor, slots: Tensor, steps_used: Tensor, ended: Tensor
    ) -> TensorDictBase | None:
        if not bool(complete.any()):
            return None
        slots = slots[complete]
        steps_used = steps_used[complete]
        formed = steps[complete]
        following = steps.get("next")[slots[:, -1]]
        reward = steps.get(("next", "reward"))
        returns = n_step_returns(reward.flatten()[slots], steps_used, self.discount)
        following.set("reward", returns.reshape(-1, *reward.shape[1:]))
        remaining = bootstrap_discounts(steps_used, following.get("terminated").flatten(), self.discount)
        broke_off = ended[complete] & ~following.get("done").flatten()
        if bool(broke_off.any()):  # another episode follows: those who read the formed rows see an end here
            for name in {"truncated", "done"} & set(following.keys()):
                following.get(name)[broke_off] = True
        formed.set("next", following)
        formed.set("discount", remaining.float().unsqueeze(1))
        return formed.set("steps_to_next_obs", steps_used.unsqueeze(1))
