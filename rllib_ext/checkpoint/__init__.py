# SPDX-License-Identifier: Apache-2.0
"""Replay buffers and levels as parts of an RLlib algorithm's checkpoints."""
