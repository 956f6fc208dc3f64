# SPDX-License-Identifier: Apache-2.0
"""Parts of a page: a picture or a table with a title and a note."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple


class Card(NamedTuple):
    """A part of a page; ``content`` and ``note`` are HTML."""

    title: str
    content: str
    note: str = ""
    is_wide: bool = False

    def html(self) -> str:
        """Returns the card."""
        wide = ' class="wide"' if self.is_wide else ""
        note = f"<p>{self.note}</p>" if self.note else ""
        return f"<section{wide}><h3>{escape(self.title)}</h3>{self.content}{note}</section>"


def legend(*names: str) -> str:
    """Returns the names of the series of a picture, each beside its colour."""
    keys = (f'<span class="key key{number}"></span>{escape(name)}' for number, name in enumerate(names))
    return f'<span class="legend">{"</span><span class=legend>".join(keys)}</span>'


def number(text: str, share: float) -> str:
    """Returns a number with a bar whose length is a share of the cell."""
    width = 100 * min(max(share, 0.0), 1.0)
    return f'{escape(text)}<span class="bar"><span style="width:{width:.1f}%"></span></span>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of HTML cells; the first column is its heads'."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
