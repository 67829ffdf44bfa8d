"""Parse Spark's DDL strings into schemas without Spark."""

from __future__ import annotations

import re

from pyspark.sql import types as T  # noqa: N812

from holdfast.errors import InvalidArgumentError

_TOKEN = re.compile(r"\s*(`[^`]+`|\w+|[<>(),:])")
_KINDS: tuple[type[T.DataType], ...] = (
    *(T.BinaryType, T.BooleanType, T.ByteType, T.DateType, T.DoubleType, T.FloatType, T.IntegerType, T.LongType),
    *(T.ShortType, T.StringType, T.TimestampType, T.TimestampNTZType),
)
#: Types by name, including synonyms such as ``long`` and ``bigint``.
_TYPES = {name: kind() for kind in _KINDS for name in (kind.typeName(), kind().simpleString())} | {
    "real": T.FloatType(),
    "timestamp_ltz": T.TimestampType(),
}


def parse_schema(schema: T.StructType | str) -> T.StructType:
    """Parse a schema given in any form that Spark accepts. Raises `InvalidArgumentError`."""
    if isinstance(schema, T.StructType):
        return schema
    parser = _Parser(schema)
    struct = parser.fields()
    parser.take("")
    return struct


class _Parser:
    """A recursive-descent parser over tokens."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [*_TOKEN.findall(text), ""]
        if unknown := _TOKEN.sub("", text).strip():
            raise self._error(f"unexpected {unknown[0]!r}")

    def fields(self) -> T.StructType:
        fields = [self._field()]
        while self._takes(","):
            fields.append(self._field())
        return T.StructType(fields)

    def _field(self) -> T.StructField:
        name = self._word().strip("`")
        self._takes(":")
        data_type = self._type()
        is_not_null = self._takes("not") and self._takes("null")
        return T.StructField(name, data_type, not is_not_null)

    def _type(self) -> T.DataType:
        name = self._word().lower()
        if name in ("decimal", "dec", "numeric"):
            return self._decimal()
        if name in ("array", "map", "struct"):
            self.take("<")
            made: T.DataType = self.fields() if name == "struct" else self._type()
            if name == "array":
                made = T.ArrayType(made)
            elif name == "map":
                self.take(",")
                made = T.MapType(made, self._type())
            self.take(">")
            return made
        if name not in _TYPES:
            raise self._error(f"no such type: {name!r}")
        return _TYPES[name]

    def _decimal(self) -> T.DecimalType:
        digits = [10, 0]
        if self._takes("("):
            digits[0] = int(self._word())
            if self._takes(","):
                digits[1] = int(self._word())
            self.take(")")
        return T.DecimalType(*digits)

    def _word(self) -> str:
        word = self._tokens[0]
        if not (word.startswith("`") or word.isidentifier() or word.isdigit()):
            raise self._error(f"expected a name, found {word!r}")
        return self._tokens.pop(0)

    def _takes(self, token: str) -> bool:
        """Consume the next token if it is this one, ignoring case; return whether it was."""
        is_next = self._tokens[0].lower() == token
        if is_next:
            del self._tokens[0]
        return is_next

    def take(self, token: str) -> None:
        if not self._takes(token):
            raise self._error(f"expected {token!r}, found {self._tokens[0]!r}")

    def _error(self, problem: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"cannot parse the schema; pass a StructType instead: {problem}", ddl=self._text)
