# SPDX-License-Identifier: Apache-2.0
"""Draws and updates of priorities as tensor code alone, for CUDA graphs and ``torch.compile``."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.deferred_checks import DeferredChecks, keep_first
from lightning_replay.episodes.returns import EpisodeTracker
from lightning_replay.feedback import NOT_FINITE, Feedback, match_there
from lightning_replay.replay_parts import ReplayParts
from lightning_replay.samplers.prioritized import PrioritizedSampler


class StaticDraws:
    """Draws batches of one size and returns their TD errors, without a read of the device and in the same memory.

    :meth:`Replay.static_draws <lightning_replay.Replay.static_draws>` makes it, for a buffer with rows that draws slots
    on their device. :meth:`draw` and :meth:`update_priority` are tensor code alone: a CUDA graph captures both with the
    loss between them, and ``torch.compile(fullgraph=True)`` compiles them. Call :meth:`prepare` before every step,
    outside of the graph: it draws the random numbers, and tells the device how many rows are stored. Without it, a step
    draws the same points again. After the buffer was emptied or loaded, make it again and capture again.

    Example:
        >>> from tensordict import TensorDict
        >>> from lightning_replay import recipes
        >>> replay = recipes.prioritized(capacity=100, batch_size=4, draws_on="device", seed=0)
        >>> index = replay.extend(TensorDict({"observation": torch.randn(10, 3)}, [10]))
        >>> draws = replay.static_draws()
        >>> for update in range(3):
        ...     draws.prepare()
        ...     batch = draws.draw()
        ...     draws.update_priority(batch, batch["observation"].sum(1))
        >>> batch["priority_weight"].shape
        torch.Size([4])
    """

    def __init__(
        self,
        parts: ReplayParts,
        episodes: EpisodeTracker | None,
        feedback: Feedback,
        deferred: DeferredChecks | None,
        batch_size: int,
    ) -> None:
        sampler, storage = parts.sampler, parts.packed
        if not parts.draws_there or storage is None or sampler._draw_there is None or parts.has_transforms:
            raise ValueError(
                f"static draws are of rows as they are stored, drawn on their device; this buffer has {sampler!r} and "
                f"{len(parts.transforms)} transforms. Build it with draws_on='device', as recipes.uniform or "
                "recipes.prioritized, and without a transform"
            )
        if storage.follows_there:
            raise ValueError(
                "static draws read memory that stays, and observations='once' takes more as rows come; leave "
                "observations='once' out, or draw with sample()"
            )
        self.batch_size: int = batch_size
        self._sampler = sampler
        self._storage = storage
        self._episodes = episodes if episodes is not None and episodes.n_steps > 1 else None
        self._feedback = feedback
        device = storage.slot_device
        # If checks are not deferred, each step is checked before the next.
        self._checks = deferred or DeferredChecks(1, device)
        self._wrong_calls = self._checks.first_of([NOT_FINITE.format("update_priority")])
        self._stale = feedback.stale_on(device)
        self._uniform = torch.zeros(batch_size, dtype=torch.float64, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._call = torch.zeros((), dtype=torch.int64, device=device)
        self._beta = torch.zeros((), dtype=torch.float32, device=device)
        self.prepare()
        self.draw()  # The first draw copies the powers of the discount to the device, which a graph cannot do.

    def prepare(self) -> None:
        """Draws the random numbers of the next step and sets its numbers. Call it outside of a graph.

        Raises:
            ValueError: An earlier step or ``extend`` brought NaN or infinity, see ``check_every`` of the buffer.
            RuntimeError: The buffer is empty.
        """
        if not len(self._storage):
            raise RuntimeError(
                "static draws need the columns of a row, and the buffer is empty; call extend first, and capture then"
            )
        self._call.fill_(self._checks.begin("update_priority"))
        self._uniform.uniform_(generator=self._sampler._generator)
        self._count.fill_(len(self._storage))
        if isinstance(self._sampler, PrioritizedSampler):
            self._beta.fill_(self._sampler.beta)
            self._sampler.count_draw()
            self._feedback.count(self.batch_size, 0)

    def draw(self) -> TensorDictBase:
        """Returns a batch ``[B]`` as :meth:`Replay.sample <lightning_replay.Replay.sample>` does."""
        index, info = self._sampler._draw_there(self._uniform, self._count, self._beta)
        batch: TensorDictBase = self._storage.get(index, extra={"index": index} | info)
        if self._episodes is not None:
            batch = self._episodes.draw(batch, index, self._storage)
        return batch

    def update_priority(self, batch: TensorDictBase, td_error: Tensor) -> None:
        """Returns signed TD errors ``[B]`` or ``[B, 1]`` to the rows of a batch that :meth:`draw` returned."""
        if not self._sampler.uses_priorities:
            return
        slots, errors, is_fresh = match_there(
            batch.get("index"), td_error.detach(), batch.get("generation"), self._storage
        )
        is_sound = self._sampler.set_priorities_there(slots, errors, is_fresh)
        keep_first(self._wrong_calls, self._call, is_sound.all())
        self._stale.add_((~is_fresh).sum())
