# SPDX-License-Identifier: Apache-2.0
"""The shares of the contact forces of Ant and Humanoid that the page on mixup quotes."""

from __future__ import annotations

import json

import gymnasium
import pytest
import torch

from tests.benchmarks.contact_distances import FILE, measure, neighbors_of

PAGE = FILE.parents[3] / "docs" / "mixup.md"


def test_neighbors_are_the_nearest_rows_in_standardised_features() -> None:
    rows = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0, 100.0, 0.1])
    compared = torch.tensor([3, 50, 7])
    points = (rows - rows.mean(0)) / rows.std(0, correction=0)
    nearest = torch.cdist(points[compared], points).topk(6, largest=False).indices[:, 1:]
    assert torch.equal(neighbors_of(rows, compared, 5).sort().values, nearest.sort().values)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "columns"), [("Ant-v5", 105 + 8), ("Humanoid-v5", 348 + 17)])
def test_contact_forces_vary_and_change_the_neighbours(name: str, columns: int) -> None:
    found = measure(name, seed=0, rows=300, compared=50, num_neighbors=5)
    assert 0 < found["of contact forces"] < found["varying columns"] <= columns
    assert 0 < found["share of neighbours that differ"] < 1
    with_forces, without = gymnasium.make(name), gymnasium.make(name, include_cfrc_ext_in_observation=False)
    kept, _ = without.reset(seed=0)
    assert (with_forces.reset(seed=0)[0][: len(kept)] == kept).all()  # the last columns of the observation


def test_the_page_quotes_the_kept_measurement() -> None:
    content, page = json.loads(FILE.read_text()), PAGE.read_text()
    for name in ("Ant-v5", "Humanoid-v5"):
        runs = [run for run in content["runs"] if run["env"] == name]
        columns = sorted({(run["of contact forces"], run["varying columns"]) for run in runs})
        of_contacts, of_all = (" or ".join(str(number) for number in numbers) for numbers in zip(*columns, strict=True))
        assert f"{of_contacts} of the {of_all} columns" in page
        parts = dict.fromkeys(f"{100 * contacts / every:.0f}" for contacts, every in columns)
        assert f"{' to '.join(parts)}% of the mean squared distance" in page
        shares = [run["share of neighbours that differ"] for run in runs]
        assert f"{100 * min(shares):.0f} to {100 * max(shares):.0f}%" in page
    assert f"{content['rows']:,} rows" in page and f"{content['compared rows']:,} of them" in page
