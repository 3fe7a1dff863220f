"""How far something long has come: a bar on a terminal, a log line every tenth otherwise."""

import logging
import sys
from collections.abc import Callable

from tqdm import tqdm

logger = logging.getLogger(__name__)


def loading_progress(label: str, unit: str = "bytes") -> Callable[[int, int], None]:
    """A callback that is told how much is done, and of how much. Draws on standard error, without colours."""
    return _Bar(label, unit) if sys.stderr.isatty() else _Lines(label, unit)


class _Bar:
    def __init__(self, label: str, unit: str) -> None:
        self.bar = tqdm(desc=label, unit="B" if unit == "bytes" else f" {unit}", unit_scale=True, file=sys.stderr)

    def __call__(self, done: int, total: int) -> None:
        self.bar.total = total
        self.bar.update(done - self.bar.n)
        if done >= total:
            self.bar.close()


class _Lines:
    def __init__(self, label: str, unit: str) -> None:
        self.label = label
        self.unit = unit
        self.tenths = 0

    def __call__(self, done: int, total: int) -> None:
        tenths = 10 * done // total
        if tenths > self.tenths:
            self.tenths = tenths
            logger.info("%s: %d %% of %s %s", self.label, 10 * tenths, f"{total:,}", self.unit)
