# SPDX-License-Identifier: Apache-2.0
"""Matplotlib, imported only when a picture is drawn."""

from __future__ import annotations

from typing import Any

from lightning_replay.extras import missing_extra


def import_pyplot(picture: str) -> Any:
    """``matplotlib.pyplot``, which draws into files unless a display was chosen before.

    Args:
        picture: what is drawn, for the error.

    Raises:
        MissingExtraError: without the extra ``plots``.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise missing_extra(picture, "matplotlib", "plots") from error
    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot

    return pyplot
