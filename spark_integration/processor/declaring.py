"""What a processor declares: its ``init`` runs on the driver, at definition, on a copy of the processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from pyspark import cloudpickle
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.processor.handle import PRE_INIT, ParseText, ProcessorHandle
from holdfast.spark_integration.processor.state.spark_errors import invalid_handle_state
from holdfast.spark_integration.processor.state.variables import StateVariable
from holdfast.spark_integration.shard.timeout import TimeMode
from holdfast.spark_integration.spark_types import parse_struct


class PickledProcessor:
    """A processor as it travels to the workers; each call of a shard makes a new one, as Spark does.

    Raises `InvalidArgumentError` if it is no `StatefulProcessor`, or cannot be pickled.
    """

    def __init__(self, processor: object) -> None:
        if not isinstance(processor, StatefulProcessor):
            raise InvalidArgumentError(
                "statefulProcessor must be an instance of pyspark.sql.streaming.StatefulProcessor",
                given=f"the class {processor.__name__}" if isinstance(processor, type) else type(processor).__name__,
            )
        try:
            self._pickled: bytes = cloudpickle.dumps(processor)  # type: ignore[no-untyped-call]
        except Exception as exc:  # whatever an attribute's own methods raise
            raise InvalidArgumentError(
                f"the {type(processor).__name__} cannot be pickled to reach the workers: {exc}. Create what cannot "
                "travel, such as connections and locks, in init"
            ) from exc

    def unpickled(self) -> StatefulProcessor:
        """Return a new processor. Raises `InvalidArgumentError` if it comes from a module that is not here."""
        try:
            processor: StatefulProcessor = cloudpickle.loads(self._pickled)
        except ModuleNotFoundError as exc:
            module, _, _ = str(exc.name).partition(".")
            raise InvalidArgumentError(
                f"the processor comes from the module {module}, which Spark's tasks cannot import: send it, by "
                f'spark.addArtifacts("{module}.py", pyfile=True) or spark-submit --py-files, or install it where the '
                "executors run"
            ) from exc
        return processor


@dataclass(frozen=True)
class Declaration:
    """What a processor declares."""

    variables: tuple[StateVariable, ...]
    schemas: dict[str, StructType]  #: The schemas that it gives as text, parsed


def declaration_of(processor: PickledProcessor, time_mode: TimeMode, parse: ParseText = parse_struct) -> Declaration:
    """Return what a processor declares in ``init``; runs that and ``close``.

    Raises `InvalidArgumentError` or `PySparkRuntimeError` if a declaration is wrong.

    `parse` is for schemas given as text: by default Spark's parser, which needs a JVM.
    """
    fresh = processor.unpickled()
    schemas: dict[str, StructType] = {}
    handle = ProcessorHandle(time_mode, schemas, _NoStates(), None, PRE_INIT, parse)
    fresh.init(handle)
    fresh.close()
    return Declaration(tuple(handle.variables.values()), schemas)


class _NoStates:
    """Stands behind the handle on the driver, which has no state."""

    def open(self, variable: StateVariable) -> _Unusable:
        return _Unusable(variable)

    def drop(self, name: str) -> None:
        """Leave it to the workers."""


class _Unusable:
    """A variable's state on the driver: each method fails."""

    def __init__(self, variable: StateVariable) -> None:
        self._variable = variable

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def fail(*_: object, **__: object) -> NoReturn:
            raise invalid_handle_state(
                f"using {self._variable.what} in init, where no key is being called", name, PRE_INIT
            )

        return fail
