# SPDX-License-Identifier: Apache-2.0
"""Batches for Learners, and their TD errors."""
