"""A function for applyInPandasWithState that does what the rows, or the key, tell it to, and says what it saw.

A row's column ``do`` holds commands, separated by ``;``. When a key times out there are no rows: then the part of the
key behind ``@`` is the program. Each call returns one row, whose ``note`` tells what the function was given, what each
command came to, and how the state looked afterwards::

    data [1, 2], new | update 5: None | (5,)

So one function, the same on every engine, shows all that a function can see of its state.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.errors import PySparkException

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

INPUT = "key string, at timestamp, v long, do string"
OUTPUT = "key string, note string"
STATE = "n long"


def interpret(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Carry out the commands of the rows, or of the key, and return what was seen."""
    rows = pd.concat(list(chunks))
    name, before = key[0], _shown(state)
    if state.hasTimedOut:
        seen = f"timeout {list(rows.columns)} {len(rows)}"
        program = name.partition("@")[2]
    else:
        rows = rows.sort_values("v")
        seen = f"data {rows['v'].tolist()}"
        program = ";".join(rows["do"].dropna())
    outcomes = [f"{command}: {_outcome(command, state)}" for command in program.split(";") if command]
    note = " | ".join([f"{seen}, {before}", *outcomes, _shown(state)])
    yield pd.DataFrame({"key": [name], "note": [note]})


def _shown(state: GroupState) -> str:
    return f"exists {state.getOption}" if state.exists else f"new {state.getOption}"


def _outcome(command: str, state: GroupState) -> str:
    name, _, argument = command.partition(" ")
    try:
        return f"{_COMMANDS[name](state, argument)}"
    except PySparkException as exc:
        return f"{type(exc).__name__} {exc}"


_COMMANDS: dict[str, Callable[[GroupState, str], object]] = {
    "update": lambda state, text: state.update(tuple(int(value) for value in text.split(","))),
    "update-none": lambda state, _: state.update(None),  # type: ignore[arg-type]
    "increase": lambda state, _: state.update(((state.getOption or (0,))[0] + 1,)),
    "remove": lambda state, _: state.remove(),
    "get": lambda state, _: state.get,
    "str": lambda state, _: str(state),
    "duration": lambda state, text: state.setTimeoutDuration(int(text)),
    "duration-text": lambda state, text: state.setTimeoutDuration(text),  # type: ignore[arg-type]
    "timestamp": lambda state, text: state.setTimeoutTimestamp(int(text)),
    "at": lambda state, text: state.setTimeoutTimestamp(dt.datetime.fromisoformat(text)),  # type: ignore[arg-type]
    "after": lambda state, text: state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + int(text)),
    "watermark": lambda state, _: state.getCurrentWatermarkMs(),
    "old-timeout": lambda state, _: state.oldTimeoutTimestamp,
    "timed-out": lambda state, _: state.hasTimedOut,
    "fail": lambda state, text: 1 / 0,
}
