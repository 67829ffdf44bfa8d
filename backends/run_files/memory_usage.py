"""How many bytes the shards of one executor hold together, known without measuring all of them.

::

    <folder>/
        9f3c….1048576 ──▶ query/totals/shard-0003-1f0c77ab     a link: which shard, and how many bytes it holds
        04aa….52428800 ──▶ …

Each shard has one entry, named after the shard and its bytes, and renames it when it writes or frees something: so the
sum is one listing of a folder, however much the shards hold. There is no lock: an entry is changed by its own shard,
and a process that is killed leaves whole entries.

Invariants
----------
* **hardly too low**: bytes are noted before they are written, and again afterwards. Whoever corrects the entry of a
  shard that writes just then leaves out what it has not written yet. A kill in between leaves an entry that is too
  high; two processes that note one shard at the same moment may leave two entries.
* **corrected**: what a shard notes is measured, not added up. Each time, the entry of one other shard, chosen at
  random, is measured too, or removed if that shard is gone; and before out of room becomes an error, all are measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

from holdfast.backends.local_files import folder_bytes, make_private_folder, writing

#: Every directory of a shard on run files has it.
_MARK_OF_SHARD = "versions"


class MemoryUsage:
    """The entries of one executor, as one of its shards uses them.

    `folder` holds the entries, `root` the directories of all shards, or is the only one.

    Threads: any, also of several processes. Methods raise `UnavailableError` where local storage fails.
    """

    def __init__(self, folder: Path, root: Path, shard: Path, new_id: Callable[[], str]) -> None:
        self._folder = folder
        self._root = root
        self._shard = shard
        self._new_id = new_id

    def is_kept(self) -> bool:
        """Whether some shard of the executor has a limit."""
        return self._folder.is_dir()

    def note(self, more_bytes: int = 0) -> int:
        """Note what this shard holds, and is about to write; return what all shards hold with it.

        Cost: a walk through this shard and another one, and one listing.
        """
        with writing(self._folder):
            entries = self._entries()
            held = self._note(entries, self._shard, more_bytes)
            mine = _owner(self._root, self._shard)
            others = [name for name in entries if not name.startswith(mine)]
            if others:
                self._check(others[xxhash.xxh32_intdigest(self._new_id().encode()) % len(others)])
            return held + sum(map(_bytes_of, others))

    def recount(self, more_bytes: int = 0) -> int:
        """Measure all shards; return what they hold, and this one is about to write.

        Cost: a walk through all shards.
        """
        with writing(self._folder):
            make_private_folder(self._folder)
            entries, total, found = self._entries(), 0, set()
            for shard in self._shards():
                total += self._note(entries, shard, more_bytes if shard == self._shard else 0)
                found.add(_owner(self._root, shard))
            for name in entries:
                if name.partition(".")[0] not in found:
                    (self._folder / name).unlink(missing_ok=True)
            return total

    def _entries(self) -> list[str]:
        return [name for name in os.listdir(self._folder) if name.partition(".")[2].isdigit()]

    def _shards(self) -> Iterator[Path]:
        for parent, folders, _ in os.walk(self._root):
            if _MARK_OF_SHARD in folders:
                folders.clear()
                yield Path(parent)

    def _note(self, entries: list[str], shard: Path, more_bytes: int) -> int:
        """Make the entries of a shard one that says what it holds; return that."""
        owner = _owner(self._root, shard)
        held = folder_bytes(shard) + more_bytes
        old, new = [name for name in entries if name.startswith(owner)], f"{owner}.{held}"
        if new not in old:
            with suppress(FileExistsError):  # another process notes the same
                os.symlink(os.path.relpath(shard, self._folder), self._folder / new)
        for name in old:
            if name != new:
                (self._folder / name).unlink(missing_ok=True)
        return held

    def _check(self, name: str) -> None:
        """Correct the entry of another shard."""
        with suppress(FileNotFoundError):
            shard = Path(os.path.normpath(self._folder / os.readlink(self._folder / name)))
            if shard.is_dir():
                self._note([name], shard, 0)
            else:
                (self._folder / name).unlink()


def _owner(root: Path, shard: Path) -> str:
    """Return the part of an entry's name that says whose it is."""
    return xxhash.xxh3_128_hexdigest(os.fsencode(os.path.relpath(shard, root)))


def _bytes_of(name: str) -> int:
    return int(name.partition(".")[2])
