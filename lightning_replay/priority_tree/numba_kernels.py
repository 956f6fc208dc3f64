# SPDX-License-Identifier: Apache-2.0
"""Loops of the numba priority tree, compiled."""

import numpy as np

from lightning_replay.jit import compiled, inlined

# Measured over 8, 16, 32 and 64 with 256 draws and updates: 16 float32 leaves fill one cache line of 64 bytes.
SHIFT = 4
FAN_OUT = 1 << SHIFT
# Levels above this many nodes do not stay in the second-level cache. Loading them ahead hides most of the wait.
PREFETCH_ABOVE = 20_000
INFINITY = np.float32(np.inf)
# Without it numba tests every index it loads from for being negative: as many instructions as the sums.
NOT_NEGATIVE = 2**62 - 1
# The start of each sum. With a plain 0.0, NumPy adds in float32 if the loops are not compiled.
ZERO = np.float64(0.0)


# A call between compiled functions counts references to every array it passes: four times the work of a block.
@inlined
def _sum_leaves(leaves, first):  # type: ignore[no-untyped-def]
    """Returns sum and smallest positive of one block of leaves, in four parallel chains of fixed order."""
    first &= NOT_NEGATIVE
    a, b, c, d = ZERO, ZERO, ZERO, ZERO
    low_a, low_b, low_c, low_d = INFINITY, INFINITY, INFINITY, INFINITY
    for slot in range(first, first + FAN_OUT, 4):
        p, q, r, s = leaves[slot], leaves[slot + 1], leaves[slot + 2], leaves[slot + 3]
        a, b, c, d = a + p, b + q, c + r, d + s
        p = p if p > 0 else INFINITY
        low_a = p if p < low_a else low_a
        q = q if q > 0 else INFINITY
        low_b = q if q < low_b else low_b
        r = r if r > 0 else INFINITY
        low_c = r if r < low_c else low_c
        s = s if s > 0 else INFINITY
        low_d = s if s < low_d else low_d
    low_a = low_b if low_b < low_a else low_a
    low_c = low_d if low_d < low_c else low_c
    return (a + b) + (c + d), low_c if low_c < low_a else low_a


@inlined
def _sum_nodes(sums, minima, first):  # type: ignore[no-untyped-def]
    first &= NOT_NEGATIVE
    a, b, c, d = ZERO, ZERO, ZERO, ZERO
    low_a, low_b, low_c, low_d = INFINITY, INFINITY, INFINITY, INFINITY
    for node in range(first, first + FAN_OUT, 4):
        a, b, c, d = a + sums[node], b + sums[node + 1], c + sums[node + 2], d + sums[node + 3]
        p, q, r, s = minima[node], minima[node + 1], minima[node + 2], minima[node + 3]
        low_a = p if p < low_a else low_a
        low_b = q if q < low_b else low_b
        low_c = r if r < low_c else low_c
        low_d = s if s < low_d else low_d
    low_a = low_b if low_b < low_a else low_a
    low_c = low_d if low_d < low_c else low_c
    return (a + b) + (c + d), low_c if low_c < low_a else low_a


@inlined
def _recompute(level, node, leaves, sums, minima, starts):  # type: ignore[no-untyped-def]
    if level == 1:
        total, least = _sum_leaves(leaves, node << SHIFT)
    else:
        total, least = _sum_nodes(sums, minima, starts[level - 1] + (node << SHIFT))
    sums[starts[level] + node] = total
    minima[starts[level] + node] = least


@compiled
def refresh(index, leaves, sums, minima, starts, counts):  # type: ignore[no-untyped-def]
    """Recomputes every node above the slots in ``index``, from the leaves upwards, and skips -1."""
    first, last = counts[0] - 1, np.int64(0)
    for position in range(index.size):
        if index[position] >= 0:
            first, last = min(first, index[position]), max(last, index[position])
    for level in range(1, counts.size):
        shift = SHIFT * level
        first, last = first >> SHIFT, last >> SHIFT
        is_dense = last - first < index.size  # no more nodes than slots: each of them once, in order
        touched = 0.0
        if not is_dense and counts[level] > PREFETCH_ABOVE and level > 1:
            for position in range(index.size):
                child = starts[level - 1] + (max(index[position], 0) >> shift << SHIFT)
                touched += sums[child] + sums[child + FAN_OUT // 2] + minima[child]
        previous = -1 if touched >= 0 else -2  # a use, so that the loads above are not optimized away
        for position in range(last - first + 1 if is_dense else index.size):
            node = first + position if is_dense else index[position] >> shift
            if node >= 0 and node != previous:
                _recompute(level, node, leaves, sums, minima, starts)
            previous = node


@compiled
def update(  # type: ignore[no-untyped-def]
    index, error, is_feedback, generation, stored, offset, exponent, limit, leaves, sums, minima, starts, counts
):
    """Writes ``(|error| + offset) ** exponent``, and returns the largest ``|error|`` and how many rows are stale."""
    # Feedback is signed errors, of rows with generations. Otherwise the errors are priorities, and slots of -1 are
    # skipped. The largest is -1 when every row was skipped. It is -2, and nothing is written, when a row is refused.
    slots, value = np.empty(index.size, np.int64), np.empty(index.size, np.float32)
    largest, stale, refused = np.float32(-1.0), 0, False
    for position in range(index.size):
        slot, magnitude = index[position], error[position]
        if is_feedback:
            magnitude = abs(magnitude)
            if slot < 0 or slot >= stored.size:
                refused = True
            elif stored[slot] != generation[position]:
                slot, stale = -1, stale + 1
        value[position] = (magnitude + offset) ** exponent
        refused |= slot < -1 or slot >= limit
        refused |= not (magnitude >= 0 and magnitude < INFINITY and value[position] < INFINITY)
        if slot >= 0 and magnitude > largest:
            largest = magnitude
        slots[position] = slot
    if refused:
        return np.float32(-2.0), 0
    for position in range(index.size):
        if slots[position] >= 0:
            leaves[slots[position]] = value[position]
    refresh(slots, leaves, sums, minima, starts, counts)
    return largest, stale


@compiled
def fill_checked(index, value, limit, leaves, sums, minima, starts, counts):  # type: ignore[no-untyped-def]
    """Writes one value to every slot in ``index``. Returns False with nothing written when one is out of range."""
    for position in range(index.size):
        if index[position] < -1 or index[position] >= limit:
            return False
    for position in range(index.size):
        if index[position] >= 0:
            leaves[index[position]] = value
    refresh(index, leaves, sums, minima, starts, counts)
    return True


@compiled
def set_rows(  # type: ignore[no-untyped-def]
    rows, slot_of, priority, offset, exponent, leaves, sums, minima, starts, counts
):
    """Writes ``(priority[row] + offset) ** exponent`` to the slot ``slot_of[row]`` of each row, and skips -1."""
    slots = np.empty(rows.size, np.int64)
    last, value = np.float32(-1.0), np.float32(0.0)
    for position in range(rows.size):
        row = rows[position]
        slots[position] = slot_of[row]
        if priority[row] != last:  # new rows have the same priority, and a power takes longest
            last = priority[row]
            value = (last + offset) ** exponent
        if slots[position] >= 0:
            leaves[slots[position]] = value
    refresh(slots, leaves, sums, minima, starts, counts)


@inlined
def _sum_four(values, first):  # type: ignore[no-untyped-def]
    return (np.float64(values[first]) + values[first + 1]) + (np.float64(values[first + 2]) + values[first + 3])


@inlined
def _choose_in_order(values, first, remaining):  # type: ignore[no-untyped-def]
    """Returns what :func:`_choose_child` does, added up one by one: slower, and defined past the end."""
    cumulative, before, child = ZERO, ZERO, 0
    for offset in range(FAN_OUT):
        cumulative += values[first + offset]
        below = cumulative <= remaining
        before = cumulative if below else before
        child += below
    # At or past the end, the last child that still adds to the sum is chosen.
    if child == FAN_OUT:
        total, cumulative, before, child = cumulative, ZERO, ZERO, 0
        for offset in range(FAN_OUT):
            cumulative += values[first + offset]
            before = cumulative if cumulative < total else before
            child += cumulative < total
    return child, before


@inlined
def _choose_child(values, first, remaining):  # type: ignore[no-untyped-def]
    """Returns the first child, none of zero, whose cumulative sum exceeds ``remaining``, and the sum before it."""
    first &= NOT_NEGATIVE
    one = _sum_four(values, first)
    two = one + _sum_four(values, first + 4)
    three = two + _sum_four(values, first + 8)
    before = one if one <= remaining else ZERO
    before = two if two <= remaining else before
    before = three if three <= remaining else before
    # Without int(), NumPy adds two flags to one flag if the loops are not compiled.
    child = 4 * (int(one <= remaining) + int(two <= remaining) + int(three <= remaining))
    end, cumulative = child + 4, before
    for offset in range(4):
        cumulative += values[first + end - 4 + offset]
        below = cumulative <= remaining
        before = cumulative if below else before
        child += below
    # The point may lie past the end of the block, or rounding may differ by its order.
    if child == end:
        child, before = _choose_in_order(values, first, remaining)
    return child, before


@inlined
def _find_nodes(remaining, index, sums, start, nodes, factor, second_factor):  # type: ignore[no-untyped-def]
    """Writes the node of one level in which each query lies to ``index``, and takes the sum before it from it."""
    # A table of the node at which every n-th part of the total begins leaves one step to a query, on average.
    ends, total, last = np.zeros(nodes + 1), 0.0, 0
    for node in range(nodes):
        mass = sums[start + node] * (factor if 2 * node < nodes else second_factor)
        last = node if total + mass > total else last
        total += mass
        ends[node + 1] = total
    scale = nodes / total if total > 0 else 0.0
    begins, node = np.empty(nodes, np.int64), 0
    for part in range(nodes):
        while node < last and ends[node + 1] * scale <= part:
            node += 1
        begins[part] = node
    for position in range(index.size):
        query = remaining[position]
        part = query * scale
        node = begins[int(part) if part < nodes - 1 else nodes - 1] & NOT_NEGATIVE
        node += (node < last) & (ends[node + 1] <= query)  # twice without a branch, which would be guessed wrong
        node += (node < last) & (ends[node + 1] <= query)
        while node < last and ends[node + 1] <= query:
            node += 1
        while ends[node] > query:  # rounded
            node -= 1
        index[position] = node
        remaining[position] = (query - ends[node]) / (factor if 2 * node < nodes else second_factor)


@inlined
def find_scaled(remaining, index, factor, second_factor, leaves, sums, starts, counts):  # type: ignore[no-untyped-def]
    """Descends level by level with all queries, so that their cache misses overlap, and changes ``remaining``.

    Values in the two halves of the leaves count times a factor.
    """
    # The lowest level with no more nodes than queries is searched at once instead of those above it.
    top = counts.size - 1
    while top > 1 and counts[top - 1] <= index.size:
        top -= 1
    _find_nodes(remaining, index, sums, starts[top], counts[top], factor, second_factor)
    touched = 0.0
    for level in range(top - 1, -1, -1):
        if counts[level] > PREFETCH_ABOVE:
            for position in range(index.size):
                first = (index[position] << SHIFT) & NOT_NEGATIVE
                if level:
                    first += starts[level]
                    touched += sums[first] + sums[first + FAN_OUT // 2]
                else:
                    touched += leaves[first]
        for position in range(index.size):
            first = index[position] << SHIFT
            if level:
                child, before = _choose_child(sums, starts[level] + first, remaining[position])
                remaining[position] -= before
            else:
                child, before = _choose_child(leaves, first, remaining[position])
            index[position] = first + child
    if touched < 0:  # never, but a use, so that the loads above are not optimized away
        index[0] = -1


@compiled
def find(remaining, index, leaves, sums, starts, counts):  # type: ignore[no-untyped-def]
    """Writes the first slots whose cumulative sums exceed ``remaining``, which it changes, to ``index``."""
    find_scaled(remaining, index, 1.0, 1.0, leaves, sums, starts, counts)


@compiled
def draw(uniform, exponent, over_batch, index, weight, leaves, sums, minima, starts, counts):  # type: ignore[no-untyped-def]
    """Draws slots in proportion to their leaves. ``weight`` is ``(leaf / smallest) ** exponent``."""
    root = starts[counts.size - 1]
    find(uniform * sums[root], index, leaves, sums, starts, counts)
    smallest = minima[root]
    if over_batch:
        smallest = INFINITY
        for position in range(index.size):
            smallest = min(smallest, leaves[index[position]])
    for position in range(index.size):
        weight[position] = (leaves[index[position]] / smallest) ** exponent
