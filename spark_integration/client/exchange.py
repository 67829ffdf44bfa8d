"""One Arrow Flight exchange with the state server; maps its errors and broken connections to ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Self

import pyarrow as pa
import pyarrow.flight as flight

from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.client.messages import Message, ServerLostError, decode, encode


class Exchange:
    """One exchange with the state server; as a context manager it ends with the context.

    Parameters
    ----------
    client : StateClient
    message : mapping
        The request, as JSON values.
    timeout_seconds : float or None
        For the whole exchange; None for no limit.

    Notes
    -----
    Every method raises what `StateClient.call` does. Threads: one at a time.
    """

    def __init__(self, client: StateClient, message: Message, timeout_seconds: float | None) -> None:
        self._client = client
        with client.mapped_errors():
            options = flight.FlightCallOptions(timeout=timeout_seconds)
            asked = flight.FlightDescriptor.for_command(encode(message))
            self._writer, self._reader = client.connection().do_exchange(asked, options)

    def send(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> None:
        """Send batches of one schema, and nothing after them."""
        with self._client.mapped_errors():
            self._writer.begin(schema)
            for batch in batches:
                self._writer.write_batch(batch)
        self.end()

    def ask(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Send batches of one schema; after each, yield the answers until they have as many rows."""
        with self._client.mapped_errors():
            self._writer.begin(schema)
        answers = self.receive()
        for batch in batches:
            with self._client.mapped_errors():
                self._writer.write_batch(batch)
            missing = batch.num_rows
            while missing > 0:
                answer = next(answers, None)
                if answer is None:
                    raise ServerLostError("the state server ended before it had answered")
                missing -= answer.num_rows
                yield answer
        self.end()

    def end(self) -> None:
        """Tell the server that nothing more follows."""
        with self._client.mapped_errors():
            self._writer.done_writing()

    def receive(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches that the server sends, until it has finished."""
        while True:
            try:
                with self._client.mapped_errors():
                    chunk = self._reader.read_chunk()
            except StopIteration:
                return
            yield chunk.data

    def answer(self) -> Message:
        """Return the message that the server sends."""
        with self._client.mapped_errors():
            return decode(self._reader.read_chunk().app_metadata.to_pybytes())

    def close(self) -> None:
        """End the exchange; the server sends nothing more."""
        for end in (self._reader.cancel, self._writer.close):
            with suppress(flight.FlightError, pa.ArrowException, OSError):  # it has been ended, or has broken
                end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
