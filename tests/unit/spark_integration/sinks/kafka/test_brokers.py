"""Logins: what is sent, and that a server which does not know the password, or asks too much, is refused."""

from __future__ import annotations

import base64
from collections.abc import Callable

import pytest

from holdfast.spark_integration.sinks.kafka.brokers import Login, authenticate
from holdfast.spark_integration.sinks.kafka.protocol import MalformedAnswerError

# Of RFC 7677, section 3.
_LOGIN = Login("SCRAM-SHA-256", "user", "pencil")
_NONCE = "rOprNGfwEbeRWgbNEkqO"
_CHALLENGE = "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
_PROOF = "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
_VERIFIER = "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def server(sent: list[bytes], *answers: str) -> Callable[[bytes], bytes]:
    """Return a server that keeps what it is sent and answers so."""
    left = iter(answers)

    def send(token: bytes) -> bytes:
        sent.append(token)
        return next(left).encode()

    return send


def test_scram_as_the_rfc_shows_it() -> None:
    sent: list[bytes] = []
    authenticate(_LOGIN, server(sent, _CHALLENGE, _VERIFIER), _NONCE)
    assert sent == [b"n,,n=user,r=" + _NONCE.encode(), _PROOF.encode()]


def test_plain_sends_user_and_password() -> None:
    sent: list[bytes] = []
    authenticate(Login("PLAIN", "user", "pencil"), server(sent, ""), _NONCE)
    assert sent == [b"\0user\0pencil"]


@pytest.mark.parametrize(
    "answers",
    [
        (_CHALLENGE, "v=" + base64.b64encode(b"x" * 32).decode()),
        (_CHALLENGE, "e=other-error"),
        (_CHALLENGE, "v=*"),
        (_CHALLENGE.replace("i=4096", "i=2000000000"),),
        (_CHALLENGE.replace("i=4096", "i=1"),),
        (_CHALLENGE.replace("r=rOpr", "r=other"),),
        (f"r={_NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",),
        ("",),
    ],
)
def test_a_server_that_does_not_keep_to_scram_is_refused(answers: tuple[str, ...]) -> None:
    with pytest.raises(MalformedAnswerError):
        authenticate(_LOGIN, server([], *answers), _NONCE)


def test_a_login_shows_nothing() -> None:
    assert "pencil" not in repr(_LOGIN)
