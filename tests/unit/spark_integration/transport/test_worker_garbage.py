from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from holdfast.spark_integration.transport import worker_garbage


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    worker_garbage._freeze.cache_clear()
    yield
    worker_garbage._freeze.cache_clear()
    gc.unfreeze()


class Cyclic:
    def __init__(self) -> None:
        self.me = self


def test_what_is_loaded_is_left_out_of_later_collections() -> None:
    worker_garbage.freeze_modules()
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < 1_000


def test_garbage_from_before_and_after_is_collected() -> None:
    before = weakref.ref(Cyclic())
    worker_garbage.freeze_modules()
    after = weakref.ref(Cyclic())
    gc.collect()
    assert before() is None
    assert after() is None


def test_it_happens_once() -> None:
    worker_garbage.freeze_modules()
    later = [Cyclic()]
    frozen = gc.get_freeze_count()
    worker_garbage.freeze_modules()
    assert gc.get_freeze_count() <= frozen
    assert any(o is later[0] for o in gc.get_objects())
