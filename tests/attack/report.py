# SPDX-License-Identifier: Apache-2.0
"""What an attack counted and what it found."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Report:
    """Figures of an attack by name, and its findings: each a promise that was broken, and by which seed."""

    figures: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def count(self, name: str, by: int = 1) -> None:
        self.figures[name] += by

    @contextmanager
    def round(self, name: str) -> Iterator[None]:
        """A round of an attack: whatever it raises is a finding, and the next round goes on."""
        try:
            yield
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = "" if isinstance(error, AssertionError) else f" ({type(error).__name__} in {where.name})"
            self.findings.append(f"{name}: {error}{place}")

    def add(self, other: Report) -> None:
        self.figures.update(other.figures)
        self.findings.extend(other.findings)

    def __str__(self) -> str:
        figures = ", ".join(f"{count:,} {name}" for name, count in self.figures.items())
        findings = [f"    {one}" for one in self.findings[:20]]
        return "\n".join([f"{figures or 'nothing done'}; {len(self.findings)} findings", *findings])
