# SPDX-License-Identifier: Apache-2.0
"""Inspection of buffers, plots, recorded data sets."""
