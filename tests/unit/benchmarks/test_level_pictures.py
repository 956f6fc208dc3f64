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
    by_rank, in_proportion = (KEPT["spread"][f"{kind}, staleness weight 0.1"] for kind in ("by rank", "in proportion"))
    (low, _, one, three), (first, _, second, last) = by_rank["effective levels"], by_rank["drawn twice"]
    assert f"there are {low:.1f} effective levels and {first:.0%}".replace("%", " %") in PAGE
    assert f"at 1 there are {one:.0f} and {100 * second:.0f} %, at 3 there are {three:,.0f} and {last:.0%}"[:-1] in PAGE
    levels, twice = in_proportion["effective levels"], [100 * share for share in in_proportion["drawn twice"]]
    assert (
        f"there are {levels[0]:.0f} at 0.1 and {levels[2]:,.0f} at 1, and {min(twice):.0f} to {max(twice):.0f} %"
        in PAGE
    )


def test_the_page_quotes_the_skills_and_the_batches() -> None:
    kept = KEPT["wrong scores"]
    (none, few, many), (uniform_none, uniform_few, uniform_many) = (
        kept[f"{arm}: skill by share of coins"].values() for arm in ("learnability", "uniform")
    )
    assert (
        f"is {none:.1f} with learnability and {uniform_none:.1f} with uniform levels; with one coin in ten {few:.1f} "
        f"and {uniform_few:.1f}; with four in ten {many:.1f} and {uniform_many:.1f}." in PAGE
    )
    drawn, uniform = (
        {kind: f"{100 * share:.0f} %" for kind, share in kept[f"{arm}: shares of the last 100 batches"].items()}
        for arm in ("learnability", "uniform")
    )
    assert (
        f"unsolvable levels are {drawn['unsolvable']} of a batch of learnability ({uniform['unsolvable']} of a uniform "
        f"one), solved ones {drawn['ladder, solved']} ({uniform['ladder, solved']}), and coins {drawn['coins']} "
        f"({uniform['coins']})." in PAGE
    )


def test_the_page_quotes_what_staleness_weights_do() -> None:
    stale, skill = KEPT["staleness weight"].values()
    assert [round(stale[weight], 1) for weight in ("0", "0.1", "0.3")] == [0.9] * 3
    assert "nine in ten of the levels" in PAGE
    low, middle, high, highest, uniform = (f"{value:.1f}" for value in skill.values())
    assert f"the skill is {low}, {middle} and {high}; with 0.6 it is {highest}," in PAGE
    assert f"which use none, {uniform}." in PAGE


def test_the_table_of_prompts_is_the_kept_one() -> None:
    page, kept = (DOCS / "prompts.md").read_text(), list(KEPT.values())[1]
    for name, (effective, twice, different) in kept.items():
        levels = f"{effective:.1f}" if effective < 10 else f"{effective:,.0f}"
        of_draws = "2,269 of 2,560" if twice == 2_269 else f"{twice:,}"
        assert f"| {name} | {levels} | {of_draws} | {different:,} |" in page
