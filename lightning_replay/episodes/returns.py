# SPDX-License-Identifier: Apache-2.0
"""n-step transitions formed before they are stored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lightning_replay.episodes.links import Continuity, EpisodeLinks, trajectory_of
from lightning_replay.episodes.running import bootstrap_discounts, n_step_returns, refuse_formed, require_columns
from lightning_replay.options import checked_count, checked_flag, checked_share
from lightning_replay.parts import ReplayTransform
from lightning_replay.saving.spec import recorded

_Column = tuple[str, str, str]  # name, dtype and shape of a column


@recorded
class NStepTransitions(ReplayTransform):
    """Stores ``(s_t, a_t, sum of discount**i * r_{t+i} for i < n, s_{t+n})`` instead of single steps.

    A transition is formed n - 1 steps later, so ``extend`` may store fewer rows than it was given, or none; at the end
    of an episode the remaining ones are shorter. Everything under ``"next"`` but the reward is that of the last step:
    after truncation the bootstrap is from the last observation, after termination there is none. Rows of several
    running episodes may be interleaved (``trajectory`` or ``("collector", "traj_ids")``); without these ids they are
    one environment in order. No return goes on over a step that starts with another observation than the step before
    ended with. ``Replay(n_steps=...)`` forms the same transitions when they are drawn, without the delay;
    use this transform in other buffers, or where stored rows must be final (retention by priority). Use ``extend``,
    not ``add``: one step may form several transitions.

    Args:
        n_steps: n, longest return.
        discount: γ.
        check_continuity: whether observations are compared, see :class:`~lightning_replay.episodes.links.Continuity`.

    Stored keys:
        discount: float32 ``[N, 1]``, γ to the power of the steps used, 0 where the last one terminated.
        steps_to_next_obs: int64 ``[N, 1]``, the steps used, 1 to n.

    Example:
        >>> steps = TensorDict({"observation": torch.arange(3.0), "next": {
        ...     "observation": torch.arange(1.0, 4.0), "reward": torch.ones(3, 1),
        ...     "terminated": torch.zeros(3, 1, dtype=torch.bool), "done": torch.zeros(3, 1, dtype=torch.bool)}}, [3])
        >>> formed = NStepTransitions(n_steps=2, discount=0.5).inv(steps)
        >>> formed["next", "reward"].flatten(), formed["next", "observation"]
        (tensor([1.5000, 1.5000]), tensor([2., 3.]))
    """

    def __init__(self, n_steps: int, discount: float, check_continuity: bool = True) -> None:
        n_steps = checked_count("n_steps", n_steps, of="rewards in a return")
        discount = checked_share("discount", discount)
        check_continuity = checked_flag("check_continuity", check_continuity)
        super().__init__()
        self.n_steps = n_steps
        self.discount = discount
        self._check_continuity = check_continuity
        # Waiting steps, and the columns of the first steps, which later ones must have too.
        self.pending: tuple[TensorDictBase | None, frozenset[_Column] | None] = (None, None)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        # Stored transitions are formed already.
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        if tensordict.ndim != 1:
            raise ValueError(
                f"NStepTransitions got steps of batch size {list(tensordict.shape)}; it takes rows [N] in time order. "
                "Reshape them, or call extend(step.unsqueeze(0)) for a single step."
            )
        waiting, columns = self.pending
        if columns is None:
            refuse_formed(tensordict, self.n_steps)
        require_columns(tensordict, f"returns over {self.n_steps} steps")
        leaves = tensordict.items(True, True)
        given = frozenset((str(key), str(value.dtype), str(list(value.shape[1:]))) for key, value in leaves)
        if columns is not None and given != columns:
            raise ValueError(
                "steps must have the columns of the steps before; nothing was changed. "
                f"Different: given {sorted(given - columns)}, before {sorted(columns - given)}"
            )
        if waiting is not None:
            tensordict = torch.cat([waiting, tensordict])
        slots, steps_used, ended = self._chain(tensordict)
        complete = (steps_used == self.n_steps) | ended
        formed = self._form(tensordict, complete, slots, steps_used, ended)
        waiting = tensordict[~complete]
        self.pending = waiting if len(waiting) else None, given
        return formed

    def flush(self, trajectories: Iterable[int] | None = None) -> TensorDictBase | None:
        """Forms the waiting transitions with fewer steps, as when collection stops; ``None`` when none wait.

        They bootstrap from the last observation. ``Replay.flush`` stores them; in other buffers do so with
        ``buffer.writer.extend``, which does not apply the transform.

        Args:
            trajectories: ids of the episodes that will not continue; ``None`` for all.
        """
        (steps, columns), remaining = self.pending, None
        if steps is None:
            return None
        if trajectories is not None:
            trajectory = trajectory_of(steps)
            if trajectory is None:
                raise ValueError("steps without trajectory ids are of one environment; flush all of them")
            named = torch.tensor(list(trajectories), dtype=torch.int64, device=trajectory.device)
            chosen = torch.isin(trajectory.reshape(-1), named)
            steps, remaining = steps[chosen], None if bool(chosen.all()) else steps[~chosen]
            if not len(steps):
                return None
        self.pending = remaining, columns
        slots, steps_used, ended = self._chain(steps)
        return self._form(steps, torch.ones_like(ended), slots, steps_used, ended)

    def clear(self) -> None:
        self.pending = None, None

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the waiting steps and the known columns; TorchRL saves them with the buffer."""
        waiting, columns = self.pending
        return {
            "length": 0 if waiting is None else len(waiting),
            "waiting": {} if waiting is None else waiting.to_dict(),
            "columns": None if columns is None else [list(column) for column in sorted(columns)],
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        waiting = TensorDict(state["waiting"], [state["length"]]) if state["length"] else None
        given = state["columns"]
        self.pending = waiting, None if given is None else frozenset(tuple(column) for column in given)

    def _chain(self, steps: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the positions of each step's return ``[N, n]``, how many are used, and whether nothing follows it."""
        done = steps.get(("next", "done")).flatten()
        position = torch.arange(done.numel(), device=done.device)
        continuity = Continuity(steps) if self._check_continuity else None
        links = EpisodeLinks(done.numel(), device=done.device, continuity=continuity)
        links.write(position, trajectory_of(steps), done)
        slots, steps_used = links.chain(position, self.n_steps)
        is_last = links.successor < 0
        is_last[links.running_slots()] = False
        return slots, steps_used, is_last[slots[:, -1]]

    def _form(
        self, steps: TensorDictBase, complete: Tensor, slots: Tensor, steps_used: Tensor, ended: Tensor
    ) -> TensorDictBase | None:
        if not bool(complete.any()):
            return None
        slots, steps_used = slots[complete], steps_used[complete]
        formed, following = steps[complete], steps.get("next")[slots[:, -1]]
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
