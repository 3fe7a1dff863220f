"""The compiled library, whose calls can be recorded and repeated.

A step calls some hundred functions on addresses that follow from the number of its tokens alone. Checking and packing
their arguments in Python costs several times what the call itself does; repeating recorded calls costs only the calls.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any


class Library(ctypes.CDLL):
    """All functions that are made here return nothing, or an int that is 0 where all went well."""

    _recorded: list[Callable[[], Any]] | None = None

    def function(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
        """Return a function by its name; `arguments` and `result` are ctypes types."""
        function = self[name]  # a new object at each look-up, so that nobody else's types are changed
        function.argtypes = arguments
        function.restype = result

        def call(*values: Any) -> Any:
            if self._recorded is not None:
                self._recorded.append(partial(function, *values))
            return function(*values)

        return call

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        """Run `body`, and return what repeats its calls in their order, with the same arguments.

        What the addresses among them point to must still be there then. The repetition raises ValueError, and goes no
        further, where a call finds wrong what it reads.
        """
        calls: list[Callable[[], Any]] = []
        self._recorded = calls
        try:
            body()
        finally:
            self._recorded = None
        return partial(_repeat, tuple(calls))


def _repeat(calls: tuple[Callable[[], Any], ...]) -> None:
    for call in calls:
        if call():
            raise ValueError("a recorded call read a token id or a position out of range")
