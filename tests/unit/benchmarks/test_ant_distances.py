# SPDX-License-Identifier: Apache-2.0
"""The shares of Ant's contact forces that the page on mixup quotes."""

from __future__ import annotations

import json

import torch

from tests.benchmarks.ant_distances import FILE, measure, neighbors_of

PAGE = FILE.parents[3] / "docs" / "mixup.md"


def test_neighbors_are_the_nearest_rows_in_standardised_features() -> None:
    rows = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0, 100.0, 0.1])
    compared = torch.tensor([3, 50, 7])
    points = (rows - rows.mean(0)) / rows.std(0, correction=0)
    nearest = torch.cdist(points[compared], points).topk(6, largest=False).indices[:, 1:]
    assert torch.equal(neighbors_of(rows, compared, 5).sort().values, nearest.sort().values)


def test_contact_forces_vary_and_change_the_neighbours() -> None:
    found = measure(seed=0, rows=300, compared=50, num_neighbors=5)
    assert 0 < found["of contact forces"] < found["varying columns"] <= 105 + 8
    assert 0 < found["share of neighbours that differ"] < 1


def test_the_page_quotes_the_kept_measurement() -> None:
    content, page = json.loads(FILE.read_text()), PAGE.read_text()
    (columns,) = {(run["of contact forces"], run["varying columns"]) for run in content["runs"]}
    shares = [run["share of neighbours that differ"] for run in content["runs"]]
    assert f"are {columns[0]} of the {columns[1]} columns" in page
    assert f"account for {100 * columns[0] / columns[1]:.0f} % of the mean squared distance" in page
    assert f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %" in page
    assert f"{content['rows']:,} rows" in page and f"{content['compared rows']:,} of them" in page
