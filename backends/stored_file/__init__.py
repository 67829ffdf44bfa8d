"""The one framing of every file that holdfast stores, locally and durably.

::

    offset 0     section 1          bytes; of a run: an Arrow IPC stream, which any Arrow reader opens as it is
                 section 2 …
                 footer             JSON, UTF-8: kind, encoding, header, and name, offset and sizes of each section
    end - 32     footer size        uint32, little endian
    end - 28     flags              uint16, 0
    end - 26     format version     uint16
    end - 24     digest             XXH3-128 of all bytes before it
    end - 8      magic              "HOLDFAST"

Invariants
----------
* **whole**: a file is accepted only if its magic, its format version and its digest are right; a cut or
  altered file is a `CorruptionError` that names it.
* **self-describing**: `kind` says what it is, `encoding` how its sections are encoded (``"plain"``, or ``"lz4"``:
  each is one LZ4 frame; other values are reserved, for example for encryption), `header` holds the facts of that kind.
* **sizes first**: no memory is allocated before its size is checked: a section's against the footer, the footer's
  against the file and `FOOTER_BYTES_MAX`, and both, if the caller knows it, against what was declared elsewhere. A
  digest proves that a file is whole, not who wrote it.
* **fixed tail**: the format version and the magic stay at these places in every later version.
"""

from holdfast.backends.stored_file.layout import (
    END_BYTES_MAX,
    FOOTER_BYTES_MAX,
    FORMAT_VERSION,
    MAGIC,
    NOTICE_BYTES_MAX,
)
from holdfast.backends.stored_file.reading import (
    BLOCK_BYTES,
    EXPANSION_MAX,
    Read,
    StoredEnd,
    StoredFile,
    decode,
    decode_end,
    digest_at_end,
    digest_of,
    require_digest,
)
from holdfast.backends.stored_file.writing import SectionWriter, encode, encode_in_place, write_to

__all__ = [
    "BLOCK_BYTES",
    "END_BYTES_MAX",
    "EXPANSION_MAX",
    "FOOTER_BYTES_MAX",
    "FORMAT_VERSION",
    "MAGIC",
    "NOTICE_BYTES_MAX",
    "Read",
    "SectionWriter",
    "StoredEnd",
    "StoredFile",
    "decode",
    "decode_end",
    "digest_at_end",
    "digest_of",
    "encode",
    "encode_in_place",
    "require_digest",
    "write_to",
]
