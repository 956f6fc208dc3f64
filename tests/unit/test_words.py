# SPDX-License-Identifier: Apache-2.0
"""README and the ten first pages have no sentence that a reader has to read twice, as far as patterns find one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.words import code_blocks, findings, first_pages, page_blocks, plain, sentences

PAGE = """# Where rows are kept

Draw rows if you need them; this is too much. A row of yours is drawn where `done` is false.

```python
x = 1; y = 2  # those of code are not read
```

* See [more](other.md), e.g. the normalised rows.
  They go on here.

| those of a | [levels](levels.md) |
|---|---|
| plain text | a `code;block` |
"""


def test_everything_that_the_guide_forbids_is_found_with_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = [(finding.line, finding.kind) for finding in findings(page)]
    assert found == [
        (1, "where for a condition"),
        (3, "semicolon"),
        (3, "where for a condition"),
        (3, "of yours"),
        (9, "vague link"),
        (9, "British spelling"),
        (12, "those of"),
    ]


def test_blocks_are_paragraphs_items_headings_and_cells() -> None:
    assert [(block.line, block.text, block.is_prose) for block in page_blocks(PAGE)][2:] == [
        (9, "See [more](other.md), e.g. the normalised rows. They go on here.", True),
        (12, "those of a", False),
        (12, "[levels](levels.md)", False),
        (14, "plain text", False),
        (14, "a `code;block`", False),
    ]


def test_sentences_end_at_points_and_not_at_abbreviations() -> None:
    text = 'Use it, e.g. The Age. "free score" is the second. See [a page](page.md#a.b): Code follows.'
    assert plain("a `x; y` [b](c.md) **d**") == "a code b d"
    assert sentences(text) == ["Use it, e.g. The Age.", '"free score" is the second.', "See a page:", "Code follows."]


def test_a_sentence_of_31_words_is_long_and_one_of_30_is_not(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for count, expected in ((30, []), (31, ["long sentence"])):
        page.write_text(" ".join(["word"] * count) + ".\n")
        assert [finding.kind for finding in findings(page)] == expected


def test_docstrings_and_comments_of_a_module_are_read() -> None:
    text = (
        '"""A module.\n\n>>> f()\n"""\n\n\ndef f():\n    """Returns one."""\n    # Because\n    # of this.\n    pass\n'
    )
    assert [(block.line, block.text) for block in code_blocks(text)] == [
        (1, "A module."),
        (8, "Returns one."),
        (9, "Because of this."),
    ]


@pytest.mark.parametrize("page", first_pages(), ids=lambda page: page.stem)
def test_a_first_page_has_no_sentence_to_read_twice(page: Path) -> None:
    found = [f"{page.name}:{finding.line}: {finding.kind}: {finding.text}" for finding in findings(page)]
    assert found == [], "python -m tests.words PAGE lists the sentences of any page"
