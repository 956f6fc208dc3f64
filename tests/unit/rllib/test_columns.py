# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re

import numpy as np
import pytest

from rllib_ext.episodes import Columns

NESTED = {"camera": np.zeros((3, 4, 4, 3), np.uint8), "arm": (np.zeros((3, 2)), np.arange(3))}


def test_another_order_of_entries_is_the_same_space() -> None:
    columns = Columns("observation", {"a": np.zeros(2), "b": np.ones(2)})
    arrays = columns.flatten({"b": np.ones(2), "a": np.zeros(2)})
    assert [array.tolist() for array in arrays] == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("first", "later"), [(np.int32, np.int64), (np.int64, np.int32), (np.float32, np.float64), (np.float64, np.float32)]
)
def test_dtypes_of_the_first_rows_stay(first: type, later: type) -> None:
    columns = Columns("action", np.zeros(3, first))
    (array,) = columns.flatten(np.arange(2, dtype=later))
    assert array.dtype == first
    assert array.tolist() == [0, 1]


def test_what_cannot_be_cast_within_its_kind_is_refused() -> None:
    columns = Columns("action", np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="action has dtype float32; the first rows had int64"):
        columns.flatten(np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (np.zeros((3, 2)), "observation is ndarray; the first rows had the entries ['camera', 'arm']"),
        ({"camera": NESTED["camera"]}, "observation is ['camera']; the first rows had the entries ['camera', 'arm']"),
        ({**NESTED, "arm": (np.zeros((3, 2)),)}, "observation/arm is tuple; the first rows had 2 parts"),
        ({**NESTED, "arm": (np.zeros((3, 5)), np.arange(3))}, "observation/arm/0 has shape (5,); the first rows had"),
    ],
)
def test_another_space_is_refused(later: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Columns("observation", NESTED).flatten(later)


def test_a_space_without_entries_is_refused() -> None:
    with pytest.raises(ValueError, match="observation has no entries"):
        Columns("observation", {})
