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

from lightning_replay.replay import Replay
from tests.attack.refusals import REASONS, refusals
from tests.attack.states import difference, fingerprint
from tests.attack.variants import VARIANTS, Variant
from tests.attack.worlds import World

CALLS = st.one_of(
    st.tuples(st.just("extend"), st.sampled_from([1, 3, 8, 30])),
    st.tuples(st.sampled_from(["feed back", "flush", "empty"]), st.just(0)),
    st.tuples(st.just("refuse"), st.integers(0, 99)),
)


class Twins:
    """Two buffers that go through one history; only the first is also called in ways that it refuses."""

    def __init__(self, variant: Variant, folder: Path) -> None:
        self.variant = variant
        self.asked, self.spared = (variant.build(24, 6, 5, folder / name) for name in ("asked", "spared"))
        self.world: World = variant.world(5)

    def extend(self, count: int) -> None:
        rows = self.world.take(count)
        for replay in (self.asked, self.spared):
            replay.extend(rows)

    def feed_back(self, _: int) -> None:
        """Both draw the same, and learn the same of it."""
        batches = [_drawn(replay) for replay in (self.asked, self.spared)]
        if batches[0] is None or batches[1] is None:
            assert batches == [None, None]
            return
        assert fingerprint(batches[0].to_dict()) == fingerprint(batches[1].to_dict())
        for replay, batch in zip((self.asked, self.spared), batches, strict=True):
            replay.update_priority(batch, batch["index"].reshape(len(batch), -1)[:, 0].float())

    def flush(self, _: int) -> None:
        for replay in (self.asked, self.spared):
            replay.flush()

    def empty(self, _: int) -> None:
        for replay in (self.asked, self.spared):
            replay.empty()

    def refuse(self, number: int) -> None:
        found = list(refusals(self.asked, self.variant).items())
        self.ask(*found[number % len(found)])

    def refuse_all(self) -> None:
        for name, call in refusals(self.asked, self.variant).items():
            self.ask(name, call)

    def ask(self, name: str, call) -> None:
        before = self.asked.state_dict()
        with pytest.raises(REASONS):
            call(self.asked, self.variant.world(7).take(3))
        found = difference(before, self.asked.state_dict())
        assert found is None, f"{name} of {self.variant}: {found}"


def _drawn(replay: Replay):
    try:
        return replay.sample()
    except RuntimeError:  # none of the tables has enough rows yet
        return None


@settings(max_examples=60)
@given(variant=st.sampled_from(VARIANTS), calls=st.lists(CALLS, min_size=1, max_size=12))
def test_a_refused_call_anywhere_in_a_history_changes_nothing(variant: Variant, calls: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        twins = Twins(variant, Path(folder))
        for name, number in calls:
            getattr(twins, name.replace(" ", "_"))(number)
        twins.refuse_all()
        twins.extend(3)
        twins.feed_back(0)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_call_that_a_used_buffer_refuses_changes_nothing(variant: Variant, tmp_path: Path) -> None:
    twins = Twins(variant, tmp_path)
    for count in (3, 20, 8):
        twins.extend(count)
        twins.feed_back(0)
    twins.refuse_all()
    for _ in range(3):
        twins.feed_back(0)
        twins.extend(5)
