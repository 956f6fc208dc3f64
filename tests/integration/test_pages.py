# SPDX-License-Identifier: Apache-2.0
"""Every Python block of README.md and docs/ runs, the blocks of a page one after the other.

``SHORTER`` lists what is changed in a block: numbers of steps and sizes of networks. EnvRunners and Learners keep their
numbers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_replay import hooks
from tests import prompt_stubs, simulator_stubs

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Libraries of these pages are not installed here.
STUBS = {"prompts-trainers.md": prompt_stubs, "simulators.md": simulator_stubs}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORTER = {  # the same code, with fewer environment steps, iterations, and samples, and with smaller networks
    "env_steps=6_000": "env_steps=1_050",
    "env_steps=8_000, warmup_steps=5_000": "env_steps=620, warmup_steps=600",
    "range(3_000)": "range(300)",
    "for iteration in range(4)": "for iteration in range(1)",
    "grace_period=2_500, max_t=10_000": "grace_period=500, max_t=500",
    "num_samples=8": "num_samples=1",
    "ray.init(num_cpus=8": "ray.init(num_cpus=8, ignore_reinit_error=True",  # the Ray that is there
    "debugging(seed=0)": 'debugging(seed=0).rl_module(model_config={"fcnet_hiddens": [8], "head_fcnet_hiddens": [8]})',
    "learners(num_learners=2)": "learners(num_learners=2).training(num_steps_sampled_before_learning_starts=80)"
    ".reporting(min_sample_timesteps_per_iteration=100)",
}


def sections(page: Path) -> list[tuple[str, str]]:
    """The code of a page, or of each ``##`` section of it where the page shows several integrations."""
    text = page.read_text()
    parts = re.split(r"^## ", text, flags=re.MULTILINE) if page.name == "README.md" else [text]
    found = []
    for part in parts:
        code = "\n".join(BLOCK.findall(part))
        if code:
            title = part.splitlines()[0].strip("# ")
            found.append((f"{page.name}: {title}" if len(parts) > 1 else page.name, code))
    return found


SECTIONS = [section for page in PAGES for section in sections(page)]
NEEDS_RAY = [section for section in SECTIONS if "ray" in section[1] or "rllib_ext" in section[1]]


@pytest.fixture(autouse=True)
def hooks_stay_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page turns the hooks off, which later tests of this process need."""
    monkeypatch.setattr(hooks, "are_on", True)


def shortened(code: str) -> str:
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    return code


def _run(name: str, code: str) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(compile(shortened(code), name, "exec"), namespace)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code"), [each for each in SECTIONS if each not in NEEDS_RAY], ids=lambda value: value.splitlines()[0]
)
def test_the_code_of_a_page_runs(name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name in STUBS:
        STUBS[name].install(monkeypatch)
    _run(name, code)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), NEEDS_RAY, ids=lambda value: value.splitlines()[0])
@pytest.mark.usefixtures("shared_ray")  # not asked for in the test: Ray would start in its folder, which is removed
def test_the_rllib_code_of_a_page_runs(name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as of a script in the folder
    _run(name, code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere_and_files_named_in_it_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    folders = "configs|examples|tests|docs|lightning_replay"
    for target in re.findall(rf"\b(?:{folders})/[\w./-]*\w\.(?:py|yaml|md|json)", text):
        assert (ROOT / target).exists(), target


def test_the_readme_begins_with_the_command_of_a_release_and_the_two_of_a_checkout() -> None:
    install = (ROOT / "README.md").read_text().partition("\n## Installation\n")[2].partition("\n## ")[0]
    targets = re.findall(r"^make (\w+)", install, re.MULTILINE)
    assert targets == ["demo", "test"]
    assert install.count('pip install "lightning-replay[all]"') == 1
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_readme_is_read_in_a_few_minutes() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    cells = [cell for line in text.splitlines() if line.startswith("|") for cell in line.split(" | ")]
    assert len(cells) > 40 and [cell for cell in cells if len(cell.split()) > 12] == []


@pytest.mark.parametrize("name", ["benchmarks", "evidence", "scaling"])
def test_a_long_page_begins_with_a_summary_and_a_table(name: str) -> None:
    summary, table = (ROOT / "docs" / f"{name}.md").read_text().split("\n## ")[0].split("\n|", maxsplit=1)
    assert summary.startswith("# ") and len(summary.split()) <= 150 and table.count("\n|") >= 4
