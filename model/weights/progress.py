"""How far loading has come: a bar on a terminal, a log line every tenth otherwise."""

import logging
import sys
from collections.abc import Callable

from tqdm import tqdm

logger = logging.getLogger(__name__)


def loading_progress(label: str) -> Callable[[int, int], None]:
    """A callback for load_weights: bytes done, bytes in all. The bar is drawn on standard error, without colours."""
    return _Bar(label) if sys.stderr.isatty() else _Lines(label)


class _Bar:
    def __init__(self, label: str) -> None:
        self.bar = tqdm(desc=label, unit="B", unit_scale=True, file=sys.stderr)

    def __call__(self, done: int, total: int) -> None:
        self.bar.total = total
        self.bar.update(done - self.bar.n)
        if done >= total:
            self.bar.close()


class _Lines:
    def __init__(self, label: str) -> None:
        self.label = label
        self.tenths = 0

    def __call__(self, done: int, total: int) -> None:
        tenths = 10 * done // total
        if tenths > self.tenths:
            self.tenths = tenths
            logger.info("%s: %d %% of %s bytes", self.label, 10 * tenths, f"{total:,}")
