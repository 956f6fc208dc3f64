# SPDX-License-Identifier: Apache-2.0
"""The network of PPO: planes of encoded cells, the paper's layers, refusals."""

from __future__ import annotations

import pytest
import torch

from lightning_replay.agents import PPO
from lightning_replay.agents.networks import ImagePlanes


def test_planes_of_a_cells_encoding() -> None:
    planes = ImagePlanes(2, 255.0, categories=(3, 2))
    assert planes.count == 5
    image = torch.tensor([[[[0, 1], [2, 0]]]], dtype=torch.uint8)  # one row of two cells
    assert planes(image)[0, :, 0].tolist() == [[1, 0], [0, 0], [0, 1], [0, 1], [1, 0]]
    scaled = ImagePlanes(2, 10.0)
    assert torch.allclose(scaled(image)[0, :, 0], torch.tensor([[0.0, 0.2], [0.1, 0.0]]))


def test_the_network_of_the_paper() -> None:
    agent = PPO(observation_shape=(14, 14, 3), observation_high=10.0, num_actions=7, categories=(11, 6, 4))
    shapes = [list(layer.weight.shape) for layer in agent.network.modules() if hasattr(layer, "weight")]
    assert shapes == [[16, 21, 2, 2], [32, 16, 2, 2], [32, 32, 2, 2], [64, 11 * 11 * 32], [7, 64], [1, 64]]
    images = torch.randint(4, (5, 14, 14, 3), dtype=torch.uint8)
    assert agent.act_with_value(images)["logits"].shape == (5, 7)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((8, 8, 3), {"hidden_sizes": ()}, "hidden_sizes is empty"),
        ((8, 8, 3), {"categories": (11, 6)}, "give one count, at least 1, for each channel"),
        ((4,), {"categories": (11, 6)}, r"categories is \[11, 6\], and observations have the shape \(4,\)"),
    ],
)
def test_bad_networks(shape, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPO(observation_shape=shape, num_actions=2, **options)
