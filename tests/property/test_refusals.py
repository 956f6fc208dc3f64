# SPDX-License-Identifier: Apache-2.0
"""A call that is refused, anywhere in the history of any buffer, changes nothing: it goes on as one never asked.

The calls and the variants of every recipe are those of the attacks, which go on for longer.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attack.refusals import REASONS, refusals
from tests.attack.states import difference
from tests.attack.variants import VARIANTS, Variant
from tests.twins import Twins

CALLS = st.one_of(
    st.tuples(st.just("extend"), st.sampled_from([1, 3, 8, 30])),
    st.tuples(st.sampled_from(["feed back", "flush", "empty"]), st.just(0)),
    st.tuples(st.just("refuse"), st.integers(0, 99)),
)


class Asked(Twins):
    """Only the first is also called in ways that it refuses."""

    def refuse(self, number: int) -> None:
        found = list(refusals(self.replays[0], self.variant).items())
        self.ask(*found[number % len(found)])

    def refuse_all(self) -> None:
        for name, call in refusals(self.replays[0], self.variant).items():
            self.ask(name, call)

    def ask(self, name: str, call) -> None:
        before = self.replays[0].state_dict()
        with pytest.raises(REASONS):
            call(self.replays[0], self.variant.world(7).take(3))
        found = difference(before, self.replays[0].state_dict())
        assert found is None, f"{name} of {self.variant}: {found}"


@pytest.mark.slow
@settings(max_examples=40)
@given(variant=st.sampled_from(VARIANTS), calls=st.lists(CALLS, min_size=1, max_size=12))
def test_a_refused_call_anywhere_in_a_history_changes_nothing(variant: Variant, calls: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        twins = Asked(variant, Path(folder))
        twins.go(calls)
        twins.refuse_all()
        twins.extend(3)
        twins.feed_back(0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_call_that_a_used_buffer_refuses_changes_nothing(variant: Variant, tmp_path: Path) -> None:
    twins = Asked(variant, tmp_path)
    for count in (3, 20, 8):
        twins.extend(count)
        twins.feed_back(0)
    twins.refuse_all()
    for _ in range(3):
        twins.feed_back(0)
        twins.extend(5)
