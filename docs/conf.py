# SPDX-License-Identifier: Apache-2.0
"""The site: ``make docs`` builds it offline from docs/, the examples, the configurations and the results into build/docs.

The source directory is the root of the repository, so that a link between pages, examples, configurations and results is
the same here and in a checkout.
"""

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.parsers import Parser

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs/inventories")]

project = "lightning-replay"
copyright = "the authors of lightning-replay"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

root_doc = "docs/index"
source_suffix = {".md": "markdown", ".py": "listing", ".yaml": "listing"}
include_patterns = [
    "docs/**.md",
    "examples/*.py",
    "configs/**.yaml",
    "tests/benchmarks/results/*.md",
]
exclude_patterns = [".*", "build", "dist", "runs", "lightning_replay", "rllib_ext"]

myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
nitpicky = True

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
napoleon_custom_sections = [("Sampled keys", "params_style")]
python_use_unqualified_type_names = True
maximum_signature_line_length = 100

html_theme = "furo"
html_title = "lightning-replay"
html_copy_source = False
html_show_sphinx = False


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


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the parser of code."""
    app.add_source_parser(Listing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
