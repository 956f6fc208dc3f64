# SPDX-License-Identifier: Apache-2.0
"""Two buffers of one kind that go through one history, for tests of calls that may not make a difference."""

from __future__ import annotations

from pathlib import Path

from tests.attack.states import fingerprint
from tests.attack.variants import Variant


class Twins:
    def __init__(self, variant: Variant, folder: Path) -> None:
        self.variant, self.world = variant, variant.world(5)
        self.replays = [variant.build(24, 6, 5, folder / str(place)) for place in range(2)]

    def go(self, history: list[tuple[str, int]]) -> None:
        """Makes the calls of these names, each with a number."""
        for name, number in history:
            getattr(self, name.replace(" ", "_"))(number)

    def extend(self, count: int) -> None:
        rows = self.world.take(count)
        for replay in self.replays:
            replay.extend(rows)

    def feed_back(self, _: int) -> None:
        """Both draw the same, and learn the same of it."""
        drawn = []
        for replay in self.replays:
            try:
                batch = replay.sample()
            except RuntimeError as error:  # none of the tables has enough rows yet
                drawn.append(str(error))
                continue
            replay.update_priority(batch, batch["index"].reshape(len(batch), -1)[:, 0].float())
            drawn.append(fingerprint(batch.to_dict()))
        assert drawn[0] == drawn[1]

    def flush(self, _: int) -> None:
        for replay in self.replays:
            replay.store_pending()

    def empty(self, _: int) -> None:
        for replay in self.replays:
            replay.empty()
