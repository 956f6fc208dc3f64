# SPDX-License-Identifier: Apache-2.0
"""Encoders of the entries of an observation: vectors, images and integers as one vector of features."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.modules import ConvNet

from lightning_replay.options import (
    ABOVE_ZERO,
    LARGEST_COUNT,
    checked_choice,
    checked_count,
    checked_counts,
    checked_flag,
    checked_number,
)

ObservationSize = int | Mapping[str, Any]  # DQN describes the values of its observation_size.

_SMALL_IMAGE = {"channels": [16, 32, 32], "kernel_sizes": [2, 2, 2], "strides": [1, 1, 1]}
_IMAGE = {"channels": [32, 64, 64], "kernel_sizes": [8, 4, 3], "strides": [4, 2, 1]}  # Mnih et al. 2015
LEAST_IMAGE_SIDE = 4  # Smaller boxes are flattened.
_LARGE_IMAGE_SIDE = 36  # The three larger convolutions fit images of at least this size.


def described_image(shape: Sequence[int], high: float, channels_first: bool) -> dict[str, Any]:
    """Returns the description of an image whose convolutions are chosen by its size."""
    sides = shape[-2:] if channels_first else shape[:2]
    convolutions = _IMAGE if min(sides) >= _LARGE_IMAGE_SIDE else _SMALL_IMAGE
    image = {"encoder": "convolutions", "shape": list(shape), "high": high, "channels_first": channels_first}
    return image | convolutions | {"features": 64}


def _checked_integers(name: str, values: Any) -> Any:
    if isinstance(values, Sequence):
        return [_checked_integers(f"{name}[{place}]", value) for place, value in enumerate(values)]
    return checked_count(name, values, -LARGEST_COUNT)


_checked_high = partial(checked_number, lowest=ABOVE_ZERO)
# Each encoder has checks of the fields that it needs, and checks of optional fields.
_FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "flat": ({"shape": checked_counts}, {"high": _checked_high}),
    "one_hot": ({"low": _checked_integers, "high": _checked_integers}, {}),
    "convolutions": (
        {"shape": checked_counts, "high": _checked_high, "channels_first": checked_flag},
        {**dict.fromkeys(_IMAGE, checked_counts), "features": checked_count},
    ),
}


def checked_observation_size(name: str, value: Any) -> int | dict[str, Any]:
    """Returns a description of an observation in plain values. Convolutions that were not given are chosen."""
    if not isinstance(value, Mapping):
        return checked_count(name, value)
    if not isinstance(value.get("encoder"), str):
        if not value:
            raise ValueError(f"{name} is empty; give the size of a flat observation, or a mapping of its entries.")
        return {str(entry): checked_observation_size(f"{name}[{entry!r}]", part) for entry, part in value.items()}
    encoder = checked_choice(f"{name}['encoder']", value["encoder"], list(_FIELDS))
    needed, optional = _FIELDS[encoder]
    fields = needed | optional
    if not needed.keys() <= value.keys() - {"encoder"} <= fields.keys():
        raise ValueError(
            f"{name} is {dict(value)}; the encoder {encoder!r} needs {sorted(needed)} and may have "
            f"{sorted(optional)}. Observation sizes are read by .sizes_from(observation_space, action_space)."
        )
    plain = {field: check(f"{name}[{field!r}]", value[field]) for field, check in fields.items() if field in value}
    if encoder == "convolutions":
        if len(plain["shape"]) not in (2, 3):
            raise ValueError(f"{name} has the shape {plain['shape']}; an image has two or three dimensions.")
        plain = described_image(plain["shape"], plain["high"], plain["channels_first"]) | plain
        if not 0 < len(plain["channels"]) == len(plain["kernel_sizes"]) == len(plain["strides"]):
            raise ValueError(f"{name} is {plain}; give channels, kernel_sizes and strides for each convolution.")
    elif encoder == "one_hot":
        low, high = (torch.tensor(plain[field]) for field in ("low", "high"))
        if low.shape != high.shape or not low.numel() or (low > high).any():
            raise ValueError(f"{name} is {dict(value)}; give the smallest and the largest value of each integer.")
    return {"encoder": encoder} | plain


def entries_of(size: ObservationSize, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the path and the description of each entry."""
    if isinstance(size, int) or isinstance(size.get("encoder"), str):
        yield path, size
    else:
        for name, part in size.items():
            yield from entries_of(part, (*path, name))


class Encoder(nn.Module):
    """Features ``[..., F]`` of an observation, the features of its entries in the order of their names.

    Vectors are features as they are, other numbers are flattened, and integers are one-hot encoded. Images go through
    convolutions, a linear layer, layer normalization, and tanh (Yarats et al. 2021, https://arxiv.org/abs/1910.01741).
    Only the encoders of images are learned.

    Args:
        size: Description of the observation, see ``observation_size`` of :class:`~lightning_replay.agents.DQN`.
        normalizes: Whether each vector is normalized by its :class:`RunningNormalization`.

    Attributes:
        size: F.

    Example:
        >>> from tensordict import TensorDict
        >>> encoder = Encoder({"state": 2, "room": {"encoder": "one_hot", "low": 1, "high": 3}})
        >>> encoder(TensorDict({"state": torch.ones(4, 2), "room": torch.tensor([1, 2, 3, 1])}, [4]))[1].tolist()
        [0.0, 1.0, 0.0, 1.0, 1.0]
    """

    def __init__(self, size: ObservationSize, normalizes: bool = False) -> None:
        super().__init__()
        # Entries are sorted by name, so that weights fit every order of a mapping.
        entries = dict(sorted(entries_of(size), key=lambda entry: entry[0]))
        self.paths: list[tuple[str, ...]] = list(entries)
        vectors = {path: entry for path, entry in entries.items() if isinstance(entry, int)}
        others: dict[Any, Any] = {
            path: _PARTS[entry["encoder"]](entry) for path, entry in entries.items() if path not in vectors
        }
        if normalizes:
            others |= {path: RunningNormalization(entry) for path, entry in vectors.items()}
            vectors = {}
        self.parts: nn.ModuleList = nn.ModuleList(others.get(path, nn.Identity()) for path in entries)
        self.size: int = sum(vectors.values()) + sum(part.size for part in others.values())

    def forward(self, observation: Any) -> Tensor:
        """Returns features ``[..., F]`` of a tensor, or of a TensorDict of the entries."""
        entries = self._entries(observation)
        return torch.cat([part(entry) for part, entry in zip(self.parts, entries, strict=True)], dim=-1)

    def _entries(self, observation: Any) -> list[Any]:
        return [observation.get(path) if path else observation for path in self.paths]

    def observe(self, observation: Any) -> None:
        """Adds observations ``[..., *shape]`` to the statistics of the vectors."""
        for part, entry in zip(self.parts, self._entries(observation), strict=True):
            if isinstance(part, RunningNormalization):
                part.observe(entry)

    def target(self) -> Encoder:
        """Returns a copy whose parameters get no gradients. It normalizes by the same statistics."""
        # A copy keeps objects that its memo names.
        shared: dict[int, Any] = {id(part): part for part in self.parts if isinstance(part, RunningNormalization)}
        return copy.deepcopy(self, shared).requires_grad_(False)


class RunningNormalization(nn.Module):
    """Normalizes vectors by the mean and the deviation of all vectors so far: ``(x - mean) / (deviation + 0.01)``.

    Statistics of batches are combined by Chan et al. 1979. No call waits for a device. The statistics are buffers, so
    that a ``state_dict`` holds them. Before the first vector, the mean is 0 and the deviation 1.

    Args:
        size: Number of dimensions F of a vector.

    Attributes:
        mean: Mean of each dimension, ``[F]``.
        variance: Variance of each dimension without Bessel's correction, ``[F]``.
        count: Number of vectors, int64.
        is_frozen: Whether :meth:`observe` changes nothing, a bool tensor.

    Example:
        >>> normalization = RunningNormalization(2)
        >>> normalization.observe(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
        >>> normalization.mean.tolist(), normalization.variance.tolist()
        ([2.0, 0.0], [1.0, 0.0])
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    is_frozen: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size: int = size
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("is_frozen", torch.tensor(False))

    @torch.no_grad()
    def observe(self, vectors: Tensor) -> None:
        """Adds vectors ``[..., F]`` to the statistics, except vectors with NaN or an infinite number."""
        rows = vectors.reshape(-1, self.size)
        is_added = rows.isfinite().all(1, keepdim=True) & ~self.is_frozen
        added = is_added.sum()
        divisor = added.clamp(min=1)  # If no vector is added, all shares below are 0.
        mean = torch.where(is_added, rows, 0.0).sum(0) / divisor
        variance = torch.where(is_added, rows - mean, 0.0).square().sum(0) / divisor
        self.count += added
        share = added / self.count.clamp(min=1)
        distance = mean - self.mean
        self.mean += share * distance
        self.variance += share * (variance - self.variance + (1 - share) * distance.square())

    def forward(self, vectors: Tensor) -> Tensor:
        """Returns normalized vectors ``[..., F]``."""
        return (vectors - self.mean) / (self.variance.sqrt() + 0.01)


class _FlatEntry(nn.Module):
    def __init__(self, entry: Mapping[str, Any]) -> None:
        super().__init__()
        self._dims = len(entry["shape"])
        self._scale = 1.0 / entry.get("high", 1.0)
        self.size: int = math.prod(entry["shape"])

    def forward(self, numbers: Tensor) -> Tensor:
        """Returns flat, scaled numbers."""
        return numbers.reshape(*numbers.shape[: numbers.ndim - self._dims], self.size) * self._scale


class _OneHotEntry(nn.Module):
    shift: Tensor

    def __init__(self, entry: Mapping[str, Any]) -> None:
        super().__init__()
        low, high = (torch.tensor(entry[name]) for name in ("low", "high"))
        self._dims = low.ndim
        counts = (high - low + 1).flatten()
        self.size: int = int(counts.sum())
        self.register_buffer("shift", counts.cumsum(0) - counts - low.flatten(), persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        """Returns zeros and ones, float32."""
        batch = numbers.shape[: numbers.ndim - self._dims]
        places = numbers.reshape(*batch, -1).long() + self.shift
        return torch.zeros(*batch, self.size, device=numbers.device).scatter_(-1, places, 1.0)


class _ImageEntry(nn.Module):
    def __init__(self, entry: Mapping[str, Any]) -> None:
        super().__init__()
        self._dims, self._is_last, self._scale = len(entry["shape"]), not entry["channels_first"], 1.0 / entry["high"]
        self.size: int = entry["features"]
        convolutions = ConvNet(
            num_cells=entry["channels"],
            kernel_sizes=entry["kernel_sizes"],
            strides=entry["strides"],
            activation_class=nn.ReLU,
        )
        self.body = nn.Sequential(convolutions, nn.LazyLinear(self.size), nn.LayerNorm(self.size), nn.Tanh())
        # This initializes the lazy layers. Torch refuses kernels that are larger than the image.
        self(torch.zeros(1, *entry["shape"]))

    def forward(self, images: Tensor) -> Tensor:
        """Returns the features of images ``[..., H, W]``, ``[..., H, W, C]``, or ``[..., C, H, W]``."""
        images = images * self._scale
        if self._dims == 2:
            return self.body(images.unsqueeze(-3))
        return self.body(images.movedim(-1, -3) if self._is_last else images)


_PARTS = {"flat": _FlatEntry, "one_hot": _OneHotEntry, "convolutions": _ImageEntry}
