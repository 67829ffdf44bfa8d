"""Tests a directory before its first use: performs each action once, on a small object.

::

    <folder>/probe-5f0c1d…      put, put again with other bytes, get, list, delete

So a read-only directory, or a policy that forbids one action, fails before any state is written instead of hours later,
in the first commit, snapshot or clean-up. The second put must be refused: some stores reject conditions, others ignore
them.
"""

from __future__ import annotations

from contextlib import suppress

from holdfast import clock
from holdfast.errors import ConflictError, HoldfastError, UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectStorage, unconditional
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

_S3_PERMISSIONS = {"put": "s3:PutObject", "get": "s3:GetObject", "list": "s3:ListBucket", "delete": "s3:DeleteObject"}


def probe_storage(
    storage: ObjectStorage, folder: str, *, checked: str = "spark.holdfast.state.dir failed the check at query start"
) -> int:
    """Put, get, list and delete a small object below a folder; return its time of storage, by the store's clock."""
    probes, key = PrefixedStorage(storage, folder), f"probe-{clock.new_id()}"
    try:
        probes.put_if_absent(key, key.encode())
        try:
            with suppress(ConflictError):
                probes.put_if_absent(key, key[::-1].encode())
                raise unconditional(key, probes.url)
            is_same = bytes(probes.get(key, len(key))) == key.encode()
            stored_ms = {info.key: info.modified_ms for info in probes.list("")}.get(key)
        except BaseException:
            with suppress(HoldfastError):  # report the first failure
                probes.delete([key])
            raise
        probes.delete([key])
    except HoldfastError as exc:
        facts = dict(exc.facts)
        if storage.url.startswith("s3:") and not exc.retryable:
            facts["permission"] = _S3_PERMISSIONS.get(str(facts.get("action")))
        message = f"{checked}, which puts, gets, lists and deletes an object there: {exc.message}"
        raise type(exc)(message, **facts) from exc
    if stored_ms is None or not is_same:
        raise UnavailableError(
            "the storage does not return an object right after its put: holdfast needs a strongly consistent store",
            key=key,
            storage=probes.url,
        )
    return stored_ms
