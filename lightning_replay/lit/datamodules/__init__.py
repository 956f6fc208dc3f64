# SPDX-License-Identifier: Apache-2.0
"""Data modules that replay transitions or levels."""
