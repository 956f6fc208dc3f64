# SPDX-License-Identifier: Apache-2.0
"""Pictures of several measures side by side: learning, and beside it the replay distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def draw_panels(
    panels: Mapping[str, Mapping[str, np.ndarray]], at: Sequence[int], path: Path, title: str, xlabel: str
) -> None:
    """Means of curves ``[seeds, P]`` with bands of one standard error, one panel for each measure, as a PNG file.

    Args:
        panels: by the name of the measure, the curves of each method.
        at: where the points of all curves are, ``[P]``.
        path: of the picture.
        title: above all panels.
        xlabel: what ``at`` counts.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, row = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), layout="constrained", squeeze=False)
    for axes, (measure, curves) in zip(row[0], panels.items(), strict=True):
        for label, values in curves.items():
            mean = values.mean(0)
            error = values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.zeros_like(mean)
            (line,) = axes.plot(at, mean, label=label)
            axes.fill_between(at, mean - error, mean + error, color=line.get_color(), alpha=0.15, linewidth=0)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(measure)
    row[0][0].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
