"""What stands where in a stored file, and how large it may be; the picture is the package's."""

from __future__ import annotations

import struct

FORMAT_VERSION = 1
MAGIC = b"HOLDFAST"
FOOTER_SIZE = struct.Struct("<IHH")
DIGEST_BYTES = 16
TAIL_BYTES = FOOTER_SIZE.size + DIGEST_BYTES + len(MAGIC)
#: The largest footer that is written or read: JSON takes 25 times its size in memory. A snapshot's, which names a part
#: every 8 MiB, is as large for 1 TB of state in one shard.
FOOTER_BYTES_MAX = 16 << 20
#: The size of the largest file without sections: of all that says something about state, and holds none.
NOTICE_BYTES_MAX = FOOTER_BYTES_MAX + TAIL_BYTES
#: Room for the end of any stored file with one section.
END_BYTES_MAX = 64 << 10
