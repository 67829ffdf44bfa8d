from __future__ import annotations

import re

from holdfast import clock


def test_ids_are_16_hexadecimal_characters_and_differ() -> None:
    ids = [clock.new_id() for _ in range(1000)]
    assert all(re.fullmatch("[0-9a-f]{16}", one) for one in ids)
    assert len(set(ids)) == 1000


def test_monotonic_time_never_goes_back() -> None:
    readings = [clock.monotonic_ms() for _ in range(1000)]
    assert readings == sorted(readings)


def test_wall_clock_is_in_milliseconds() -> None:
    assert 1_600_000_000_000 < clock.now_ms() < 10_000_000_000_000
