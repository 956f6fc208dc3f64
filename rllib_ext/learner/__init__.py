# SPDX-License-Identifier: Apache-2.0
"""What Learners get and give back: batches, TD errors."""
