# SPDX-License-Identifier: Apache-2.0
"""Narrow figures, tables as lists, and what search engines and shared links show of the pages of the site."""

from __future__ import annotations

import re
import textwrap
from html import escape, unescape
from importlib import metadata
from pathlib import Path
from typing import Any

from docutils import nodes
from PIL import Image
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

NARROW = "-narrow"  # NAME-narrow.png beside NAME.png
INCH = 96  # pixels of CSS
PROSE = 40  # letters of a cell beyond the first, above which a table of three or more columns is a narrow list

_found = metadata.metadata("lightning-replay")
VERSION, LICENSE, SUMMARY = _found["Version"], _found["License-Expression"], _found["Summary"]
LINKS = dict(url.split(", ") for url in _found.get_all("Project-URL") or [])
CARD = LINKS["Source"].replace("//github.com/", "//raw.githubusercontent.com/") + "/main/docs/images/card.png"


class Figures(SphinxTransform):
    """Shows a figure in its size in inches, and its narrow form, where it has one, on screens below 600 pixels."""

    default_priority = 400

    def apply(self, **options: Any) -> None:
        """Gives figures their width, and adds narrow forms beside them."""
        folder = Path(self.env.doc2path(self.env.docname)).parent
        for figure in list(self.document.findall(nodes.image)):
            path = folder / figure["uri"]
            if path.suffix == ".png" and path.exists():
                narrow = path.with_stem(path.stem + NARROW)
                if narrow.exists():
                    uri = figure["uri"].removesuffix(".png") + f"{NARROW}.png"
                    other = nodes.image(uri=uri, alt=figure.get("alt", ""), classes=["narrow"])
                    figure["classes"].append("wide")
                    figure.parent.insert(figure.parent.index(figure) + 1, other)
                    _size(other, narrow)
                _size(figure, path)


def _size(figure: nodes.image, path: Path) -> None:
    with Image.open(path) as image:
        figure["width"] = f"{INCH * image.width / image.info.get('dpi', (120, 120))[0]:.0f}px"
    figure["loading"] = "lazy"  # of two forms the hidden one is not loaded


class Tables(SphinxTransform):
    """Names the columns in the cells of tables of prose; the style sheet shows the names where rows become lists."""

    default_priority = 400

    def apply(self, **options: Any) -> None:
        """Marks the tables and adds the names."""
        for table in self.document.findall(nodes.table):
            heads = [entry.astext() for head in table.findall(nodes.thead) for entry in head.findall(nodes.entry)]
            rows = [list(row.findall(nodes.entry)) for body in table.findall(nodes.tbody) for row in body]
            if len(heads) > 2 and any(len(cell.astext()) > PROSE for row in rows for cell in row[1:]):
                table["classes"].append("prose")
                for row in rows:
                    for head, cell in zip(heads[1:], row[1:], strict=False):
                        if cell.astext():
                            cell.insert(0, nodes.paragraph("", head, classes=["column"]))


class About(SphinxTransform):
    """Adds version, licence and repository below the title of the first page."""

    default_priority = 400

    def apply(self, **options: Any) -> None:
        """Adds a paragraph."""
        if self.env.docname == self.config.root_doc:
            about = nodes.paragraph("", f"Version {VERSION}, licence {LICENSE}", classes=["about"])
            for name in ("Source", "Changelog", "Issues"):
                about += [nodes.Text(" · "), nodes.reference("", name, refuri=LINKS[name])]
            title = next(self.document.findall(nodes.title))
            title.parent.insert(title.parent.index(title) + 1, about)


def add_description(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Adds the first paragraph as the description for search engines, and the tags of a card for shared links."""
    paragraphs = doctree.findall(nodes.paragraph) if doctree else ()
    texts = (" ".join(each.astext().split()) for each in paragraphs if "about" not in each["classes"])
    text = textwrap.shorten(next(texts, SUMMARY), 200, placeholder=" …")
    title = unescape(re.sub(r"<[^>]+>", "", context.get("title") or app.config.project))
    tags = {"og:type": "website", "og:site_name": app.config.project, "og:title": title, "og:description": text}
    tags |= {"og:image": CARD, "og:image:width": "1200", "og:image:height": "630"}
    lines = [f'<meta property="{name}" content="{escape(content)}">' for name, content in tags.items()]
    lines += [f'<meta name="description" content="{escape(text)}">']
    lines += ['<meta name="twitter:card" content="summary_large_image">']
    context["metatags"] = "\n".join([context.get("metatags", ""), *lines])


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers what pages get."""
    for transform in (Figures, Tables, About):
        app.add_transform(transform)
    app.connect("html-page-context", add_description)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
