"""Numba loops of the count sketch: add entries to a table, estimate them from it.

No policy, no exceptions. Row and entry are hashed together: the hash's upper 32 bits choose the
column, its lowest bit the sign.
"""

from __future__ import annotations

import numpy as np
from numpy import uint64 as u64

from co3_flower.jit import njit as _njit

GOLDEN = u64(0x9E3779B97F4A7C15)  # odd; 2**64 over the golden ratio
MIX_1, MIX_2 = u64(0xBF58476D1CE4E5B9), u64(0x94D049BB133111EB)  # of SplitMix64's finalizer


@_njit
def hash_entry(key, position):
    """Return the hash of an entry, uint64, in the row of a uint64 key."""
    x = key + u64(position) * GOLDEN
    x = (x ^ (x >> u64(30))) * MIX_1
    x = (x ^ (x >> u64(27))) * MIX_2
    return x ^ (x >> u64(31))


@_njit
def column_of(hashed, columns):
    """Return the column that a hash chooses among fewer than 2**32."""
    return np.int64(((hashed >> u64(32)) * u64(columns)) >> u64(32))


@_njit
def sign_of(hashed):
    """Return the sign that a hash chooses, 1.0 or -1.0."""
    return np.float64(1 - 2 * np.int64(hashed & u64(1)))


@_njit
def add_to_table(vector, keys, table):
    """Add float32 vector [n] to float64 table [rows, columns]; keys uint64 [rows]."""
    for r in range(table.shape[0]):
        row, key = table[r], keys[r]
        for j in range(vector.size):
            if vector[j] != 0.0:
                hashed = hash_entry(key, j)
                row[column_of(hashed, row.size)] += sign_of(hashed) * np.float64(vector[j])


@_njit
def estimate_entries(table, keys, estimates):
    """Set float32 estimates [n] to the medians over the rows of float32 table [rows, columns].

    Of an even number of rows it is the mean of the two in the middle.
    """
    rows, columns = table.shape
    found = np.zeros(rows, np.float64)
    for j in range(estimates.size):
        for r in range(rows):
            hashed = hash_entry(keys[r], j)
            value = sign_of(hashed) * np.float64(table[r, column_of(hashed, columns)])
            place = r  # insert into those before, in ascending order
            while place > 0 and found[place - 1] > value:
                found[place] = found[place - 1]
                place -= 1
            found[place] = value
        estimates[j] = np.float32((found[(rows - 1) // 2] + found[rows // 2]) / 2)
