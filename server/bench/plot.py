"""The latency distributions of a run as a picture. Needs matplotlib, the extra `plot`."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from octavo.server.bench.figures import LATENCIES, Samples
from octavo.server.values import OptionError


def check_can_plot() -> None:
    """Raise OptionError if matplotlib is missing. Imports it, so that a long run does not end with that news."""
    try:
        import matplotlib.backends.backend_agg  # noqa: F401, PLC0415
    except ImportError:
        raise OptionError("--plot needs matplotlib: pip install matplotlib") from None


def draw(path: Path, title: str, samples: Mapping[str, Samples]) -> None:
    """Write a PNG with the share of requests or tokens that waited at most so long, one panel for each latency."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, wrap=True, fontsize=10)
    for axes, (key, name) in zip(figure.subplots(2, 2).flat, LATENCIES.items(), strict=True):
        values = np.sort(samples[key])
        axes.set(title=name, xlabel="milliseconds", ylabel="share of samples at most this", ylim=(0, 1))
        if len(values):
            axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post")
            for q in (50, 99):
                axes.axvline(np.percentile(values, q), linestyle=":", linewidth=1, label=f"p{q}")
            if values[0] > 0:
                axes.set_xscale("log")
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, format="png", dpi=120)
