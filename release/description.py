"""The description of the package, made of the README when the package is built.

A package index shows only this text, so links to other files of the repository would lead nowhere.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

IMAGE = re.compile(r"!\[[^]]*\]\([^)]*\)\n\n")
PICTURE = re.compile(r':\n\n<picture>.*? src="([^"]*)".*?</picture>')
LINK = re.compile(r"\[([^]]+)\]\((?!https:)[^)]*\)")
END = "\nThe documents named here are in the source distribution, in `docs/`.\n"


def dynamic_metadata(field: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the README without pictures, and with the text of links in their place. scikit-build-core calls this."""
    assert (field, settings) == ("readme", {})
    readme = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    text = LINK.sub(r"\1", PICTURE.sub(r" (picture: `\1`).", IMAGE.sub("", readme)))
    return {"content-type": "text/markdown", "text": text + END}
