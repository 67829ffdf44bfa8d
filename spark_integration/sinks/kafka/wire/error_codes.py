"""The Kafka error codes that matter for transactions, by name, and which of them are transient."""

from __future__ import annotations

NONE = 0
UNKNOWN_TOPIC_OR_PARTITION = 3
TOPIC_AUTHORIZATION_FAILED = 29
GROUP_AUTHORIZATION_FAILED = 30
CLUSTER_AUTHORIZATION_FAILED = 31
UNSUPPORTED_SASL_MECHANISM = 33
INVALID_PRODUCER_EPOCH = 47
INVALID_TXN_STATE = 48
INVALID_PRODUCER_ID_MAPPING = 49
INVALID_TRANSACTION_TIMEOUT = 50
CONCURRENT_TRANSACTIONS = 51
TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
PRODUCER_FENCED = 90
TRANSACTIONAL_ID_NOT_FOUND = 105

_NAMES = {
    -1: "UNKNOWN_SERVER_ERROR",
    5: "LEADER_NOT_AVAILABLE",
    7: "REQUEST_TIMED_OUT",
    13: "NETWORK_EXCEPTION",
    14: "COORDINATOR_LOAD_IN_PROGRESS",
    15: "COORDINATOR_NOT_AVAILABLE",
    16: "NOT_COORDINATOR",
    17: "INVALID_TOPIC_EXCEPTION",
    19: "NOT_ENOUGH_REPLICAS",
    20: "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
    34: "ILLEGAL_SASL_STATE",
    35: "UNSUPPORTED_VERSION",
    42: "INVALID_REQUEST",
    56: "KAFKA_STORAGE_ERROR",
    58: "SASL_AUTHENTICATION_FAILED",
    89: "THROTTLING_QUOTA_EXCEEDED",
    120: "TRANSACTION_ABORTABLE",
} | {value: name for name, value in list(globals().items()) if name.isupper() and isinstance(value, int)}

#: The same request may succeed in a moment: a coordinator moves, loads, or still writes its markers.
RETRIABLE = frozenset({5, 7, 13, 14, 15, 16, 19, 20, CONCURRENT_TRANSACTIONS, 56, 89})

#: The user's rights do not suffice.
UNAUTHORISED = frozenset(
    {
        TOPIC_AUTHORIZATION_FAILED,
        GROUP_AUTHORIZATION_FAILED,
        CLUSTER_AUTHORIZATION_FAILED,
        TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)

#: What EndTxn answers where the transaction is not there any more: ended otherwise, fenced, or forgotten.
ENDED_OTHERWISE = frozenset(
    {
        INVALID_PRODUCER_EPOCH,
        INVALID_TXN_STATE,
        INVALID_PRODUCER_ID_MAPPING,
        PRODUCER_FENCED,
        TRANSACTIONAL_ID_NOT_FOUND,
    }
)


def name_of(code: int) -> str:
    """Return Kafka's name of an error code."""
    return _NAMES.get(code, f"error {code}")
