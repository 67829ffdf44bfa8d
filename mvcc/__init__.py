"""Versions of one shard: transactions, pointers, rollback and retention."""

from holdfast.backends.base import Pointer
from holdfast.mvcc.store import CommitLog, RestoredVersion, VersionedStore
from holdfast.mvcc.transaction import Transaction

__all__ = ["CommitLog", "Pointer", "RestoredVersion", "Transaction", "VersionedStore"]
