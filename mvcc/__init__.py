"""Versions of one shard: transactions, pointers, rollback and retention.

This layer decides which version is read and written; where the state is kept is a backend's business, and
what makes a commit durable is handed in as a `CommitLog`.
"""

from holdfast.backends.base import Pointer
from holdfast.mvcc.store import CommitLog, RestoredVersion, VersionedStore
from holdfast.mvcc.transaction import Transaction

__all__ = ["CommitLog", "Pointer", "RestoredVersion", "Transaction", "VersionedStore"]
