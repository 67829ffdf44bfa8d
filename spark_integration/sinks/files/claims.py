"""Who writes below a URL under a sink's name, and whom that query replaced.

::

    _holdfast/queries/<sink>/<query id>       kind "sink-query": sink, query_id, replaces

The owner is the query that no other one has replaced. A claim stays for ever: it says that a query has ended for good.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from holdfast.backends import stored_file
from holdfast.errors import ConflictError
from holdfast.snapshotter.decisions import QUERY_ID, SINK
from holdfast.snapshotter.fields import Fields
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery

KIND = "sink-query"
#: What holdfast keeps below a sink's URL; readers of files pass over names that begin so.
FOLDER = "_holdfast"
_QUERIES = f"{FOLDER}/queries"
# A sink may be called queries, too: no key of what it keeps has as many parts.
_CLAIM = re.compile(f"{_QUERIES}/({SINK.pattern})/({QUERY_ID.pattern})")


def claim(storage: ObjectStorage, query: SinkQuery, *, alone: bool) -> None:
    """Say that a query writes under its sink's name, unless another does.

    Parameters
    ----------
    storage : ObjectStorage
        The sink's URL.
    query : SinkQuery
    alone : bool
        Whether sinks of other names are refused, too.

    Raises
    ------
    ConflictError
        Another query, which this one does not replace, has written under this name.
    """
    claims = read_claims(storage)
    _refuse_others(storage, query, claims, alone=alone)
    if query.query_id in claims.get(query.sink, {}):
        return
    key = f"{_QUERIES}/{query.sink}/{query.query_id}"
    replaces = query.replaces if query.replaces != query.query_id else None
    header = {"sink": query.sink, "query_id": query.query_id, "replaces": replaces}
    storage.put(key, stored_file.encode(KIND, header)[0])
    try:
        _refuse_others(storage, query, read_claims(storage), alone=alone)
    except ConflictError:
        storage.delete([key])  # another began at the same time, and perhaps withdraws as well: try again
        raise


def read_claims(storage: ObjectStorage) -> dict[str, dict[str, str | None]]:
    """Return by sink all queries that have written, and whom each replaced; what others put there is no claim."""
    claims: dict[str, dict[str, str | None]] = {}
    for info in storage.list(f"{_QUERIES}/"):
        named = _CLAIM.fullmatch(info.key)
        if named is None:
            continue
        source = f"{storage.url}/{info.key}"
        stored = stored_file.decode(storage.get(info.key), source=source, kind=KIND, plain_bytes_max=0)
        fields = Fields(stored.header, source, "sink", "query_id", "replaces")
        sink, query_id = named.groups()
        if (fields.text("sink"), fields.text("query_id")) != (sink, query_id):
            fields.refuse("is of another query than its name says")
        claims.setdefault(sink, {})[query_id] = fields.text_or_none("replaces")
    return claims


def _refuse_others(
    storage: ObjectStorage, query: SinkQuery, claims: Mapping[str, Mapping[str, str | None]], *, alone: bool
) -> None:
    facts = {"sink": query.sink, "query": query.query_id, "storage": storage.url}
    if alone and (others := claims.keys() - {query.sink}):
        raise ConflictError(
            "a sink with another name writes to this URL: give each its own URL", **facts, other_sink=min(others)
        )
    mine = claims.get(query.sink, {})
    replaced = set(mine.values())
    if query.query_id in replaced:
        newer = next(query_id for query_id, replaces in mine.items() if replaces == query.query_id)
        raise ConflictError("this query was replaced by another one, for good", **facts, other_query=newer)
    owners = mine.keys() - replaced - {query.query_id, query.replaces}
    if owners:
        raise ConflictError(
            "another query writes under this name, or did: give the sink another name or, if this query continues "
            "the other one's results and the other one has ended for good, name it: replaces=<its id>",
            **facts,
            other_query=min(owners),
        )
