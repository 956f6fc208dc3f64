# SPDX-License-Identifier: Apache-2.0
"""The README as PyPI shows it: links to files of the repository are addresses at the tag of the version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class AbsoluteLinks(MetadataHookInterface):
    """Sets ``readme`` in the metadata of both distributions."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute(readme, metadata["urls"]["Source"], f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, repository: str, tag: str) -> str:
    """Returns Markdown whose relative links and pictures lead to a tag of a repository on GitHub."""
    pictures = repository.replace("https://github.com", "https://raw.githubusercontent.com")
    text = re.sub(r'(\b(?:src|srcset)=")(?!https?:)', rf"\g<1>{pictures}/{tag}/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{repository}/blob/{tag}/", text)
