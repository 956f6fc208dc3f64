# SPDX-License-Identifier: Apache-2.0
"""Which rows follow which: links between rows, running episodes, returns over several steps."""
