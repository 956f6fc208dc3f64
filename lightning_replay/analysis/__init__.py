# SPDX-License-Identifier: Apache-2.0
"""Looking at buffers: inspection, plots, recorded data sets."""
