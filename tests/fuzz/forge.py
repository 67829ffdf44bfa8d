"""Stored files as somebody could write them who knows the format and has no part of holdfast: for hostile ones.

Written from FORMAT.md section 1. A digest proves that a file is whole, not who wrote it: each file that is made here
has a right one.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lz4.frame
import xxhash

TAIL_BYTES = 32


class Parts(NamedTuple):
    """A stored file taken apart: the bytes of its sections, and its footer."""

    body: bytes
    footer: dict[str, Any]


def take_apart(data: bytes) -> Parts:
    size = struct.unpack("<I", data[-32:-28])[0]
    return Parts(data[: -TAIL_BYTES - size], json.loads(data[-TAIL_BYTES - size : -TAIL_BYTES]))


def put_together(body: bytes, footer: object, *, flags: int = 0, version: int = 1) -> bytes:
    """Return a stored file with a right digest; a footer of bytes is taken as it is."""
    text = footer if isinstance(footer, bytes) else json.dumps(footer).encode()
    data = body + text + struct.pack("<IHH", len(text), flags, version)
    return data + xxhash.xxh3_128(data).digest() + b"HOLDFAST"


def with_header(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return a stored file with another header, and a right digest."""
    body, footer = take_apart(data)
    change(footer["header"])
    return put_together(body, footer)


def digest_of(data: bytes) -> str:
    return data[-24:-8].hex()


def resealed(data: bytes) -> bytes:
    """Return the bytes with the digest that they should have."""
    return data[:-24] + xxhash.xxh3_128(data[:-24]).digest() + data[-8:]


def frame_that_claims(content: bytes, claimed_bytes: int) -> bytes:
    """Return an LZ4 frame of `content` whose header says that it holds another number of bytes."""
    frame = bytearray(lz4.frame.compress(content, store_size=True))
    frame[6:14] = struct.pack("<Q", claimed_bytes)
    frame[14] = xxhash.xxh32(bytes(frame[4:14])).intdigest() >> 8 & 0xFF
    return bytes(frame)


# What can be wrong with a value of JSON.

ODD: list[Any] = [
    None, True, -1, 0, 1, 255, 2**31, 2**62, 2**63, 2**64, 10**400, 0.5, 1e308, -1e-300,
    "", "x", "0", "..", "../../etc/passwd", "1-aa", "007-aa", "1-a/b", "\x00", "\ud800", "é" * 200, "9" * 400 + "-aa",
    [], [[]], {}, {"": {}}, [None], "A" * 10_000,
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value inside a value of JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def spoil_json(value: Any, chance: random.Random) -> str:
    """Change one place of a JSON value, and say which."""
    path = chance.choice(list(places(value)))
    container, key = at(value, path[:-1]), path[-1]
    way = chance.randrange(5)
    if way == 0:
        del container[key]
        return f"deleted {key!r}"
    if way == 1 and isinstance(container[key], int):
        container[key] += chance.choice([-1, 1, 8, 2**40, -(2**40)])
        return f"{key!r} is off: {container[key]}"
    if way == 2 and isinstance(container, list):
        container.extend([container[key]] * chance.choice([1, 1000]))
        return f"repeated {key!r}"
    if way == 3:
        nested: Any = container[key]
        for _ in range(chance.choice([1, 50, 900])):
            nested = [nested]
        container[key] = nested
        return f"nested {key!r}"
    container[key] = chance.choice(ODD)
    return f"{key!r} became {container[key]!r:.80}"


def spoil_bytes(data: bytearray, chance: random.Random, start: int, end: int) -> str:
    """Change some bytes between two places, and say which; nothing is changed where there are none."""
    if start >= end:
        return "nothing to change"
    said = []
    for _ in range(chance.choice([1, 1, 1, 3, 10])):
        at = chance.randrange(start, end)
        width = chance.choice([1, 1, 4, 8])
        new = chance.choice(
            [
                bytes([data[at] ^ 1 << chance.randrange(8)]),
                chance.randbytes(width),
                b"\xff" * width,
                b"\x00" * width,
                struct.pack("<q", chance.choice([-1, 2**31, 2**40, 2**46, 2**62, -(2**63)])),
            ]
        )
        changed = new[: end - at]
        data[at : at + len(changed)] = changed
        said.append(f"{at}: {changed.hex()}")
    return "bytes " + ", ".join(said)
