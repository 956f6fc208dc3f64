# SPDX-License-Identifier: Apache-2.0
"""The figures of the simulated learner that the pages on levels quote."""

from __future__ import annotations

import json

import pytest

from lightning_replay.levels import UniformLevels
from tests.benchmarks.level_pictures import FILE, LEVELS, learn

DOCS = FILE.parents[3] / "docs"
PAGE = (DOCS / "levels-when.md").read_text()
KEPT = json.loads(FILE.read_text())


def test_a_run_repeats_the_kept_one() -> None:
    kept = KEPT["wrong scores"]["uniform: skill by share of coins"]["0.1"]
    assert learn(UniformLevels(LEVELS, seed=0))["skill"][-1] == pytest.approx(kept, abs=1e-4)


def test_the_page_quotes_the_spread_of_draws() -> None:
    for kind, temperatures in (("by rank", (0.1, 1, 3)), ("in proportion", (0.1, 1))):
        kept = KEPT["spread"][f"{kind}, staleness weight 0.1"]
        for temperature in temperatures:
            number = kept["temperatures"].index(temperature)
            levels, twice = kept["effective levels"][number], kept["drawn twice"][number]
            effective = f"{levels:.1f}" if levels < 10 else f"{levels:,.0f}"
            assert f"| {kind}, {temperature} | {effective} | {twice:.0%} |" in PAGE


def test_the_page_quotes_the_skills_and_the_batches() -> None:
    kept = KEPT["wrong scores"]
    skills, of_uniform = (
        [f"{skill:.1f}" for skill in kept[f"{arm}: skill by share of coins"].values()]
        for arm in ("learnability", "uniform")
    )
    for coins, *pair in zip(
        ("without coins", "with one coin in ten", "with four in ten"), skills, of_uniform, strict=True
    ):
        assert f"| skill {coins} | {pair[0]} | {pair[1]} |" in PAGE
    drawn, uniform = (kept[f"{arm}: shares of the last 100 batches"] for arm in ("learnability", "uniform"))
    for name, kind in (
        ("unsolvable levels", "unsolvable"),
        ("solved levels", "ladder, solved"),
        ("coins", "coins"),
    ):
        assert f"| {name} in the last 100 batches | {drawn[kind]:.0%} | {uniform[kind]:.0%} |" in PAGE


def test_the_page_quotes_what_staleness_weights_do() -> None:
    stale, skill = KEPT["staleness weight"].values()
    assert [round(stale[weight], 1) for weight in ("0", "0.1", "0.3")] == [0.9] * 3
    assert "nine in ten of the learnable levels" in PAGE
    assert f"| skill after 100 updates | {' | '.join(f'{value:.1f}' for value in skill.values())} |" in PAGE


def test_the_table_of_prompts_is_the_kept_one() -> None:
    page, kept = (DOCS / "prompts.md").read_text(), list(KEPT.values())[1]
    for name, (effective, twice, different) in kept.items():
        levels = f"{effective:.1f}" if effective < 10 else f"{effective:,.0f}"
        of_draws = "2,269 of 2,560" if twice == 2_269 else f"{twice:,}"
        assert f"| {name} | {levels} | {of_draws} | {different:,} |" in page
