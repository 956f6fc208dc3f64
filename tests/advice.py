# SPDX-License-Identifier: Apache-2.0
"""Errors whose advice is followed: the call is refused, in words that name remedies, and each remedy is executed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

Call = Callable[[], Any]


class Advice(NamedTuple):
    """One refused call; ``says`` is a pattern of its advice, and the others are calls that do what it names."""

    name: str
    refused: Call
    says: str
    follow: tuple[Call, ...]


def advice(name: str, refused: Call, says: str, *follow: Call) -> Any:
    return pytest.param(Advice(name, refused, says, follow), id=name)


def assert_leads_on(one: Advice) -> None:
    with pytest.raises(Exception, match=one.says):
        one.refused()
    for remedy in one.follow:
        remedy()
