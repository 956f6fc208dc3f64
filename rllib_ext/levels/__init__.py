# SPDX-License-Identifier: Apache-2.0
"""Level replay in RLlib: which level each environment plays next, for PPO, APPO and IMPALA."""
