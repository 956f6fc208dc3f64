# SPDX-License-Identifier: Apache-2.0
"""Prioritized Level Replay as its rules are written, over dictionaries, without anything that makes it fast."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Episode:
    """In flight: what was played since when, and the mean of the terms of the score so far."""

    level: int
    started: int
    mean: float = 0.0
    steps: int = 0


@dataclass
class LevelOracle:
    """Follows the choices of a buffer and computes what scores, timestamps and probabilities must then be."""

    capacity: int
    temperature: float
    staleness_weight: float
    c: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    timestamps: dict[int, int] = field(default_factory=dict)
    flight: dict[int, list[Episode]] = field(default_factory=dict)

    def begin(self, actor: int, level: int) -> None:
        self.c += 1
        if level in self.scores:
            self.timestamps[level] = self.c
        self.flight.setdefault(actor, []).append(Episode(level, self.c))

    def update(self, actor: int, level: int, rewards: list[float], done: bool) -> None:
        episode = next(one for one in self.flight[actor] if one.level == level)
        # merged as in appendix C: the mean of all terms at once could be exactly 0 where this is not, or the reverse
        steps = len(rewards)
        episode.mean = (sum(rewards) / steps * steps + episode.mean * episode.steps) / (steps + episode.steps)
        episode.steps += steps
        if done:
            self.flight[actor].remove(episode)
            self.store(episode)

    def flush(self) -> None:
        for episodes in self.flight.values():
            for episode in episodes:
                if episode.mean != 0.0:
                    self.store(episode)
                episode.mean, episode.steps = 0.0, 0

    def store(self, episode: Episode) -> None:
        level, score = episode.level, episode.mean
        if level not in self.scores and len(self.scores) == self.capacity:
            probabilities = self.probabilities()
            least = min(probabilities.values())
            victim = min(
                (one for one, p in probabilities.items() if abs(p - least) < 1e-12), key=lambda one: self.scores[one]
            )
            if not self.scores[victim] < score:
                return
            del self.scores[victim], self.timestamps[victim]
        self.scores[level] = score
        self.timestamps[level] = max(episode.started, self.timestamps.get(level, 0))

    def probabilities(self) -> dict[int, float]:
        ranked = sorted(self.scores, key=lambda one: (-self.scores[one], self.timestamps[one]))
        by_rank = {level: (1 / rank) ** (1 / self.temperature) for rank, level in enumerate(ranked, start=1)}
        stale = {level: self.c - self.timestamps[level] for level in self.scores}
        rank_sum, stale_sum, rho = sum(by_rank.values()), sum(stale.values()), self.staleness_weight
        return {
            level: (1 - rho) * by_rank[level] / rank_sum
            + rho * (stale[level] / stale_sum if stale_sum else 1 / len(self.scores))
            for level in self.scores
        }
