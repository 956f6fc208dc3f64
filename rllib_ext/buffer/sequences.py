# SPDX-License-Identifier: Apache-2.0
"""Sequences of steps for recurrent modules: drawn along stored episodes, returned as episodes, one priority each."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from ray.rllib.core.columns import Columns as RLlibColumns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
from torch import Tensor
from torchrl.data.replay_buffers import SliceSampler

from lightning_replay.parts import as_replay_writer
from lightning_replay.samplers import PairSampler
from lightning_replay.samplers.sequences import sequence_priorities
from lightning_replay.storage.packed import read_columns
from rllib_ext.episodes import Columns
from rllib_ext.learner.blocks import dealt_rows

if TYPE_CHECKING:
    from torchrl.data.replay_buffers import Storage

    from lightning_replay.episodes.links import EpisodeLinks
    from lightning_replay.replay import Replay

# Rounds in a row without a sequence that is long enough. They take 0.1 s.
_MAX_EMPTY_ROUNDS = 1000


def check_sequences(replay: Replay, n_step: int | tuple[int, int] = 1) -> None:
    """Refuses returns over several steps, and replays that draw no first steps of sequences or change drawn rows."""
    if n_step != 1:
        raise ValueError(f"n_step is {n_step}; RLlib learns from sequences with n_step=1 alone. Set it to 1")
    transforms = [type(transform).__name__ for transform in replay.transform]
    sampler = type(replay.sampler).__name__
    if isinstance(replay.sampler, PairSampler | SliceSampler):
        reason = f"{sampler} draws {'pairs' if isinstance(replay.sampler, PairSampler) else 'slices'} of rows"
    elif as_replay_writer(replay.writer).may_refuse:
        reason = f"{type(replay.writer).__name__} keeps single transitions, scattered over the episodes"
    elif transforms:
        reason = f"{', '.join(transforms)} changes single transitions once they are drawn"
    else:
        return
    raise ValueError(
        f"{reason}, and a recurrent module learns from sequences as they were played. "
        'Use replay_config("uniform", ...) or replay_config("prioritized", ...), or a module without state'
    )


def draw_sequences(replay: Replay, links: EpisodeLinks, num_steps: int, longest: int, shortest: int) -> Sequences:
    """Draws start rows until the sequences that follow from them have ``num_steps`` steps together, or some more.

    The sampler draws the starts, uniformly or by priority, and up to ``longest`` steps of the episode follow: never
    past its end, a gap, or an overwritten row. Sequences below ``shortest`` steps are dropped, as in RLlib's own
    buffer. If the step before the start was overwritten, and with it the module's state, the sequence begins one step
    later. Weight and feedback stay with the row drawn.

    ::

        slot       0   1   2   3   4   5      longest 3, shortest 2, step 7 is the newest
        step       6   7   2   3   4   5      of one episode, whose step 1 was overwritten by step 7

        drawn 4    slots 4 5 0, before 3
        drawn 2    slots 3 4 5, before 2
        drawn 1    dropped, nothing follows yet

    """
    parts: list[Sequences] = []
    found = empty_rounds = 0
    while found < num_steps:
        part = _draw_round(replay, links, -(-(num_steps - found) // longest), longest, shortest)
        steps = int(part.lengths.sum())
        empty_rounds = 0 if steps else empty_rounds + 1
        if empty_rounds == _MAX_EMPTY_ROUNDS:
            raise ValueError(
                f"{empty_rounds} draws in a row found no sequence of {shortest} steps or more among the {len(replay)} "
                f"steps stored: the episodes are too short for burn_in_len={shortest - 1}. Lower burn_in_len, or raise "
                "num_steps_sampled_before_learning_starts if longer episodes come later"
            )
        parts.append(part)
        found += steps
    joined = parts[0] if len(parts) == 1 else Sequences(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
    order = torch.sort(joined.lengths, descending=True, stable=True).indices
    return Sequences(*(column[order] for column in joined))


def _draw_round(replay: Replay, links: EpisodeLinks, count: int, longest: int, shortest: int) -> Sequences:
    drawn = replay.sample(count)
    index = drawn.get("index").cpu()
    before = links.predecessor[index]
    unknown = (drawn.get("step").flatten().cpu() > 0) & (before < 0)
    start = torch.where(unknown, links.successor[index], index)
    before = torch.where(unknown, index, before)
    slots, lengths = links.chain(start.clamp(min=0), longest)
    weight = drawn.get("priority_weight", None)
    if weight is None:
        weight = torch.ones(count, dtype=torch.float32, device="cpu")
    kept = (start >= 0) & (lengths >= shortest)
    columns = (slots, lengths, before, index, drawn.get("generation").cpu(), weight.cpu())
    return Sequences(*(column[kept] for column in columns))


class Sequences(NamedTuple):
    """Slots of the sequences of a batch, the longest first as RLlib sorts them, each int64 ``[S]`` unless noted."""

    slots: Tensor  # [S, T], the rows of each; after the last one it is repeated
    lengths: Tensor  # how many of them are distinct, 1 to T
    before: Tensor  #: Slot of the step before the first step; -1 at the beginning of an episode.
    drawn: Tensor  # the rows that the sampler drew
    generation: Tensor
    weight: Tensor  # float32, their importance weights


def read_episodes(
    drawn: Sequences, storage: Storage, columns: Mapping[str, Columns], module_id: str | None = None
) -> list[SingleAgentEpisode]:
    """Returns the drawn sequences as episodes, the step before each, with its ``state_out``, as the lookback."""
    observation, action, state_out = (columns[name] for name in ("observation", "action", "state_out"))
    slots = torch.cat((drawn.before.unsqueeze(1), drawn.slots), dim=1)
    used = (torch.arange(slots.shape[1], device=slots.device) <= drawn.lengths.unsqueeze(1)) & (slots >= 0)
    everything = slots[used]
    first = drawn.slots[:, 0]
    last = drawn.slots[:, -1]

    def read(index: Tensor, keys: Sequence[str | tuple[str, ...]]) -> list[np.ndarray]:
        """Returns columns of rows as arrays."""
        return [column.cpu().numpy() for column in read_columns(storage, index, keys)]

    observations = read(everything, [leaf.key for leaf in observation.leaves])
    final = read(last, [("next", *leaf.key) for leaf in observation.leaves])
    actions = read(everything, [leaf.key for leaf in action.leaves])
    states = read(everything, [leaf.key for leaf in state_out.leaves])
    (rewards,) = read(everything, [("next", "reward")])
    (step,) = read(first, ["step"])
    terminated, truncated = read(last, [("next", "terminated"), ("next", "truncated")])
    weights = drawn.weight.cpu().numpy()
    lookbacks = (drawn.before >= 0).long().tolist()
    episodes = []
    for number, (begin, end) in enumerate(pairwise([0, *used.sum(1).cumsum(0).tolist()])):
        rows = slice(begin, end)
        buffer = functools.partial(InfiniteLookbackBuffer, lookback=lookbacks[number])
        seen = [
            np.concatenate((array[rows], after[number : number + 1]))
            for array, after in zip(observations, final, strict=True)
        ]
        outputs = {
            RLlibColumns.STATE_OUT: state_out.unflatten([array[rows] for array in states]),
            "weights": np.full(end - begin, weights[number]),
            "n_step": np.ones(end - begin, dtype=np.int64),
        }
        episodes.append(
            SingleAgentEpisode(
                # No underscore: RLlib then gives separate ids to the parts that it cuts for several Learners.
                id_=f"sequence{number}",
                # RLlib files steps under (episode, agent, module) if there are several agents.
                agent_id=None if module_id is None else f"sequence{number}",
                module_id=module_id,
                multi_agent_episode_id=None if module_id is None else f"sequence{number}",
                observations=buffer(observation.unflatten(seen)),
                infos=buffer([{} for _ in range(end - begin + 1)]),
                actions=buffer(action.unflatten([array[rows] for array in actions])),
                rewards=buffer(rewards[rows].reshape(-1)),
                extra_model_outputs={name: buffer(column) for name, column in outputs.items()},
                terminated=bool(terminated[number]),
                truncated=bool(truncated[number]),
                t_started=int(step[number]),
                len_lookback_buffer=0,  # each buffer has its own
            )
        )
    return episodes


class SequencePriorities:
    """Turns the TD errors of a batch of sequences, ``[chunks, T]`` as they come back, into one for each sequence.

    A Learner pads every sequence to T steps, a chunk. If RLlib cuts a sequence for several Learners, each part is a
    chunk. The priority is :func:`~lightning_replay.samplers.sequence_priorities` of the steps a Learner learned from,
    without the burn-in of each chunk and the padding.

    ::

        sequences                   aaaa bb          (T = 4, burn-in 1, 2 Learners)
        chunks of the first         aaa-
        chunks of the second        a---  bb--
        steps that count            -xx-  ----  -x--

    ``lengths`` are the steps of each sequence, the longest first, and ``longest`` is T, ``max_seq_len`` of the module.

    Example:
        >>> priorities = SequencePriorities([3, 2], num_learners=0, longest=4, burn_in=1)
        >>> priorities.of([[9, -1, 3, 0], [9, 2, 0, 0]])
        (array([0, 1]), array([2.9, 2. ]))
    """

    def __init__(self, lengths: Sequence[int], num_learners: int, longest: int, burn_in: int) -> None:
        shards = dealt_rows(list(lengths), max(num_learners, 1))
        for shard in shards:
            if all(len(part) <= burn_in for part in shard):
                raise ValueError(
                    f"{sum(lengths)} steps for {num_learners} Learners leave one of them with no more than "
                    f"burn_in_len={burn_in} steps of any sequence, so it would learn from none. Set "
                    f"train_batch_size_per_learner to at least max_seq_len={longest}, or lower burn_in_len"
                )
        chunks = [part for shard in shards for part in shard]
        of_chunk = np.repeat(np.arange(len(lengths)), lengths)[[part[0] for part in chunks]]
        step = np.arange(longest)
        self._counts = (step >= burn_in) & (step < np.array([[len(part)] for part in chunks]))
        # The chunks of each sequence, side by side. The sequence with the most chunks sets the number of places. -1
        # fills places left over.
        self._chunks = np.full((len(lengths), np.bincount(of_chunk).max()), -1)
        order = of_chunk.argsort(kind="stable")
        place = np.arange(len(order)) - np.searchsorted(of_chunk[order], of_chunk[order])
        self._chunks[of_chunk[order], place] = order

    def of(self, td_errors: object) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sequences with a step that counts, int64 ``[n]``, and the priority of each."""
        given = np.asarray(td_errors, dtype=np.float64)
        if given.shape != self._counts.shape:
            raise ValueError(
                f"the TD errors have shape {list(given.shape)}; the batch of sequences came back in "
                f"{self._counts.shape[0]} chunks of {self._counts.shape[1]} steps. With several Learners use "
                "rllib_ext.configure(config), or replay_config(num_learners=...); a Learner of your own logs one TD "
                "error per step, padding included"
            )
        if not np.isfinite(given[self._counts]).all():
            raise ValueError(
                "the TD errors of steps that were learned from must be finite; some are NaN or infinite. No priority "
                "was changed. Look for a diverging loss before this update"
            )

        def by_sequence(steps: np.ndarray) -> Tensor:
            return torch.from_numpy(steps[self._chunks].reshape(len(self._chunks), -1))

        counts = by_sequence(self._counts) & torch.from_numpy(np.repeat(self._chunks >= 0, self._counts.shape[1], 1))
        learned = counts.any(1)
        return np.flatnonzero(learned), sequence_priorities(by_sequence(given)[learned], counts[learned]).numpy()
