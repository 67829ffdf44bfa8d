"""All queries by number."""

from __future__ import annotations

from holdfast.benches.nexmark.auctions import AVERAGE_PRICE
from holdfast.benches.nexmark.bids import LAST_BID, TOP_BIDS
from holdfast.benches.nexmark.people import NEW_USERS, USER_SESSIONS
from holdfast.benches.nexmark.query import Query
from holdfast.benches.nexmark.windows import COUNT_BY_BIDDER, HIGHEST_BID, HOT_ITEMS

QUERIES: dict[str, Query] = {
    query.number: query
    for query in (
        AVERAGE_PRICE,
        HOT_ITEMS,
        HIGHEST_BID,
        NEW_USERS,
        USER_SESSIONS,
        COUNT_BY_BIDDER,
        LAST_BID,
        TOP_BIDS,
    )
}
