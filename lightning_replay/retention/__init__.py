# SPDX-License-Identifier: Apache-2.0
"""Eviction by surprise and on-policyness: rules, the order of eviction, feedback."""
