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
    ("options", "message"),
    [
        ({"hidden_sizes": ()}, "hidden_sizes is empty"),
        ({"channels": (16,)}, "argument 2 is longer"),
        ({"kernel_sizes": (2, 2, 9)}, "Kernel size can't be greater"),
        ({"categories": (11, 6)}, "give one count, at least 1, for each channel"),
    ],
)
def test_bad_networks(options, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        PPO(observation_shape=(8, 8, 3), num_actions=2, **options)


def test_categories_of_flat_observations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"categories is \[11, 6\], and observations have the shape \(4,\)"):
        PPO(observation_shape=(4,), num_actions=2, categories=(11, 6))
