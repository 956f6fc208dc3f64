# SPDX-License-Identifier: Apache-2.0
"""Figures by which hoarding shows, by hand-worked numbers: kept rows beside the newest of those offered."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.retention.eviction import ARRIVAL_BITS
from lightning_replay.retention.rules import RetentionRule
from lightning_replay.writers import OldestLeaves, OnPolicynessOnly, RetentionWriter, SurpriseOnly
from tests.transitions import numbered_steps

SAVES = Path(__file__).parents[2] / "fixtures"
FIGURES = ("age_over_capacity", "terminal_share", "terminal_over_newest", "td_error_over_newest")


class MostSurprising(RetentionRule):
    """A rule of one's own, without draw_discount."""

    takes_surprise = learns = True


def squared_reward(transitions: TensorDict) -> torch.Tensor:
    return transitions["next", "reward"].flatten() ** 2


def buffer(capacity: int, **options: Any) -> Replay:
    writer = RetentionWriter(**{"rule": SurpriseOnly(), "initial_surprise": squared_reward} | options)
    return Replay(storage=PackedStorage(capacity), writer=writer, batch_size=2, seed=0)


def steps(errors: list[float], ends: tuple[int, ...] = ()) -> TensorDict:
    """Rows whose reward is their TD error; those at the places ``ends`` end an episode."""
    rows = numbered_steps(0, len(errors))
    rows["next", "reward"] = torch.tensor(errors).unsqueeze(1)
    for flag in ("terminated", "done"):
        rows["next", flag][list(ends)] = True
    return rows


def figures(replay: Replay) -> dict[str, float]:
    stats = replay.stats()
    return {name: stats[name] for name in FIGURES if name in stats}


def eight_rows(at_once: int, **options: Any) -> Replay:
    """Four rows fill the buffer, and of the next four the second enters, in place of the third of the first."""
    replay = buffer(4, **options)
    rows = steps([4.0, 2.0, 1.0, 3.0, 0.5, 5.0, 0.5, 0.5], ends=(1, 5, 6))
    for part in rows.split(at_once):
        replay.extend(part)
    return replay


@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_kept_rows_beside_the_newest(at_once: int) -> None:
    replay = eight_rows(at_once)
    # kept are the rows 0, 1, 3 and 5, of ages 7, 6, 4 and 2; the newest are 4 to 7
    kept, newest = (4.0 + 2.0 + 3.0 + 5.0) / 4, (0.5 + 5.0 + 0.5 + 0.5) / 4
    assert figures(replay) == pytest.approx(dict(zip(FIGURES, (4.75 / 4, 0.5, 1.0, kept / newest), strict=True)))


@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_feedback_counts_for_a_kept_row_and_while_it_is_among_the_newest(at_once: int) -> None:
    replay = eight_rows(at_once)
    replay.update_priority(torch.tensor([2, 2]), torch.tensor([7.0, -1.0]))  # row 5: the last of two for a slot counts
    assert figures(replay)["td_error_over_newest"] == pytest.approx((10.0 / 4) / (2.5 / 4))
    replay.update_priority(torch.tensor([0]), torch.tensor([2.0]))  # row 0 is not among the newest
    assert figures(replay)["td_error_over_newest"] == pytest.approx((8.0 / 4) / (2.5 / 4))
    replay.extend(steps([0.25] * 3))  # refused: the newest are now 7 to 10
    assert figures(replay)["td_error_over_newest"] == pytest.approx((8.0 / 4) / (1.25 / 4))


@pytest.mark.parametrize("rule", [OldestLeaves(), OnPolicynessOnly()])
def test_rules_without_surprise_have_no_errors_of_new_rows(rule: Any) -> None:
    replay = buffer(2, rule=rule)
    replay.extend(steps([1.0, 2.0], ends=(0,)))
    known = {"age_over_capacity": 0.25, "terminal_share": 0.5, "terminal_over_newest": 1.0}
    assert figures(replay) == known
    feedback = {"action_values": torch.tensor([[1.0, 2.0]]), "action": torch.tensor([1])}
    replay.update_priority(torch.tensor([0]), **feedback)
    assert figures(replay) == known
    if rule.learns:
        replay.update_priority(torch.tensor([0]), torch.tensor([1.0]), **feedback)
        assert figures(replay) == known | {"td_error_over_newest": 1.0}


def test_rows_without_a_flag_have_no_share_of_ends() -> None:
    rows = steps([1.0, 2.0])
    rows = TensorDict({"observation": rows["observation"], "next": {"reward": rows["next", "reward"]}}, [2])
    replay = buffer(2)
    replay.extend(rows)
    assert set(figures(replay)) == {"age_over_capacity", "td_error_over_newest"}


def hoarding(capacity: int = 100, **options: Any) -> Replay:
    """Rows that end episodes fill the buffer and refuse 700 others, of whose ages the mean is 749.5."""
    replay = buffer(capacity, **options)
    replay.extend(steps([2.0] * capacity, ends=tuple(range(capacity))))
    replay.extend(steps([0.5] * 700, ends=(650,)))
    return replay


def test_hoarding_is_warned_of_once() -> None:
    replay = hoarding()
    expected = (
        r"mean age is 7\.5 times the capacity .*; 100% of them end an episode \(1% of the newest\); "
        r"their TD error is 4\.0 times that of the newest.*rule=OldestLeaves\(\), .* see docs/retention\.md"
    )
    with pytest.warns(UserWarning, match=expected):
        replay.stats()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replay.stats()["refused"] == 700
        hoarding(capacity=99).stats()  # too few rows for shares


@pytest.mark.parametrize(
    ("rule", "advice"),
    [
        (SurpriseOnly(), "Give draw_discount=0.9, and compare with first in"),
        (
            SurpriseOnly(draw_discount=0.9),
            "draw_discount=0.9 does not suffice here: give a lower one, and compare with",
        ),
        (MostSurprising(), "stays. Compare MostSurprising with first in"),
    ],
)
def test_the_warning_advises_what_the_rule_has(rule: RetentionRule, advice: str) -> None:
    with pytest.warns(UserWarning, match=advice):
        hoarding(rule=rule).stats()


@pytest.mark.parametrize(
    ("refused", "error", "ends", "warned"),
    [
        (251, 1.0, 100, True),  # ages of 300.5 on average, all ends
        (250, 1.0, 100, False),  # ages of 299.5
        (400, 0.5, 0, True),  # twice the newest rows' error
        (400, 0.75, 0, False),
        (400, 0.75, 2, True),  # two ends beside none, which counts as one
        (400, 0.75, 1, False),
    ],
)
def test_old_rows_with_many_ends_or_large_errors_are_a_hoard(
    refused: int, error: float, ends: int, warned: bool
) -> None:
    replay = buffer(100)
    replay.extend(steps([1.0] * 100, ends=tuple(range(ends))))
    replay.extend(steps([error] * refused))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replay.stats()
    assert len(caught) == warned


def test_a_buffer_first_in_first_out_does_not_hoard() -> None:
    replay = buffer(100, rule=OldestLeaves())
    replay.extend(steps([1.0] * 1_000, ends=tuple(range(0, 900, 2))))
    assert figures(replay) == {"age_over_capacity": 0.495, "terminal_share": 0.0, "terminal_over_newest": 0.0}


def test_emptying_forgets_them() -> None:
    replay = eight_rows(8)
    replay.empty()
    assert figures(replay) == {}
    replay.extend(steps([1.0]))
    assert figures(replay) == dict(zip(FIGURES, (0.0, 0.0, 0.0, 1.0), strict=True))


def test_the_newest_begin_anew_once_arrivals_are_numbered_anew() -> None:
    replay = eight_rows(8)
    replay.writer._offered = 2**ARRIVAL_BITS - 1
    replay.extend(steps([6.0]))  # in place of row 1, which ends an episode; the newest is this one
    assert figures(replay) == pytest.approx(
        dict(zip(FIGURES, ((4 + 2 + 1) / 16, 0.25, 1.0, (18.0 / 4) / 6.0), strict=True))
    )


def test_a_frame_store_that_is_full_counts_alike() -> None:
    """Each row has frames of its own, of which there is room for those of three rows."""
    frames = {"frame_stack": 1, "image_key": "observation", "frame_capacity": 6}
    replay = recipes.surprise_retention(
        4, 2, rule=SurpriseOnly(), initial_surprise=squared_reward, priority_exponent=0.0, seed=0, **frames
    )
    errors = [4.0, 2.0, 1.0, 3.0, 0.5]
    rows = steps(errors, ends=(1,))
    images = torch.arange(10, dtype=torch.uint8).reshape(5, 2, 1, 1, 1).expand(5, 2, 1, 2, 2).clone()
    rows["observation"], rows["next", "observation"] = images[:, 0], images[:, 1]
    replay.extend(rows)
    assert replay.stats()["frames_held"] == 6 and len(replay) == 3
    kept, newest = (4.0 + 2.0 + 3.0) / 3, (2.0 + 1.0 + 3.0 + 0.5) / 4
    ages = (4 + 3 + 1) / 3
    assert figures(replay) == pytest.approx(
        dict(zip(FIGURES, (ages / 4, 1 / 3, (1 / 3) / 0.25, kept / newest), strict=True))
    )
