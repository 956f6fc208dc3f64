# SPDX-License-Identifier: Apache-2.0
"""Environments that play a level chosen for them, alone and side by side."""
