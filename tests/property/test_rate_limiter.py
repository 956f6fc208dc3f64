# SPDX-License-Identifier: Apache-2.0
"""The rate limiter over random histories: never stuck, within its bounds, and equal to Reverb's rule."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_replay.sharded.rate_limiter import RateLimiter

ratios = st.integers(8, 64 * 64).map(lambda numerator: numerator / 64)  # exact in the arithmetic of floats
counts = st.integers(1, 60)


@st.composite
def limiters(draw: Any) -> RateLimiter:
    """Limiters with every error buffer that is accepted, the smallest included."""
    ratio, batch, insert = draw(ratios), draw(counts), draw(counts)
    smallest = max(batch, ratio * insert)
    return RateLimiter(
        ratio,
        min_size_to_sample=draw(counts),
        error_buffer=smallest + draw(st.sampled_from([0, 0, 1, 50])),
        batch_size=batch,
        insert_size=insert,
    )


class ReverbRule:
    """``CanInsert`` and ``CanSample`` of reverb/cc/rate_limiter.cc, without deletions."""

    def __init__(self, limiter: RateLimiter) -> None:
        self.ratio, self.first = limiter.samples_per_insert, limiter.min_size_to_sample
        self.lowest = self.ratio * self.first - limiter.error_buffer
        self.highest = self.ratio * self.first + limiter.error_buffer
        self.inserts = self.samples = 0

    def can_insert(self, num_inserts: int) -> bool:
        if self.inserts + num_inserts <= self.first:
            return True
        return (num_inserts + self.inserts) * self.ratio - self.samples <= self.highest

    def can_sample(self, num_samples: int) -> bool:
        if self.inserts < self.first:
            return False
        return self.inserts * self.ratio - self.samples - num_samples >= self.lowest


@given(limiters(), st.lists(st.booleans(), max_size=80))
def test_every_decision_is_that_of_reverb(limiter: RateLimiter, wishes: list[bool]) -> None:
    reverb = ReverbRule(limiter)
    for wants_insert in wishes:
        size = reverb.inserts  # nothing is evicted
        # Reverb inserts single items: a request that crosses the first size is left out there, and permitted here.
        may_insert = size < reverb.first or reverb.can_insert(limiter.insert_size)
        assert limiter.may_insert(size, 0) == may_insert
        assert limiter.may_sample(size) == reverb.can_sample(limiter.batch_size)
        if wants_insert and may_insert:
            limiter.insert(limiter.insert_size, size)
            reverb.inserts += limiter.insert_size
        elif not wants_insert and limiter.may_sample(size):
            limiter.sample()
            reverb.samples += limiter.batch_size
        if size >= reverb.first:
            assert limiter.balance == reverb.inserts * reverb.ratio - reverb.samples - reverb.ratio * reverb.first


@given(limiters(), st.integers(0, 1000), st.floats(-1e9, 1e9))
def test_from_any_state_a_draw_or_a_request_is_permitted(limiter: RateLimiter, size: int, balance: float) -> None:
    limiter.load_state_dict({**limiter.state_dict(), "balance": balance})
    assert limiter.may_sample(size) or limiter.may_insert(size, 0)


events = st.sampled_from(["request", "request", "arrive", "arrive", "draw", "draw", "lose rows", "lose request"])


@given(limiters(), st.booleans(), st.lists(events, max_size=120), st.integers(1, 4))
def test_any_history_stays_within_the_bounds_and_goes_on(limiter, is_filled, history, most) -> None:
    size = pending = 0
    if is_filled:
        limiter.insert(limiter.min_size_to_sample, 0)
        size = limiter.min_size_to_sample
    chunk, bound = limiter.insert_size, limiter.error_buffer
    losses = 0
    for event in history:
        if event == "request" and pending < most and limiter.may_insert(size, pending * chunk):
            pending += 1
        elif event == "arrive" and pending:
            limiter.insert(chunk, size)
            size, pending = size + chunk, pending - 1
        elif event == "draw" and limiter.may_sample(size):
            limiter.sample()
        elif event == "lose rows":  # a shard of the buffer dies
            losses += size > 0
            size //= 2
        elif event == "lose request":
            pending = max(0, pending - 1)
        # a request that crosses the first size is permitted, however much is owed from before rows were lost
        assert -bound <= limiter.balance <= bound + (limiter.samples_per_insert * chunk * most if losses else 0)
    drawn = limiter.stats()["num_rows_sampled_lifetime"]
    for _ in range(5000):  # each side acts whenever it may
        if limiter.may_sample(size):
            limiter.sample()
        elif limiter.may_insert(size, 0):
            limiter.insert(chunk, size)
            size += chunk
        else:
            raise AssertionError("neither side may go on")
        if limiter.stats()["num_rows_sampled_lifetime"] >= drawn + 5 * limiter.batch_size:
            break
    else:
        raise AssertionError("nothing is drawn any more")
