# SPDX-License-Identifier: Apache-2.0
"""What the configuration files that come with the library reach, each run from the command line of its integration."""

from __future__ import annotations

import contextlib
import runpy
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_replay.options import config_files
from tests.benchmarks.learning.experiment import Experiment, Measure, Settings, final, hash_of, last_of
from tests.benchmarks.learning.learners.shipped_files import contents, evaluations, random_return, seeded
from tests.benchmarks.learning.recorder import Recorder
from tests.benchmarks.learning.units import ROOT

HALF_FIELD = "lightning/dpcer_mpdqn_half_field.yaml"  # has an experiment of its own
UNIFORM, MIXUP = (f"lightning/{method}_td3_halfcheetah.yaml" for method in ("uniform", "nmer"))
# Three seeds of these take more than five core hours: the steps that are run.
PARTS = {
    "lightning/ct_td3_halfcheetah.yaml": 15_000,
    "lightning/nmer_sac_halfcheetah.yaml": 20_000,
    "lightning/plr_ucb_drac_ppo_car_racing.yaml": 20_480,
    "lightning/retention_rainbow_atari.yaml": 10_000,
    "rllib/retention_dqn_atari.yaml": 5_000,
}
WHOLE = [file for file in config_files() if file not in {HALF_FIELD, UNIFORM, MIXUP, *PARTS}]


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the evaluations of a file's run, and the return of random actions in its environment."""
    (seed,) = seeds
    file, steps = settings["file"], settings["env_steps"]
    if file.startswith("rllib/"):
        arguments = [f"--set=debugging.seed={seed}", f"--set=stop.env_steps={steps}"]
    else:
        arguments = [*seeded(seed), f"--data.init_args.env_steps={steps}"]
        if "levels" in contents(file)["data"]["init_args"]:
            arguments.append(f"--data.init_args.levels.init_args.seed={seed}")
        elif settings["warmup_steps"]:
            arguments.append(f"--data.init_args.warmup_steps={settings['warmup_steps']}")
    with contextlib.ExitStack() as stack:
        # What the command keeps in its folder is how an interrupted run goes on.
        folder = out.folder / "run" if out.folder else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        if "halves" in file and not (folder / "runs").exists():
            demonstrate = runpy.run_path(str(ROOT / "examples/lightning_halves.py"))["demonstrate"]
            demonstrate(settings["demonstrations"]).save(folder / "runs/lightning_halves/demonstrations")
        spent = folder / "seconds.txt"
        out.add_seconds(float(spent.read_text()) if spent.exists() else 0.0)
        try:
            found = evaluations(file, [*arguments, *settings["arguments"]], folder)
        finally:
            spent.write_text(str(out.content["seconds"]))
    for step, value in found:
        out.record(step, **{"return": [value]})
    out.final(random_return=[random_return(file, seed, settings["random_episodes"])])


def arm(file: str, env_steps: int | None = None) -> Settings:
    """Returns the settings of a file, by default at its full length."""
    content = contents(file)
    full = content["stop"] if "stop" in content else content["data"]["init_args"]
    return {"file": file, "env_steps": env_steps or full["env_steps"], "contents": hash_of(content)}


def last_three(digits: int) -> Measure:
    """Returns the mean of a run's last three evaluations, printed with these digits."""
    return last_of("return", 3, "mean return of the last three evaluations", digits=digits)


def experiment_of(name: str, title: str, arms: Iterable[Settings], **changes: Any) -> Experiment:
    """Returns an experiment with an arm for each file, which are not compared unless pairs are given."""
    made = {settings["file"]: settings for settings in arms}
    options: dict[str, Any] = {
        "seeds": range(700, 703),
        "pilot_seeds": (1,),
        "comparisons": (),
        "measure": last_three(2),
        **changes,
    }
    return Experiment(
        name=name,
        title=title,
        claim="none of a paper: what users run learns.",
        task="The command in the first line of each file, with a seed for everything. Files of RLlib that evaluate "
        "nothing show the mean return of the last episodes in training, exploration included.",
        length="the steps of each file, {random_episodes} episodes of random actions",
        arms=made,
        settings={"warmup_steps": None, "arguments": [], "demonstrations": 100, "random_episodes": 20},
        fast={"env_steps": 330, "warmup_steps": 300, "demonstrations": 1, "random_episodes": 1},
        also=(final("random_return", "of random actions", digits=2),),
        run=run,
        **options,
    )


EXPERIMENTS = (
    experiment_of(
        "files-lightning",
        "Files of Lightning at their full length",
        (arm(file) for file in WHOLE if file.startswith("lightning/")),
    ),
    experiment_of(
        "files-rllib",
        "Files of RLlib at their full length",
        (arm(file) for file in WHOLE if file.startswith("rllib/")),
        pilot_seeds=(1, 2),
    ),
    experiment_of(
        "files-parts",
        "Files of long runs, to a part",
        (arm(*part) for part in PARTS.items()),
        measure=last_of("return", 1, "return of the last evaluation", digits=2),  # others may be before any update
    ),
    experiment_of(
        "files-half-cheetah",
        "HalfCheetah-v5 from the command line: the shipped files, to 25,000 steps",
        (arm(file, 25_000) for file in (UNIFORM, MIXUP)),
        seeds=range(700, 705),
        comparisons=((MIXUP, UNIFORM),),
        measure=last_three(0),
    ),
)
