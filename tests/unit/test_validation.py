# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lightning_replay.options import (
    ABOVE_ZERO,
    BELOW_ONE,
    LARGEST,
    check_kind,
    checked_bound,
    checked_choice,
    checked_count,
    checked_counts,
    checked_entries,
    checked_flag,
    checked_number,
    checked_numbers,
    checked_seed,
    checked_share,
    did_you_mean,
    range_of,
)


def test_numbers_of_numpy_become_plain_ones() -> None:
    assert type(checked_count("n", np.int64(3))) is int
    assert type(checked_number("x", np.float32(0.5))) is float
    assert type(checked_seed(np.int64(3))) is int


def test_shares_flags_choices_and_seeds() -> None:
    assert checked_share("share", 0) == 0.0
    with pytest.raises(ValueError, match=r"share is 0; it must be a number in \(0, 1\]"):
        checked_share("share", 0, lowest=ABOVE_ZERO)
    assert checked_flag("flag", False) is False
    with pytest.raises(TypeError, match="flag is 1; it must be True or False"):
        checked_flag("flag", 1)
    assert checked_choice("backend", "torch", ("auto", "torch")) == "torch"
    with pytest.raises(
        ValueError, match=r"backend is 'torhc'; it must be one of 'auto', 'torch'. Did you mean 'torch'"
    ):
        checked_choice("backend", "torhc", ("auto", "torch"))
    assert type(checked_choice("backend", np.str_("torch"), ("auto", "torch"))) is str
    with pytest.raises(ValueError, match="it must be one of None, 1"):
        checked_choice("option", True, (None, 1))
    assert checked_seed(None) is None and checked_seed(2**64 - 1) == 2**64 - 1 and checked_seed(-(2**63)) == -(2**63)
    for wrong, error in ((2**64, ValueError), ("a", TypeError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="seed is .*64 bits, or None"):
            checked_seed(wrong)


def test_ranges_in_words() -> None:
    assert range_of(-LARGEST, LARGEST) == "a finite number" and range_of(0.0, 1.0) == "a number in [0, 1]"
    assert range_of(0.0, LARGEST) == "a finite number from 0 on"
    assert range_of(ABOVE_ZERO, LARGEST) == "a finite number above 0"
    assert range_of(0.0, BELOW_ONE) == "a number in [0, 1)"
    assert range_of(ABOVE_ZERO, BELOW_ONE) == "a number in (0, 1)"
    with pytest.raises(ValueError, match=r"^c is 1.0; it must be a number in \[0, 1\)$"):
        checked_number("c", 1.0, 0.0, BELOW_ONE)


def test_objects_and_functions() -> None:
    check_kind("path", None, str | None, "a path, or None")
    check_kind("score", len, Callable, "a function")
    for value in (3, str):  # neither another object nor the class itself
        with pytest.raises(TypeError, match=r"^path is .*; it must be a path, or None$"):
            check_kind("path", value, str | None, "a path, or None")
        with pytest.raises(TypeError, match=r"^score is .*; it must be a function$"):
            check_kind("score", value, Callable, "a function")


def test_sequences_of_numbers() -> None:
    for values in ([1, 2], (1, 2), np.array([1, 2]), range(1, 3)):
        assert checked_counts("sizes", values) == [1, 2] and checked_numbers("goal", values) == [1.0, 2.0]
    assert checked_counts("sizes", ()) == []
    assert {type(size) for size in checked_counts("sizes", np.array([1, 2]))} == {int}
    for values in ("12", 12, None, {1, 2}):
        with pytest.raises(TypeError, match="sizes is .*; it must be a sequence of numbers"):
            checked_counts("sizes", values)
    with pytest.raises(TypeError, match=r"^sizes\[1\] is 2.5; it must be a whole number from 1 on$"):
        checked_counts("sizes", [1, 2.5])
    with pytest.raises(ValueError, match=r"^sizes\[0\] is 0; it must be a whole number from 1 on$"):
        checked_counts("sizes", [0])
    with pytest.raises(ValueError, match=r"^goal\[0\] is nan; it must be a finite number$"):
        checked_numbers("goal", [float("nan")])
    with pytest.raises(TypeError, match="order is 'near'; it must be names"):
        checked_entries("order", "near", "names")


def test_bounds() -> None:
    assert [checked_bound("low", value) for value in (None, 3, float("-inf"))] == [None, 3.0, float("-inf")]
    for value, error in (("3", TypeError), (True, TypeError), (float("nan"), ValueError)):
        with pytest.raises(error, match="low is .*; it must be a number, or None where there is no bound"):
            checked_bound("low", value)


def test_similar_names_are_suggested() -> None:
    assert did_you_mean("acton", ["action", "surprise"]) == ". Did you mean 'action'?"
    assert did_you_mean("xyz", ["action"]) == did_you_mean(3, ["action"]) == ""
