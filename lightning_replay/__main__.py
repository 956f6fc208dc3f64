# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m lightning_replay``, the same as ``lightning-replay``."""

from lightning_replay.lit.cli import main

if __name__ == "__main__":
    main()
