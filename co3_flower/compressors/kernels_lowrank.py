"""Numba loops of the low-rank compressor: products of a matrix with a few vectors.

Sums run in float64 in a fixed order, whatever the machine and its number of threads. Vectors lie in
rows, so that all inner loops run over neighbouring entries. No checks, no exceptions.
"""

from __future__ import annotations

import numpy as np
from numpy import float64 as f64

from co3_flower.jit import njit as _njit

LARGEST = (2.0 - 2.0**-23) * 2.0**127  # float32
LANES = 16  # partial sums side by side, so that they vectorize without reassociation


@_njit
def times_vectors(matrix, vectors, products):
    """Set float64 products [r, n] to the matrix, float32 [n, m], times float64 vectors [r, m]."""
    lanes = np.zeros(LANES, np.float64)
    whole = matrix.shape[1] - matrix.shape[1] % LANES
    for i in range(matrix.shape[0]):
        row = matrix[i]
        for c in range(vectors.shape[0]):
            vector = vectors[c]
            lanes[:] = 0.0
            for start in range(0, whole, LANES):
                for k in range(LANES):
                    lanes[k] += f64(row[start + k]) * vector[start + k]
            total = 0.0
            for k in range(LANES):
                total += lanes[k]
            for j in range(whole, row.size):
                total += f64(row[j]) * vector[j]
            products[c, i] = total


@_njit
def transposed_times_vectors(matrix, vectors, products):
    """Add to float64 products [r, m] the matrix [n, m] transposed times vectors [r, n]."""
    for i in range(matrix.shape[0]):
        row = matrix[i]
        for c in range(vectors.shape[0]):
            factor, product = f64(vectors[c, i]), products[c]
            for j in range(row.size):
                product[j] += factor * f64(row[j])


@_njit
def outer_products(p, q, matrix):
    """Set float32 matrix [n, m] to the sum of outer products of the rows of p [r, n] and q [r, m].

    p and q are float32. Sums beyond float32 become its largest.
    """
    sums = np.zeros(matrix.shape[1], np.float64)
    for i in range(matrix.shape[0]):
        sums[:] = 0.0
        for c in range(p.shape[0]):
            factor, vector = f64(p[c, i]), q[c]
            for j in range(sums.size):
                sums[j] += factor * f64(vector[j])
        for j in range(sums.size):
            matrix[i, j] = np.float32(max(-LARGEST, min(LARGEST, sums[j])))
