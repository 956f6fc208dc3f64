# SPDX-License-Identifier: Apache-2.0
"""RLlib's episodes as rows of a replay."""
