# SPDX-License-Identifier: Apache-2.0
"""Loops over the steps of episodes for conditions with a memory, compiled."""

import numpy as np

from lightning_replay.jit import compiled

# The rule by which a condition follows an episode, as the method ``follow`` of its class says.
FIRST, SUSTAINED, REESTABLISHED = range(3)


@compiled
def recall(rows, memory, start):  # type: ignore[no-untyped-def]
    """Returns the integer of each episode, int64. Episodes without a row begin with ``start``."""
    remembered = np.full(rows.size, start)
    for episode in range(rows.size):
        if rows[episode] >= 0:
            remembered[episode] = memory[rows[episode]]
    return remembered


@compiled
def keep(rows, memory, ended, remembered):  # type: ignore[no-untyped-def]
    """Writes the integers of episodes that have a row, and returns for how many a row must be opened or closed."""
    changed = 0
    for episode in range(rows.size):
        if rows[episode] >= 0:
            memory[rows[episode]] = remembered[episode]
        changed += (rows[episode] >= 0) == ended[episode]
    return changed


@compiled
def follow(rule, steps, start, held, order, bounds, done, remembered, happened):  # type: ignore[no-untyped-def]
    """Follows episodes by a rule. Fills in at which steps the event happens, and replaces the remembered integers."""
    for episode in range(remembered.size):
        now = remembered[episode]
        for place in range(bounds[episode], bounds[episode + 1]):
            row = order[place]
            if rule == FIRST:
                happened[row] = held[row] and now == 0
                now = 1 if held[row] else now
            elif rule == SUSTAINED:
                now = min(now, steps) + 1 if held[row] else 0
                happened[row] = now == steps
            elif held[row]:
                happened[row] = now == steps - 1
                now = -1 if now < 0 or happened[row] else now + 1
            else:
                happened[row] = False
                now = 0
            if done[row]:
                now = start
        remembered[episode] = now
