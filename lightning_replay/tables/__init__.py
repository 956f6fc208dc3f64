# SPDX-License-Identifier: Apache-2.0
"""Tables of references into one storage, each first in, first out."""
