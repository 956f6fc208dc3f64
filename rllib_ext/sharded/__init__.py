# SPDX-License-Identifier: Apache-2.0
"""A replay divided over Ray actors, from which RLlib's Learners fetch their rows themselves."""
