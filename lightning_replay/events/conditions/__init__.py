# SPDX-License-Identifier: Apache-2.0
"""Predicates over steps; :mod:`lightning_replay.events` exports them under the names users write."""
