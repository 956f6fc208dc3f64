# SPDX-License-Identifier: Apache-2.0
"""Links between the steps of an episode, on timelines small enough to draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_replay.episodes.links import EpisodeLinks
from lightning_replay.episodes.returns import bootstrap_discounts, n_step_returns

CASES = json.loads((Path(__file__).parents[2] / "fixtures" / "nstep_tuples.json").read_text())["cases"]


def write(links: EpisodeLinks, slots: list[int], trajectory: list[int] | None = None, done: list[int] = ()) -> None:  # type: ignore[assignment]
    """Writes rows; ``done`` lists the slots that end an episode."""
    ended = torch.tensor([slot in done for slot in slots])
    links.write(torch.tensor(slots), None if trajectory is None else torch.tensor(trajectory), ended)


def successors(links: EpisodeLinks) -> list[int]:
    return links.successor.tolist()


def test_interleaved_trajectories_are_linked_apart() -> None:
    links = EpisodeLinks(8)
    write(links, [0, 1, 2, 3], trajectory=[7, 9, 7, 9])
    write(links, [4, 5, 6], trajectory=[9, 7, 7], done=[4])
    write(links, [7], trajectory=[9])
    # 7: 0 -> 2 -> 5 -> 6      9: 1 -> 3 -> 4 |  7
    assert successors(links) == [2, 3, 5, 4, -1, 6, -1, -1]


def test_the_newest_row_has_no_successor_though_the_next_slot_is_occupied() -> None:
    links = EpisodeLinks(3)
    write(links, [0, 1, 2])
    write(links, [0])
    # slots 0 1 2 hold steps 3 1 2, the head is at 0
    assert successors(links) == [-1, 2, 0]
    slots, steps_used = links.chain(torch.tensor([1, 2, 0]), n_steps=3)
    assert slots.tolist() == [[1, 2, 0], [2, 0, 0], [0, 0, 0]]
    assert steps_used.tolist() == [3, 2, 1]


def test_cut_ends_an_episode_for_good() -> None:
    links = EpisodeLinks(4)
    write(links, [0, 1], trajectory=[3, 3])
    links.end_episodes(torch.tensor([1]))
    write(links, [2], trajectory=[3])
    links.end_episodes(torch.tensor([0]))
    assert successors(links) == [-1, -1, -1, -1]


def test_the_memory_of_running_episodes_is_bounded_by_the_capacity() -> None:
    links = EpisodeLinks(4)
    for step in range(100):
        write(links, [step % 4], trajectory=[step])
    assert len(links.running) == 4
    links.clear()
    assert not len(links.running) and successors(links) == [-1] * 4


def test_the_state_of_other_links_is_refused() -> None:
    with pytest.raises(ValueError, match="6 slots are saved, these links have 4"):
        EpisodeLinks(4).load_state_dict(EpisodeLinks(6).state_dict())
    links = EpisodeLinks(4)
    write(links, [0, 1])
    damaged = links.state_dict() | {"successor": torch.tensor([1, 4, -1, -1])}
    with pytest.raises(ValueError, match="links that lead to no slot or in circles"):
        links.load_state_dict(damaged)
    assert successors(links) == [1, -1, -1, -1]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.booleans(), st.integers(0, 2**20))
def test_walks_are_those_of_a_list(lengths: list[int], back: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(sum(lengths), generator=generator)
    links, episodes = EpisodeLinks(len(slots)), [part.tolist() for part in slots.split(lengths)]
    for episode in episodes:
        links.write(torch.tensor(episode), None, torch.arange(len(episode)) == len(episode) - 1)
    most = torch.randint(0, len(slots), slots.shape, generator=generator)
    expected = []
    for slot, steps in zip(slots.tolist(), most.tolist(), strict=True):
        run = next(episode for episode in episodes if slot in episode)
        place = run.index(slot)
        reached = max(place - steps, 0) if back else min(place + steps, len(run) - 1)
        expected.append((run[reached], abs(reached - place)))
    found, gone = links.walk(slots, most, back=back)
    assert list(zip(found.tolist(), gone.tolist(), strict=True)) == expected
    for slot, path, used in zip(slots.tolist(), *(part.tolist() for part in links.chain(slots, 5)), strict=True):
        run = next(episode for episode in episodes if slot in episode)
        ahead = run[run.index(slot) :][:5]
        assert path == ahead + ahead[-1:] * (5 - len(ahead)) and used == len(ahead)


def test_what_lies_after_the_return_is_ignored_even_nan() -> None:
    reward = torch.tensor([[1.0, float("nan")], [1.0, 2.0]])
    assert n_step_returns(reward, torch.tensor([1, 2]), discount=0.5).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_returns_formed_when_drawn_equal_the_worked_tuples(case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    reward = torch.tensor(inputs["rewards"], dtype=torch.float64)
    length = len(reward)
    links = EpisodeLinks(length + 2)
    ended = torch.zeros(length, dtype=torch.bool)
    ended[-1] = True
    links.write(torch.arange(length), None, ended)
    write(links, [length])  # the next episode begins right behind
    slots, steps_used = links.chain(torch.arange(length), inputs["n"])
    returns = n_step_returns(reward[slots.clamp(max=length - 1)], steps_used, inputs["gamma"])
    terminated = ended & (inputs["episode_end"] == "terminal")
    discount = bootstrap_discounts(steps_used, terminated[slots[:, -1]], inputs["gamma"])
    for expected in case["expected"]:
        step = expected["first_step"]
        assert steps_used[step] == expected["steps_used"]
        assert slots[step, -1] + 1 == expected["bootstrap_state_index"]
        assert terminated[slots[step, -1]] == expected["terminated"]
        assert_close(returns[step], expected["reward_sum"])
        assert_close(discount[step], expected["bootstrap_discount"])


def assert_close(actual: Tensor, expected: float) -> None:
    assert abs(float(actual) - expected) <= 1e-12


def test_integer_rewards_are_discounted_in_float() -> None:
    returns = n_step_returns(torch.tensor([[1, 2, 4]]), torch.tensor([3]), discount=0.5)
    assert returns.dtype == torch.float32
    assert returns.tolist() == [3.0]


@pytest.mark.parametrize(
    ("successor", "newest"),
    [([1, 4, -1, -1], 2), ([1, 0, -1, -1], 2), ([2, 2, -1, -1], 2), ([2, 2, -1, 3], 2), ([1, -1, -1, -1], 4)],
)
def test_links_that_are_no_paths_are_refused(successor: list[int], newest: int) -> None:
    """They lead to no slot, in a circle, or from two slots to one; or an episode runs where no slot is."""
    links = EpisodeLinks(4)
    links.write(torch.tensor([0, 1]), None, torch.tensor([False, False]))
    before = links.state_dict()
    with pytest.raises(ValueError, match="lead to no slot or in circles"):
        links.load_state_dict(before | {"successor": torch.tensor(successor), "newest_slot": newest})
    assert links.successor.tolist() == before["successor"].tolist() == [1, -1, -1, -1]
    links.load_state_dict(before)
    assert links.predecessor.tolist() == [-1, 0, -1, -1] and links.running.tolist() == [1]


def test_a_state_of_a_thousand_running_episodes_is_loaded_and_goes_on() -> None:
    """A table of the size of an empty one has 32 entries, and a search in a full one has no end."""
    names = [*range(1000)]
    links = EpisodeLinks(3000)
    write(links, names, trajectory=names)
    loaded = EpisodeLinks(3000)
    loaded.load_state_dict(links.state_dict())
    write(loaded, [1000 + name for name in names], trajectory=names)
    assert successors(loaded) == [*range(1000, 2000), *[-1] * 2000]
    assert loaded.running.tolist() == [*range(1000, 2000)]
