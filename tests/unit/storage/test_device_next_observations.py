# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_replay import recipes
from lightning_replay.storage.device_next_observations import DeviceNextObservations
from tests.transitions import numbered_steps


class Rows:
    """Rows of one word, the observation, written in the order of a ring."""

    def __init__(self, capacity: int, *, is_read_later: bool = True) -> None:
        self.words: Tensor = torch.zeros(capacity, 1, dtype=torch.int64)
        self.following: DeviceNextObservations = DeviceNextObservations(self.words, 0, 1, lambda: is_read_later)
        self.cursor: int = 0

    def write(self, *pairs: tuple[int, int]) -> None:
        first, second = (torch.tensor(one).unsqueeze(1) for one in zip(*pairs, strict=True))
        slots = slice(self.cursor, self.cursor + len(pairs))
        self.following.link(slots, first, second)
        self.words[slots] = first
        self.cursor = slots.stop % len(self.words)

    @property
    def ends(self) -> list[int]:
        return self.following.gather(torch.arange(len(self.words))).flatten().tolist()


#    slot           0         1         2         3         4
#    row          10 -> 11  20 -> 21  21 -> 22  11 -> 12  12 -> 13
#    next is in   slot 3    slot 2    beside    slot 4    beside
def test_places_of_environments_side_by_side() -> None:
    rows = Rows(6)
    rows.write((10, 11), (20, 21))
    assert rows.following.places.tolist() == [-1, -2, 0, 0, 0, 0, 0] and rows.following.count == 2
    rows.write((21, 22), (11, 12), (12, 13))
    assert rows.following.places[:2].tolist() == [4, 3] and rows.following.places[3] == 5
    assert rows.ends == [11, 21, 22, 12, 13, 0] and rows.following.count == 2
    assert rows.following.gather(torch.tensor([3, 2]), before=1).tolist() == [[11, 12], [21, 22]]


def test_a_row_keeps_its_next_observation_if_the_row_with_it_leaves_first() -> None:
    rows = Rows(4)
    rows.write((1, 2), (2, 3), (3, 4))
    rows.following.link(torch.tensor([1]), torch.tensor([[8]]), torch.tensor([[9]]))
    rows.words[1] = 8
    assert rows.ends[:3] == [2, 9, 4] and rows.following.count == 3


def test_equal_hashes_are_no_equal_observations() -> None:
    rows = Rows(4)
    rows.following._factors.zero_()
    rows.write((1, 2), (3, 4))
    rows.write((2, 5))
    assert rows.ends[:3] == [2, 4, 5]


def test_a_slot_is_no_candidate_for_what_its_former_row_ended_with() -> None:
    rows = Rows(3)
    rows.write((1, 0), (20, 21), (30, 31))
    rows.write((7, 5), (5, 6))
    rows.write((0, 3))
    assert rows.ends == [5, 6, 3]


@pytest.mark.parametrize("is_read_later", [True, False])
def test_memory_for_last_observations_is_bounded_by_reads(is_read_later: bool) -> None:
    count, capacity = 8, 800
    rows = Rows(capacity, is_read_later=is_read_later)
    for step in range(250):
        if step % 16 == 0 and is_read_later:
            rows.following.receive(int(rows.following.number))
        rows.write(*((100 * env + step, 100 * env + step + 1 if step % 50 else -env) for env in range(0, 8000, 1000)))
    # Of each environment, the newest observation and the ends of two episodes are kept.
    assert rows.following.count == 3 * count
    assert len(rows.following._last) <= 1.25 * (3 + 16 if is_read_later else 2 * 3) * count + 1


def test_all_last_observations_fit_where_no_row_continues_another() -> None:
    rows = Rows(10)
    for step in range(30):
        rows.write(
            *((1000 * step + number, -1000 * step - number) for number in range(1, 5)) if step % 3 else [(step, 0)]
        )
        rows.cursor = rows.cursor if rows.cursor <= 6 else 0
    assert rows.following.count <= 10 and len(rows.following._last) <= 11


def test_static_draws_are_refused() -> None:
    replay = recipes.uniform(8, 4, draws_on="device", observations="once")
    replay.storage.follows_there = True
    replay.extend(numbered_steps(0, 4))
    with pytest.raises(ValueError, match="leave observations='once' out, or draw with sample"):
        replay.static_draws()
