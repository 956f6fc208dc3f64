# SPDX-License-Identifier: Apache-2.0
"""Definition of an experiment on learning: arms over paired seeds, fixed in a file before they are run.

Each file in ``experiments/`` has a tuple ``EXPERIMENTS``. The runner (``runner.py``, started by ``make experiments`` or
``python -m tests.benchmarks.learning``) splits an experiment into units: one arm with a group of ``seeds_together``
seeds that are stacked in one process. Each unit calls ``run(settings, seeds, out)`` once:

* ``settings``: those of the experiment, updated by those of the arm. They are JSON and decide what is computed: a kept
  unit of other settings is refused, so everything that may change between two versions of the file is a setting.
  Constants of the learners and versions of packages are not compared: a unit records the commit that computed it.
* ``seeds``: of this unit. All randomness of a run follows from its seed, so that arms are paired.
* ``out``: takes the results, :class:`~tests.benchmarks.learning.recorder.Recorder`. ``out.record(step, name=values)``
  adds a point to curves, one value for each seed; ``out.final(name=values)`` gives numbers of the end. A run of more
  than a few minutes calls ``out.checkpoint(save)`` where it can be resumed, at best after each evaluation, and begins
  with ``if out.resume_from is not None``. ``save(folder)`` writes networks, optimisers, random generators,
  ``replay.save(folder / "replay")``; environments without a readable state begin a new episode when resumed.

A finished unit is kept in ``.experiments`` and not computed again. An experiment is complete, and its files in
``results`` are written, when all units of its seeds are finished. Example of a file::

    EXPERIMENTS = (
        Experiment(
            name="nmer-short",
            title="HalfCheetah-v5, TD3 at a replay ratio of 20",
            claim="Neighbourhood mixup learns faster (Sander et al. 2022, https://...): 6467 to 9340 at 200,000 steps.",
            task="5,000 random steps, 3,000 learned from; networks of 64 and 64 units. Pilot seeds chose the rate.",
            length="{env_steps:,} steps",
            arms={"uniform": {"replay": "uniform"}, "neighbourhood mixup": {"replay": "nmer", "num_neighbors": 10}},
            settings={"env_steps": 8_000, "learning_rate": 1e-3},
            fast={"env_steps": 5_100},
            seeds=range(100, 110),
            pilot_seeds=(80, 81),
            measure=mean_of("return", "mean return over the run", digits=0),
            also=(last_of("return", 3, "mean return of the last three evaluations", digits=0),),
            panels=(Panel("return", "evaluation return"),),
            run=run,
            seeds_together=10,
        ),
    )


    def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
        learner = Learner(settings, seeds)
        if out.resume_from is not None:
            learner.load(out.resume_from)
        while learner.env_steps < settings["env_steps"]:
            learner.play_and_learn(500)
            out.record(learner.env_steps, **{"return": learner.evaluate()})  # an array [seeds]
            out.checkpoint(learner.save)
        out.final(nbytes=[replay.nbytes for replay in learner.replays])

The first command that writes its results needs a place for it in ``METHODS`` of ``evidence.py``, the lists of
``docs/evidence.md``; ``--fast``, ``--pilot`` and ``--results FOLDER`` do not.

Packages of an optional extra are imported inside ``run``, so that the other experiments run without them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.benchmarks.learning.comparison import Contrast, difference_of_means, ratio_of_medians
from tests.benchmarks.learning.recorder import Recorder, SeedRun

Settings = dict[str, Any]
Pairs = Sequence[tuple[str, str]]  # each an arm and the one it is compared with
MOST_HEADLINES = 4


@dataclass(frozen=True)
class Measure:
    """One number of a seed's run, and how arms are compared by it.

    Args:
        name: for tables.
        of: the number, finite; a run that never reached something counts with a bound.
        higher_is_better: whether the arm of the larger number is the better one.
        digits: after the point.
        contrast: compares the numbers of two arms: ``difference_of_means`` or ``ratio_of_medians``.
    """

    name: str
    of: Callable[[SeedRun], float]
    higher_is_better: bool = True
    digits: int = 3
    contrast: Contrast = difference_of_means


def mean_of(curve: str, name: str, *, skip: int = 1, **options: Any) -> Measure:
    """Returns the mean of a curve's points without the first ``skip``, which are those before learning."""
    return Measure(name, lambda run: float(np.mean(run.curves[curve][skip:])), **options)


def last_of(curve: str, points: int, name: str, **options: Any) -> Measure:
    """Returns the mean of a curve's last points."""
    return Measure(name, lambda run: float(np.mean(run.curves[curve][-points:])), **options)


def final(key: str, name: str, **options: Any) -> Measure:
    """Returns a number that was given to ``out.final``."""
    return Measure(name, lambda run: run.final[key], **options)


def steps_to(key: str, name: str) -> Measure:
    """Returns a number of steps that was given to ``out.final``: fewer are better, compared by ratios of medians."""
    return final(key, name, higher_is_better=False, digits=0, contrast=ratio_of_medians)


def combination(first: str, second: str, both: str = "both", neither: str = "uniform") -> dict[str, Pairs]:
    """Returns ``comparisons`` and ``headline`` of arms with one of two methods, with both and with neither."""
    alone, together = [(first, neither), (second, neither)], [(both, first), (both, second)]
    return {"comparisons": [*alone, (both, neither), *together], "headline": alone + together}


@dataclass(frozen=True)
class Panel:
    """A panel of the picture: a curve of several arms, mean over seeds with a band of one standard error.

    Args:
        curve: its name in ``out.record``.
        label: of the vertical axis.
        arms: those that are drawn; all if empty.
        title: above the panel.
        block: points that are averaged to one.
    """

    curve: str
    label: str
    arms: Sequence[str] = ()
    title: str = ""
    block: int = 1


@dataclass(frozen=True)
class Experiment:
    """Arms over paired seeds, with everything fixed that decides what is computed.

    Args:
        name: of the files in ``results``, and for ``--only``; small letters, digits and hyphens.
        title: of page and picture.
        claim: of the paper, with its figure and its reference.
        task: what is learned and how, and what was chosen on pilot seeds, for the page.
        length: of a run, with settings in braces as ``str.format`` has them: ``"{env_steps:,} steps"``.
        arms: settings of each arm by its name.
        settings: of all arms; an arm's own take precedence.
        seeds: those that count, not used before.
        pilot_seeds: those on which settings were chosen; run by ``--pilot``.
        measure: the primary one, which decides the verdict.
        run: plays and learns with some seeds of one arm, see the module.
        fast: settings of ``--fast``, a run of seconds without results.
        also: further measures, for the tables.
        comparisons: pairs of an arm and the one it is compared with; all with the first arm by default.
        headline: at most four of these pairs, for the lists of all experiments; the first four if empty.
        panels: of the picture.
        xlabel: what the steps of ``out.record`` count.
        seeds_together: how many seeds a unit stacks.
        notes: Markdown at the end of the page: what did not work, and why.
    """

    name: str
    title: str
    claim: str
    task: str
    length: str
    arms: Mapping[str, Settings]
    seeds: Sequence[int]
    pilot_seeds: Sequence[int]
    measure: Measure
    run: Callable[[Settings, Sequence[int], Recorder], None]
    settings: Settings = field(default_factory=dict)
    fast: Settings = field(default_factory=dict)
    also: Sequence[Measure] = ()
    comparisons: Pairs | None = None
    headline: Pairs = ()
    panels: Sequence[Panel] = ()
    xlabel: str = "environment steps"
    seeds_together: int = 1
    notes: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise ValueError(f"name is {self.name!r}; use small letters, digits and hyphens.")
        for what, seeds in (("seeds", self.seeds), ("pilot_seeds", self.pilot_seeds)):
            if len(set(seeds)) != len(seeds):
                raise ValueError(f"{self.name}: {what} has repetitions: {list(seeds)}.")
        measures = [each.name for each in (self.measure, *self.also)]
        if len(set(measures)) < len(measures):
            raise ValueError(f"{self.name}: names of measures must differ; got {measures}.")
        if both := set(self.seeds) & set(self.pilot_seeds):
            raise ValueError(
                f"{self.name}: {sorted(both)} are pilot seeds and count too; choose seeds not used before."
            )
        named = {arm for pair in self.comparisons or () for arm in pair} | {
            arm for panel in self.panels for arm in panel.arms
        }
        if unknown := named - set(self.arms):
            raise ValueError(f"{self.name}: comparisons or panels name {sorted(unknown)}; arms are {list(self.arms)}.")
        if len({slug(arm) for arm in self.arms}) < len(self.arms):
            raise ValueError(f"{self.name}: names of arms must differ in letters or digits; got {list(self.arms)}.")
        if len(self.headline) > MOST_HEADLINES or not set(self.headline) <= set(self.pairs):
            raise ValueError(
                f"{self.name}: headline is {list(self.headline)}; choose at most {MOST_HEADLINES} of the comparisons "
                f"{list(self.pairs)}."
            )
        try:
            names_settings = self.run_length != self.length
        except KeyError as error:
            raise ValueError(f"{self.name}: length {self.length!r} names {error}, which is no setting.") from error
        if not names_settings:
            raise ValueError(
                f"{self.name}: length is {self.length!r}; name settings in braces: '{{env_steps:,}} steps'."
            )

    @property
    def pairs(self) -> Pairs:
        """Arms that are compared, ``(arm, other)``."""
        first, *others = self.arms
        return [(arm, first) for arm in others] if self.comparisons is None else self.comparisons

    @property
    def headlines(self) -> Pairs:
        """Comparisons for the lists of all experiments, at most four."""
        return self.headline or self.pairs[:MOST_HEADLINES]

    @property
    def run_length(self) -> str:
        """Length of a run, from the settings."""
        return self.length.format_map(self.settings)

    def settings_of(self, arm: str) -> Settings:
        """Returns the settings of the experiment, updated by those of the arm, as they are read back from JSON."""
        return json.loads(json.dumps({**self.settings, **self.arms[arm]}))


def slug(text: str) -> str:
    """Returns the name of a folder.

    Example:
        >>> slug("PLR, temperature 0.1")
        'plr-temperature-0-1'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def hash_of(settings: Settings) -> str:
    """Returns a hash of settings as JSON, independent of their order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
