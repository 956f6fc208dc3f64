# SPDX-License-Identifier: Apache-2.0
"""Compares buffers by the ages, returns, and observations of their rows, as numbers and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor

from lightning_replay.inspection.plotting import make_figure, save_figure
from lightning_replay.loading import load_replay
from lightning_replay.options import check_kind, check_option, checked_count
from lightning_replay.parts import as_replay_writer
from lightning_replay.replay import Replay
from lightning_replay.storage.frames import FrameStorage
from lightning_replay.storage.packed import read_columns
from lightning_replay.storage.rows import Key, shown

_USUAL_KEYS = (("observation",), ("pixels",))
_OVERSAMPLED = 48  # Further directions. With all directions of the rows the result is exact.
_ITERATIONS = 4
_BINS = 30
_AGE = "age (transitions that came since)"
_AXIS_NAMES = (
    ("first coordinate of the observation", "second coordinate"),
    (_AGE, "share of rows"),
    ("return of the row", "share of rows"),
)


class Inspection(NamedTuple):
    """The rows of a buffer, oldest first."""

    ages: Tensor  #: int64 ``[N]``, transitions given after each row, with the refused ones.
    returns: Tensor  #: float ``[N]``, return of each row.
    sampled: Tensor  #: int64 ``[P]`` ascending, the projected rows.
    points: Tensor  #: float32 ``[P, 2]``, coordinates of the projected rows.


def ages(replay: Replay) -> Tensor:
    """Returns the transitions given after each row, int64 ``[N]``, oldest first. Refused transitions count."""
    age = as_replay_writer(replay.writer).age_of(replay.oldest_first())
    assert age is not None, "oldest_first sorts by it"
    return age.cpu()


def returns(replay: Replay) -> Tensor:
    """Returns the rewards of the rows, or their returns if ``n_steps`` is above 1, float ``[N]``, oldest first."""
    slots = replay.oldest_first()
    storage = replay.storage
    episodes = replay.saved_parts.episodes
    if episodes is not None:
        return episodes.returns(slots, storage).cpu()
    (reward,) = read_columns(storage, slots, [("next", "reward")])
    return reward.reshape(len(slots)).float().cpu()


def observations(replay: Replay, slots: Tensor, key: NestedKey | None = None) -> Tensor:
    """Returns the stored observations ``[P, ...]`` of the rows in ``slots``, int64 ``[P]``, on the CPU."""
    storage = replay.storage
    stored = [_as_tuple(name) for name in storage.get(slots[:1]).keys(include_nested=True, leaves_only=True)]
    image_keys = storage.image_keys if isinstance(storage, FrameStorage) else []
    wanted = [*image_keys, *_USUAL_KEYS] if key is None else [_as_tuple(key)]
    present = [name for name in wanted if name in stored]
    if not present:
        asked = " or ".join(map(shown, wanted))
        raise KeyError(
            f"no column {asked} is stored; stored are {', '.join(map(shown, stored))}. Name the observations: "
            "observation_key="
        )
    (column,) = read_columns(storage, slots, present[:1])
    return column.cpu()


def _as_tuple(key: NestedKey) -> Key:
    return (key,) if isinstance(key, str) else tuple(key)


def project(observations: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Returns two principal components of every observation, float32 ``[P, 2]`` by name, on axes common to all buffers.

    Observations are flattened and centered. They are not scaled, so columns of large numbers weigh more. The sign of an
    axis is the sign of its largest coefficient. The global generator is not used.

    Args:
        observations: Numbers of any dtype, ``[P, ...]``, by the name of the buffer.
        seed: Seed for the projection.

    Raises:
        ValueError: The shapes differ, or an observation is NaN or infinite.

    Example:
        >>> points = project({"a": torch.tensor([[1.0, 0.0], [5.0, 0.0]]), "b": torch.tensor([[3.0, 1.0]])})
        >>> points["a"].round().int().tolist(), points["b"].round().int().tolist()
        ([[-2, 0], [2, 0]], [[0, 1]])
    """
    shapes = {name: list(column.shape[1:]) for name, column in observations.items()}
    if len({*map(tuple, shapes.values())}) > 1:
        raise ValueError(
            f"observations have the shapes {shapes}; one projection needs one shape. Compare buffers of one task, or "
            "name a column that is alike in them"
        )
    rows = torch.cat([column.reshape(len(column), -1).to(torch.float32) for column in observations.values()])
    if not bool(rows.isfinite().all()):
        bad = int((~rows.isfinite()).any(1).sum())
        raise ValueError(f"{bad} of {len(rows)} observations are NaN or infinite; clean them, or name another column")
    points = principal_components(rows, 2, seed).split([len(column) for column in observations.values()])
    return dict(zip(observations, points, strict=True))


def principal_components(rows: Tensor, count: int, seed: int = 0) -> Tensor:
    """Returns the first ``count`` principal components of float ``[N, F]``: ``[N, count]``, 0 beyond their number."""
    centered = rows - rows.mean(0)
    rank = min(count + _OVERSAMPLED, *rows.shape)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        _, _, axes = torch.pca_lowrank(centered, q=rank, center=False, niter=_ITERATIONS)
    axes = axes[:, :count]
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    points = centered @ (axes * largest.sign())
    return torch.nn.functional.pad(points, (0, count - points.shape[1]))


def inspect_buffers(
    buffers: Mapping[str, Replay | str | Path],
    *,
    observation_key: NestedKey | None = None,
    max_points: int = 1_000,
    seed: int = 0,
    trust: Sequence[str] = (),
) -> dict[str, Inspection]:
    """Returns ages, returns, and projected observations of the rows of several buffers, by name.

    Args:
        buffers: Buffers by name. A path is loaded with :func:`~lightning_replay.load_replay`. They are not changed.
        observation_key: Column of observations, a tuple if nested. By default the first ``image_key`` of a frame
            storage, ``"observation"``, or ``"pixels"``.
        max_points: Rows of each buffer that are projected at most, drawn without replacement.
        seed: Seed for these draws and for the projection.
        trust: Packages that the load of a path may import from, see :func:`~lightning_replay.load_replay`.

    Raises:
        ValueError: There are no buffers, a buffer is empty, ``max_points`` is below 1, or observations have different
            shapes or are NaN or infinite.
        KeyError: The column is not stored.
    """
    checked_count("max_points", max_points, of="rows")
    check_option("seed", seed, Integral, "a whole number")
    check_kind("buffers", buffers, Mapping, "buffers or paths by name, such as {'retention': replay}")
    if not buffers:
        raise ValueError("there are no buffers; give at least one by name, such as {'retention': replay}")
    found = {}
    observed = {}
    for name, replay in buffers.items():
        if isinstance(replay, str | Path):
            replay = load_replay(replay, trust=trust)
        check_kind(f"buffers[{name!r}]", replay, Replay, "a Replay or its save, of a MixedReplay its online or offline")
        if len(replay) == 0:
            raise ValueError(f"the buffer {name!r} is empty; store transitions with extend first")
        # The lock keeps everything at one moment.
        with replay.locked():
            slots = replay.oldest_first()
            drawn = torch.randperm(len(slots), generator=torch.Generator().manual_seed(seed), device="cpu")[:max_points]
            sampled = drawn.sort().values
            observed[name] = observations(replay, slots[sampled.to(slots.device)], observation_key)
            found[name] = ages(replay), returns(replay), sampled
    points = project(observed, seed)
    return {name: Inspection(*rows, points[name]) for name, rows in found.items()}


def draw_inspection(
    inspections: Mapping[str, Inspection], path: str | Path, title: str = "What the buffers hold"
) -> None:
    """Writes a picture with a column for each buffer: its observations in two dimensions, its ages, and its returns.

    The color of an observation shows its age. All columns have the same axes and colors, as in figure 5 of the
    retention paper, https://openreview.net/forum?id=SPRHpBKzJE. Needs ``pip install 'lightning-replay[plots]'``.

    Args:
        inspections: Result of :func:`inspect_buffers`.
        path: Path of the picture. Its suffix determines the format.
        title: Title of the picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    columns = len(inspections)
    figure, axes = make_figure(
        "the picture of what stays", 3, columns, 8.0, max(7.0, 3 * columns), sharex="row", sharey="row"
    )
    found = list(inspections.values())
    oldest = max(int(each.ages.max()) for each in found)
    histograms = [[each.ages.numpy() for each in found], [each.returns.numpy() for each in found]]
    edges = [np.histogram_bin_edges(np.concatenate(values), _BINS) for values in histograms]
    for column, (name, each) in enumerate(inspections.items()):
        top = axes[0, column]
        points = top.scatter(
            *each.points.T.numpy(),
            c=each.ages[each.sampled].numpy(),
            s=14,
            vmin=0,
            vmax=max(oldest, 1),
            cmap="viridis_r",
            edgecolors="0.3",  # The youngest rows are bright, and hardly visible on white without an edge.
            linewidths=0.4,
        )
        top.set_title(f"{name}: {len(each.ages):,} rows", fontsize="medium")
        top.locator_params(nbins=5)
        for row, (values, bins) in enumerate(zip(histograms, edges, strict=True), 1):
            share = np.full(len(values[column]), 1 / len(values[column]))
            axes[row, column].hist(values[column], bins=bins, weights=share)
    figure.colorbar(points, ax=list(axes[0]), label=_AGE, location="bottom", aspect=50)
    for row, (xlabel, ylabel) in enumerate(_AXIS_NAMES):
        for each in axes[row]:
            each.set_xlabel(xlabel)
        axes[row, 0].set_ylabel(ylabel)
    figure.suptitle(title)
    save_figure(figure, path)
