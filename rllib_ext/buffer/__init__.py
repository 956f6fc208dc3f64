# SPDX-License-Identifier: Apache-2.0
"""Replay buffers behind RLlib's interface."""
