"""Parsers of single values on the command line and in the environment. Each raises ValueError with a hint."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.scheduler.faults import parse_fault

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class OptionError(ValueError):
    """An option or a variable cannot be understood, does not exist, or contradicts others: one line that names it."""

    exit_code = 64


def count(minimum: int, maximum: int = 2**31 - 1) -> Callable[[str], int]:
    """A parser of whole numbers in a range, with an optional suffix k or m (1,024 and its square)."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"(\d{1,12})([km]?)", text.strip().lower())
        if match is None:
            raise ValueError("give a whole number, such as 8192 or 8k")
        value = int(match[1]) * _UNITS[match[2]]
        if not minimum <= value <= maximum:
            raise ValueError(f"must be {minimum} to {maximum}")
        return value

    return parse


def option(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser for argparse, which shows the text of no other exception than its own."""

    def read(given: str) -> Any:
        try:
            return parse(given)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{given[:40]!r}: {error}") from None

    return read


def size(text: str) -> int:
    """Parse bytes, with an optional binary suffix: 8G, 8GB and 8GiB are the same."""
    match = re.fullmatch(r"(\d{1,15})(\.\d{1,6})?\s*([kmgt]?)(i?b)?", text.strip().lower())
    if match is None:
        raise ValueError("give bytes with an optional unit, such as 16GiB or 500M")
    value = int(float(match[1] + (match[2] or "")) * _UNITS[match[3]])
    if value < 1:
        raise ValueError("must be positive")
    return value


def share(text: str) -> float:
    """Parse a share of a whole, above 0 and at most 1."""
    if re.fullmatch(r"\d?(\.\d{1,6})?", text.strip()) is None or not 0 < float(text.strip() or "0") <= 1:
        raise ValueError("give a number above 0 and at most 1, such as 0.9")
    return float(text)


def seconds(text: str) -> float:
    """Parse a duration in seconds, up to a day."""
    if re.fullmatch(r"\d{1,5}(\.\d{1,3})?", text.strip()) is None or float(text) > 86_400:
        raise ValueError("give seconds from 0 to 86400")
    return float(text)


def port(text: str) -> int:
    """Parse a TCP port; 0 lets the system choose."""
    if "://" in text:
        raise ValueError("looks like a Kubernetes service link: set enableServiceLinks: false in the pod")
    return count(0, 65_535)(text)


def boolean(text: str) -> bool:
    """Parse the value of a yes-or-no environment variable."""
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.strip().lower() not in words:
        raise ValueError("give 1 or 0")
    return words[text.strip().lower()]


def existing_file(text: str) -> Path:
    """Parse the path of a file that can be read."""
    path = Path(text)
    if not path.is_file():
        raise ValueError("there is no such file")
    return path


def word(text: str) -> str:
    """Accept any text that is not blank."""
    if not text.strip():
        raise ValueError("must not be empty")
    return text.strip()


def keys_of(text: str) -> tuple[str, ...]:
    """Read the keys in a file: one a line; blank lines and those that begin with # do not count."""
    try:
        lines = [line.strip() for line in existing_file(text).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        raise ValueError("this file cannot be read as UTF-8 text") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError("there is no key in this file")
    return keys


def url(text: str) -> str:
    """Parse the address of a service that speaks HTTP."""
    if re.fullmatch(r"https?://[^/\s]+(/\S*)?", text) is None:
        raise ValueError("give an address such as http://localhost:4318/v1/traces")
    return text


def origin(text: str) -> str:
    """Parse an origin as browsers send it: scheme, host and port, nothing else; or * for all."""
    if text != "*" and re.fullmatch(r"https?://([A-Za-z0-9.-]+|\[[0-9a-f:]+\])(:\d+)?", text) is None:
        raise ValueError("give * or scheme and host, such as https://example.org")
    return text


def fault(text: str) -> str:
    """Accept a fault that can be injected."""
    parse_fault(text)
    return text
