"""Merges that the background has made: finding them, and putting their runs into a version's stacks.

A merge says "these consecutive runs equal that one run". The next commit uses it; it can go once no version has all of
its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.backends.local_files import StagedFolder, list_folder
from holdfast.backends.run_files.damage import DamagedRuns
from holdfast.backends.run_files.version_file import MergeFile, RunFile
from holdfast.backends.run_stack import first_to_merge
from holdfast.errors import CorruptionError, NotFoundError


def needs_merge(stack: Sequence[RunFile]) -> bool:
    """Tell whether there is something to merge; if not, earlier merges have left nothing either."""
    return bool(stack) and first_to_merge([file.size_bytes for file in stack]) < len(stack) - 1


def read_merges(folder: Path, damaged: DamagedRuns) -> list[MergeFile]:
    """Return the merges below a folder; a damaged one is set aside, and its inputs are used instead."""
    merges = []
    for name in list_folder(folder):
        try:
            merges.append(MergeFile.read(folder / name))
        except NotFoundError:
            continue  # dropped meanwhile
        except CorruptionError:
            damaged.set_aside([folder / name])
    return merges


def use_merges(stack: list[RunFile], merges: Sequence[MergeFile], staged: StagedFolder) -> list[RunFile]:
    """Return `stack` with every merged stretch of runs replaced by the run that equals it."""
    waiting = list(merges)
    while waiting:
        usable = [m for m in waiting if m.place_in(stack) is not None]
        waiting = [m for m in waiting if m not in usable]
        if not usable:
            break
        for merge in usable:
            start = merge.place_in(stack)
            with suppress(NotFoundError):  # dropped meanwhile: its inputs still do
                if start is not None:
                    staged.link(merge.folder / merge.output.name)
                    output = [merge.output] if merge.output.rows else []
                    stack = [*stack[:start], *output, *stack[start + len(merge.inputs) :]]
    return stack
