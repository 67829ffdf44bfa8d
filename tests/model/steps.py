"""A workload of fixed steps on one shard, each of whose states tells by itself which step wrote it.

The steps commit, delete, roll back, restore, merge, prune and freeze. Every step touches many rows, and every row is
touched by many steps: a version that mixes two states is noticed by `step_of`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.backends.base import Backend, Pointer, View
from holdfast.mvcc import Transaction, VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.testing.state_rows import COUNTS, MEMBERS, contents, keys_of, values_of

TABLES = {table.name: table for table in (COUNTS, MEMBERS)}
State = dict[str, dict[tuple[Any, ...], tuple[Any, ...]]]
EMPTY: State = {name: {} for name in TABLES}

# Step → the step it begins at, where that is not the one before: a rollback of one attempt, one by several versions to
# one that is pruned by then, so that it is restored, and one right after the directory was opened again.
ROLLBACKS = {9: 7, 17: 12, 20: 18}
STEPS = 27
USERS = 120


class Writes(NamedTuple):
    """What one step does; every step touches many rows, and every row is touched by many steps."""

    counts: dict[str, int]
    no_counts: list[str]
    members: list[bytes]
    no_members: list[bytes]


def writes_of(step: int) -> Writes:
    names = [f"user {i}" for i in range(USERS) if (i + step) % 3 == 0]
    gone = [f"user {i}" for i in range(USERS) if (i * 3 + step) % 11 == 0]
    members = [b"%d" % (i % 12) for i in range(step, step + 4)]
    return Writes(dict.fromkeys(names, step) | {"step": step}, gone, members, [b"%d" % ((step + 6) % 12)])


def write(transaction: Transaction, step: int) -> None:
    """Do what one step does."""
    counts, no_counts, members, no_members = writes_of(step)
    users = keys_of(COUNTS, [(name,) for name in counts])
    transaction.put("counts", users, values_of(COUNTS, [(n,) for n in counts.values()]))
    transaction.delete("counts", keys_of(COUNTS, [(name,) for name in no_counts]))
    transaction.put("members", keys_of(MEMBERS, [(m,) for m in members]), values_of(MEMBERS, [()] * len(members)))
    transaction.delete("members", keys_of(MEMBERS, [(m,) for m in no_members]))


@cache
def state_after(step: int) -> State:
    """Return the state of a step: what it writes, on the state of the step it begins at."""
    if not step:
        return EMPTY
    base = state_after(base_of(step))
    counts, no_counts, members, no_members = writes_of(step)
    n_by_user = base["counts"] | {(name,): (n,) for name, n in counts.items()}
    all_members = base["members"] | {(m,): () for m in members}
    return {
        "counts": {key: n for key, n in n_by_user.items() if key[0] not in no_counts},
        "members": {key: () for key in all_members if key[0] not in no_members},
    }


def base_of(step: int) -> int:
    return ROLLBACKS.get(step, min(step, STEPS + 1) - 1)


def version_of(step: int) -> int:
    return version_of(base_of(step)) + 1 if step else 0


def step_of(view: View | Transaction) -> int:
    """Return the step that a state is of, and fail where it holds anything else than that step's state."""
    state = {table: contents(view, table) for table in TABLES}
    (step,) = state["counts"].get(("step",), (0,))
    assert state == state_after(step), "a version mixes states"
    return step


@contextmanager
def commit_log(folder: Path, backend_name: str) -> Iterator[ObjectCommitLog]:
    """The log of the shard in `folder`, on the file system beside it."""
    with ThreadPoolExecutor(2) as executor, open_storage(f"file://{folder / 'durable'}") as storage:
        yield ObjectCommitLog(storage, "op/shard-0000", TABLES, executor, folder / "log", backend_name)


def take_step(backend: Backend, log: ObjectCommitLog, step: int, pointers: dict[int, Pointer]) -> None:
    with VersionedStore(backend, log).begin(pointers.get(base_of(step))) as transaction:
        write(transaction, step)
        pointer = transaction.commit()
    assert pointer is not None
    pointers[step] = pointer


def look_after(backend: Backend, log: ObjectCommitLog, step: int, pointer: Pointer) -> None:
    """What the background does between commits."""
    if step % 3 == 0:
        backend.maintain(pointer)
    if step % 4 == 0:
        VersionedStore(backend, log).prune(pointer)
    if step % 7 == 0:
        backend.freeze(pointer)
    if step == 15:
        log.write_snapshot(backend, pointer)
    if step % 10 == 0:
        backend.remove_leftovers(2**63)
