"""What librdkafka says, as errors of holdfast: by its code, and without credentials."""

# ruff: noqa: SLF001  Codes of librdkafka itself, unlike those of brokers, begin with _ and are public all the same.

from __future__ import annotations

from typing import TypeGuard

from confluent_kafka import KafkaError

from holdfast.errors import FencedError, HoldfastError, InvalidArgumentError, UnavailableError
from holdfast.spark_integration.sinks.kafka.options import ClientOptions

_FENCED = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
_WRONG = {
    KafkaError.MSG_SIZE_TOO_LARGE: "a message is larger than the client or the topic allows; raise message.max.bytes "
    "and the topic's max.message.bytes, or write less",
    KafkaError.RECORD_LIST_TOO_LARGE: "messages are larger than the topic allows; raise its max.message.bytes",
    KafkaError._UNKNOWN_TOPIC: "there is no such topic; create it",
    KafkaError.UNKNOWN_TOPIC_OR_PART: "there is no such topic or partition; create it",
    KafkaError._UNKNOWN_PARTITION: "the topic has no such partition; correct the column partition",
    KafkaError.TOPIC_EXCEPTION: "this is not a topic name; correct it",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "the user has no right to write to the topic",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "the user has no right to write transactional ids that begin "
    "with holdfast.<name of the sink>.",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "the user has no right to write in transactions",
    KafkaError._AUTHENTICATION: "the brokers refused the credentials; check sasl.username and sasl.password",
    KafkaError.SASL_AUTHENTICATION_FAILED: "the brokers refused the credentials; check sasl.username and sasl.password",
    KafkaError._SSL: "no TLS connection to the brokers; check security.protocol and the ssl options",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "the brokers do not allow transactions of this length; lower "
    "transaction.timeout.ms to their transaction.max.timeout.ms",
    KafkaError._INVALID_ARG: "librdkafka does not take an option or a value",
}


def as_ours(error: KafkaError, options: ClientOptions, **facts: object) -> HoldfastError:
    """Return the error for what librdkafka says, without credentials."""
    code = error.code()
    reason = options.without_secrets(error.str())
    if code in _FENCED:
        return FencedError("another attempt or the driver has ended this transaction", reason=reason, **facts)
    if code in _WRONG:
        return InvalidArgumentError(_WRONG[code], reason=reason, **facts)
    return UnavailableError("the brokers did not take the messages", reason=reason, **facts)


def is_users(error: KafkaError | None) -> TypeGuard[KafkaError]:
    """Tell whether an error stays until the user corrects something."""
    return error is not None and error.code() in _WRONG
