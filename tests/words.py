# SPDX-License-Identifier: Apache-2.0
"""Sentences that a reader has to read twice, in README, the pages, and the docstrings: ``python -m tests.words``.

.. code-block:: shell

    python -m tests.words                       # the table of counts
    python -m tests.words docs/levels.md        # each finding of some files, by line

British spelling is found by codespell, and the other findings by the patterns below. ``tests/unit/test_words.py``
holds README and the ten first pages.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST_PAGES = (
    "index",
    "getting-started",
    "which-method",
    "own-loop",
    "torchrl",
    "lightning",
    "rllib",
    "levels",
    "prioritized",
    "troubleshooting",
)
MOST_WORDS = 30

PATTERNS = {
    "semicolon": re.compile(r";"),
    # A place has a preposition, a verb of place, or a colon before "where". Everything else is taken for a condition.
    "where for a condition": re.compile(
        r"(?<!from )(?<!place )(?<!places )(?<!knows )(?<!know )(?<!shows )(?<!says )(?<!names )"
        r"\b[Ww]here(?! (?:it ends|to go))\b"
    ),
    "those of": re.compile(r"\b[Tt]hose (?:of|that|with|which|from)\b"),
    "pronoun": re.compile(r"\b(?:[Tt]hat one|[Tt]hese ones|[Tt]he former|[Tt]he latter)\b"),
    "of yours": re.compile(r"\bof (?:yours|its own|their own|your own)\b"),
    "for ever": re.compile(r"\b[Ff]or ever\b"),
}
# Text of a link that does not say where it leads.
VAGUE_LINK = re.compile(r"\[(?:page|pages|more|here|this|link)\]\(", re.IGNORECASE)
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|et al|vs|cf|approx|Fig|Eq|No|St)\.$")


@dataclass(frozen=True)
class Block:
    """A paragraph, a list item, a heading, or a cell of a table: text without code, and its first line."""

    line: int
    text: str
    is_prose: bool = True  # and no cell or heading


@dataclass(frozen=True)
class Finding:
    """Something to rewrite."""

    line: int
    kind: str
    text: str


def plain(text: str) -> str:
    """Returns Markdown or reStructuredText as the words that a reader sees; code is one word."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r":\w+:`[^`]*`|``[^`]*``|`[^`]*`", "code", text)
    text = re.sub(r"<[^>]+>", " ", text)
    text = re.sub(r"https?://\S+", "address", text)
    return re.sub(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", text)


def page_blocks(text: str) -> Iterator[Block]:
    """Yields the blocks of a page in Markdown."""
    # Front matter, code, and comments are not read, and keep their lines.
    text = re.sub(
        r"^(```|~~~).*?^\1[^\n]*$|<!--.*?-->|\A---\n.*?^---$",
        lambda found: "\n" * found.group().count("\n"),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    held: list[str] = []
    first = 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        starts_block = not line.strip() or re.match(r"\s*([*+-]|\d+\.)\s|#|\||>", line)
        if starts_block and held:
            yield Block(first, " ".join(held))
            held = []
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
                if cell.strip() and not re.fullmatch(r"\s*:?-+:?\s*", cell):
                    yield Block(number, cell.strip(), is_prose=False)
        elif line.startswith("#"):
            yield Block(number, line.lstrip("# "), is_prose=False)
        elif line.strip():
            first = first if held else number
            held.append(re.sub(r"^\s*([*+-]|\d+\.|>)\s", "", line).strip())


def code_blocks(text: str) -> Iterator[Block]:
    """Yields paragraphs of the docstrings of a module, and its comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                line = node.body[0].lineno
                prose = re.sub(r"^\s*(>>>|\.\.\.).*$", "", docstring, flags=re.MULTILINE)
                for paragraph in re.split(r"\n\s*\n", prose):
                    yield Block(line, " ".join(paragraph.split()))
    held: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        comment = re.match(r"\s*#:? (.*)", line)
        if comment:
            held.append(comment[1])
        elif held:
            yield Block(number - len(held), " ".join(held))
            held = []


def sentences(text: str) -> list[str]:
    """Returns the sentences of a block without markup."""
    parts: list[str] = []
    for part in re.split(r"(?<=[.!?:])(?:\s+)(?=[\"'(]*[A-Z0-9]|[\"'(]|code)", plain(text)):
        if parts and _ABBREVIATION.search(parts[-1]):
            parts[-1] += f" {part}"
        elif part.strip():
            parts.append(part.strip())
    return parts


def blocks_of(path: Path) -> list[Block]:
    """Returns the blocks of a page or of a module."""
    text = path.read_text()
    return [*(code_blocks(text) if path.suffix == ".py" else page_blocks(text))]


def findings(path: Path) -> list[Finding]:
    """Returns everything in a file that the guide does not allow, in the order of its lines."""
    found = []
    for block in blocks_of(path):
        words = plain(block.text)
        for kind, pattern in PATTERNS.items():
            found += [Finding(block.line, kind, block.text[:160]) for _ in pattern.finditer(words)]
        found += [Finding(block.line, "vague link", block.text[:160]) for _ in VAGUE_LINK.finditer(block.text)]
        if block.is_prose:
            found += [
                Finding(block.line, "long sentence", f"{len(one.split())} words: {one}")
                for one in sentences(block.text)
                if len(one.split()) > MOST_WORDS
            ]
    return sorted(found + british(path), key=lambda finding: finding.line)


def british(path: Path) -> list[Finding]:
    """Returns British spellings that codespell finds."""
    command = [sys.executable, "-m", "codespell_lib", "--builtin", "en-GB_to_en-US", str(path)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    parts = [line.rsplit(":", 2) for line in lines if line.count(":") >= 2]
    return [Finding(int(line), "British spelling", text.strip()) for _, line, text in parts]


def first_pages() -> list[Path]:
    """Returns README and the ten pages that are read first."""
    return [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in FIRST_PAGES)]


def table() -> str:
    """Returns the counts of all pages and of the code, as a table in Markdown."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    modules = [path for package in ("lightning_replay", "rllib_ext") for path in sorted((ROOT / package).rglob("*.py"))]
    prose = [block for path in pages for block in blocks_of(path)]
    words = sum(len(plain(block.text).split()) for block in prose)
    found = {path: findings(path) for path in {*pages, *first_pages()}}
    in_code = [one for path in modules for one in findings(path)]

    def count(kind: str, paths: list[Path]) -> int:
        return sum(one.kind == kind for path in paths for one in found[path])

    every = [
        one for path in first_pages() for block in blocks_of(path) if block.is_prose for one in sentences(block.text)
    ]
    rows = [
        ("words in `docs/*.md`", sum(len(path.read_text().split()) for path in pages), "50,000"),
        ("semicolons per 100 words of prose", f"{100 * count('semicolon', pages) / words:.2f}", "0.1"),
        (
            "sentences of more than 30 words in README and the ten first pages",
            f"{100 * count('long sentence', first_pages()) / len(every):.1f}%",
            "1%",
        ),
        (
            '"where" for a condition in docs / code',
            f"{count('where for a condition', pages)} / {sum(one.kind == 'where for a condition' for one in in_code)}",
            "5 / 20",
        ),
        (
            '"those of/that/with/which" in docs / code',
            f"{count('those of', pages)} / {sum(one.kind == 'those of' for one in in_code)}",
            "10 / 20",
        ),
        (
            "British spellings in docs / code",
            f"{count('British spelling', pages)} / {sum(one.kind == 'British spelling' for one in in_code)}",
            "0 / 0",
        ),
        ("words in README", len((ROOT / "README.md").read_text().split()), "900"),
    ]
    return "\n".join(["| | now | target |", "|---|---:|---:|", *(f"| {a} | {b} | {c} |" for a, b, c in rows)])


def main() -> None:
    """Prints the table, or the findings of the files that are named."""
    if len(sys.argv) == 1:
        print(table())
    for name in sys.argv[1:]:
        for finding in findings(Path(name)):
            print(f"{name}:{finding.line}: {finding.kind}: {finding.text}")


if __name__ == "__main__":
    main()
