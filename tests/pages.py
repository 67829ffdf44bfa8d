"""What the project's documents hold: their text, and the blocks of code in it."""

from __future__ import annotations

import functools
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


@functools.cache
def text(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, language: str) -> list[str]:
    """Return the code that a document shows in a language, also where it is indented as part of a list."""
    return [textwrap.dedent(code) for found, code in FENCE.findall(text(page)) if found == language]


def shown(page: str) -> list[tuple[str, str]]:
    """Return what a document shows to type, with its language: commands, Python, and changes of a program."""
    return [
        (found, textwrap.dedent(code)) for found, code in FENCE.findall(text(page)) if found in {"sh", "python", "diff"}
    ]


def block_with(page: str, part: str) -> str:
    """Return the one block of Python that has this text in it."""
    (block,) = [block for block in blocks(page, "python") if part in block]
    return block
