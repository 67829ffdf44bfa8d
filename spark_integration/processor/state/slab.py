"""The keys whose state is fetched and written together, and which of them is being called."""

from __future__ import annotations

from threading import get_ident

from holdfast.backends.run import Keys
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.processor.state.spark_errors import invalid_handle_state, missing_variable

_NONE = -1


class Slab:
    """The current keys; the one being called is Spark's implicit key.

    `call` is the number of the call that runs, `phase` is Spark's name for what the processor is doing.
    """

    #: Each once
    keys: Keys  # from the first `begin` on; no call runs before

    def __init__(self) -> None:
        self.call = 0
        self.phase = "CREATED"
        self._at = _NONE
        self._thread = get_ident()

    def begin(self, keys: Keys) -> None:
        """Begin with other keys; none is being called."""
        self.keys = keys
        self.leave()

    def enter(self, at: int) -> None:
        """Begin the call of key `at`."""
        self._at = at
        self.call += 1

    def leave(self) -> None:
        """End the call."""
        self._at = _NONE
        self.call += 1

    def current(self, doing: str) -> int:
        """Return which key is being called.

        Raises `PySparkRuntimeError` if none is: the processor's ``init`` or ``close`` runs; `InvalidArgumentError` if
        another thread asks, which could not know whose state it gets.

        `doing`: what for, in Spark's words.
        """
        if self._thread != get_ident():
            raise InvalidArgumentError(
                "a thread that the processor started uses its state: use it only in the thread that calls the "
                "processor, or another key's state could be read and written"
            )
        if self._at == _NONE:
            raise invalid_handle_state(doing, doing.replace(" ", "_"), self.phase)
        return self._at


class MissingSlab(Slab):
    """Stands in for a slab after ``init`` has deleted the variable it declared. `name`: the variable."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def current(self, doing: str) -> int:
        """Raise `PySparkRuntimeError`, whoever asks."""
        raise missing_variable(doing, self._name)
