# SPDX-License-Identifier: Apache-2.0
"""Collecting transitions and rollouts between the updates of a Trainer."""
