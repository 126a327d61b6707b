"""Give the wheel README.md with links that hold away from a clone: a hook of hatchling, named in pyproject.toml.

With an address of the repository, ``Source`` in ``[project.urls]``, links become absolute. Without one a page of docs/
is named as the file of the wheel that it is, and other files as those of a clone. A picture is left out, with the
paragraph below that explains it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ModuleNotFoundError:  # the tests call the function alone
    MetadataHookInterface = object

_PICTURE = re.compile(r"<picture>.*?</picture>\n\n[^\n]+\n\n", re.DOTALL)
_LINK = re.compile(r"\[([^]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def long_description(readme: str, source: str = "") -> str:
    """Return README.md for readers who have no clone; ``source`` is the address of the repository, if any."""
    if source:
        readme = re.sub(r'((?:srcset|src)=")(?!https?:)', rf"\1{source}/raw/main/", readme)
        return _LINK.sub(lambda link: f"[{link[1]}]({source}/blob/main/{link[2]}{link[3] or ''})", readme)
    return _LINK.sub(_in_words, _PICTURE.sub("", readme))


def _in_words(link: re.Match[str]) -> str:
    text, target = link[1], link[2]
    if target.startswith("docs/") and target.count("/") == 2:
        return f"{text} (`flashmoe_science/{target}` in site-packages)"
    return text if target.endswith(text) else f"{text} (`{target}` of a clone)"


class LongDescription(MetadataHookInterface):  # type: ignore[misc] # hatchling has no part in the environment of the tests
    """What hatchling asks for."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the long description."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source", "")
        metadata["readme"] = {"content-type": "text/markdown", "text": long_description(text, source)}
