# SPDX-License-Identifier: Apache-2.0
"""Looking into buffers: a page about one, a comparison of several, figures and pictures."""
