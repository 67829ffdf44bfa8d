"""Authentication to a broker: PLAIN, and SCRAM with SHA-256 or SHA-512 (RFC 5802).

SCRAM's server proves that it knows the password, too; what it sends is bounded before it is worked on.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.spark_integration.sinks.kafka.wire.fields import MalformedAnswerError

_HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
MECHANISMS = ("PLAIN", *_HASHES)
_ITERATIONS_MIN, _ITERATIONS_MAX = 1_000, 1_000_000


@dataclass(frozen=True)
class Login:
    """A mechanism and its credentials."""

    mechanism: str
    user: str = field(repr=False)
    password: str = field(repr=False)


def authenticate(login: Login, send: Callable[[bytes], bytes], nonce: str) -> None:
    """Exchange the mechanism's tokens; `send` sends one and returns the server's.

    Raises `MalformedAnswerError` if the server does not keep to the mechanism, or does not know the password itself.
    """
    if login.mechanism == "PLAIN":
        send(f"\0{login.user}\0{login.password}".encode())
        return
    _scram(login, send, nonce)


def _scram(login: Login, send: Callable[[bytes], bytes], nonce: str) -> None:
    digest = _HASHES[login.mechanism]
    first = f"n={login.user.replace('=', '=3D').replace(',', '=2C')},r={nonce}"
    challenge = send(f"n,,{first}".encode())
    facts = _attributes(challenge)
    salt, iterations = _decoded(facts.get("s", "")), facts.get("i", "")
    if not facts.get("r", "").startswith(nonce) or len(facts["r"]) == len(nonce):
        raise MalformedAnswerError("the server's nonce does not continue ours")
    if not iterations.isdecimal() or not _ITERATIONS_MIN <= int(iterations[:9]) <= _ITERATIONS_MAX:
        raise MalformedAnswerError("the server asks for too few or too many iterations")

    salted = hashlib.pbkdf2_hmac(digest, login.password.encode(), salt, int(iterations[:9]))
    last = f"c=biws,r={facts['r']}"
    signed = f"{first},{challenge.decode()},{last}".encode()
    client_key = hmac.digest(salted, b"Client Key", digest)
    signature = hmac.digest(hashlib.new(digest, client_key).digest(), signed, digest)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    final = _attributes(send(f"{last},p={base64.b64encode(proof).decode()}".encode()))

    expected = hmac.digest(hmac.digest(salted, b"Server Key", digest), signed, digest)
    if not hmac.compare_digest(_decoded(final.get("v", "")), expected):
        raise MalformedAnswerError("the server does not know the password")


def _attributes(message: bytes) -> dict[str, str]:
    try:
        return {part[:1]: part[2:] for part in message.decode().split(",")}
    except UnicodeDecodeError as exc:
        raise MalformedAnswerError("a token is not text") from exc


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise MalformedAnswerError("a token is not base64") from exc
