# SPDX-License-Identifier: Apache-2.0
"""The site: ``make docs`` builds it offline from docs/, the examples, configurations and results into build/docs.

The source directory is the root of the repository, so that a link between pages, examples, configurations and results
is the same on the site and in a checkout.
"""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.parsers import Parser

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
from inventories import write_inventories  # noqa: E402
from page_parts import LICENSE, LINKS, VERSION  # noqa: E402

# Names in signatures whose documentation has no page of their own, or that are imported for annotations alone.
NOT_IN_AN_INVENTORY = (
    "C",
    "MeasureSurprise",
    "ModuleReplay",
    "Tables",
    "minigrid.envs.multiroom.MultiRoomEnv",
    "minigrid.envs.obstructedmaze_v1.ObstructedMaze_Full_V1",
    "pyarrow._fs.FileSystem",
    "ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module.DefaultDQNTorchRLModule",
    "ray.rllib.utils.replay_buffers.prioritized_episode_buffer.PrioritizedEpisodeReplayBuffer",
    "stable_baselines3.common.buffers.ReplayBuffer",
    "tensordict._nestedkey.NestedKey",
    "torch.utils.data.sampler.Sampler",
    "torch.nn.modules.module.Module",
    "torch.utils.data.sampler.Sampler",
)

project = "lightning-replay"
copyright = f"the authors of lightning-replay, licence {LICENSE}"
version = release = VERSION
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.napoleon", "page_parts"]

root_doc = "docs/index"
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".py": "listing", ".yaml": "listing"}
include_patterns = [
    "docs/**.md",
    "docs/notebooks/*.ipynb",
    "CHANGELOG.md",
    "SECURITY.md",
    "examples/*.py",
    "configs/**.yaml",
    "tests/benchmarks/results/*.md",
    "tests/benchmarks/level_pictures.py",
    "tests/benchmarks/learning/experiment.py",
    "tests/benchmarks/learning/experiments/locks.py",
    "tests/benchmarks/learning/experiments/prompts.py",
    "tests/integration/test_write_your_own.py",
]
exclude_patterns = [".*", "build", "dist", "runs", "lightning_logs", "lightning_replay", "rllib_ext"]
html_extra_path = ["site"]  # index.html, which leads to docs/index.html

myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks hold their outputs: make notebooks
nitpicky = True
nitpick_ignore = [("py:class", name) for name in NOT_IN_AN_INVENTORY] + [("py:exc", "MissingExtraError")]
intersphinx_mapping = write_inventories(ROOT / "build/inventories")

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # the docstring of an overridden method is often another library's
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
napoleon_custom_sections = [(name, "params_style") for name in ("Sampled keys", "Stored keys", "Infos")]
napoleon_use_ivar = True  # attributes that a docstring lists are not described a second time

html_theme = "furo"
html_title = f"lightning-replay {VERSION}"
html_theme_options = {
    "footer_icons": [{"name": "Repository", "url": LINKS["Source"], "html": "Repository", "class": ""}]
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style, pygments_dark_style = "default", "monokai"  # both with readable comments


class Listing(Parser):
    """A page of one file of code: its path as the title, and its text."""

    supported = ("listing",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Adds title and code to the document."""
        source = Path(document["source"])
        name = source.relative_to(ROOT).as_posix()
        section = nodes.section(ids=["file"], names=[name])
        code = nodes.literal_block(inputstring, inputstring, language="python" if source.suffix == ".py" else "yaml")
        section += [nodes.title(name, name), code]
        document += section


def without_link(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, text: nodes.TextElement
) -> nodes.TextElement | None:
    """Leaves a reference to something of ours that exists and has no entry, as plain text; others are warned of."""
    target, module, owner = node["reftarget"], node.get("py:module"), node.get("py:class")
    full = [target, f"{module}.{target}", f"{module}.{owner}.{target}"]
    return text if node.get("refdomain") == "py" and any(map(_exists, full)) else None


def _exists(name: str) -> bool:
    parts = name.split(".")
    if parts[0] not in ("lightning_replay", "rllib_ext"):
        return False
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            try:
                found = getattr(found, part)
            except AttributeError:
                return part in getattr(found, "__annotations__", {})
        return True
    return False


def without_addresses(
    app: Sphinx, what: str, name: str, found: Any, options: Any, arguments: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Shortens the default ``NotProvided`` of RLlib's configurations, whose text is the path of its class."""
    return arguments and re.sub(r"<[\w.]+\._NotProvided object>", "NotProvided", arguments), result


def outside_the_contents(app: Sphinx, doctree: nodes.document) -> None:
    """Keeps files of code and pages of experiments, which pages link to, out of the contents at the side."""
    if not app.env.docname.startswith("docs/"):
        app.env.metadata[app.env.docname]["orphan"] = True


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the parser of code and what the pages need beyond Sphinx."""
    app.add_source_parser(Listing)
    app.connect("doctree-read", outside_the_contents)
    app.connect("missing-reference", without_link)
    app.connect("autodoc-process-signature", without_addresses)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
