# SPDX-License-Identifier: Apache-2.0
"""One replay divided over Ray actors: exact draws, and what becomes of actors that are lost."""
