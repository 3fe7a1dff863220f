"""How a line of the log is written: as text for people, or as one JSON object for programs."""

import json
import logging
from datetime import UTC, datetime
from typing import Any


class JSONFormatter(logging.Formatter):
    """One object a line: time, level, source, logger, message, the record's own `fields`, and an exception's trace."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "source": self._source,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def formatter(log_format: str, source: str) -> logging.Formatter:
    """Return what formats the lines of "server", "engine" or a rank; `log_format` is "text" or "json"."""
    if log_format == "json":
        return JSONFormatter(source)
    name = "" if source == "server" else f"{source}: "
    return logging.Formatter(f"%(asctime)s %(levelname)-7s {name}%(message)s", "%m-%d %H:%M:%S")
