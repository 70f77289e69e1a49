"""Numba loops that go on from what another device has counted: no policy, no validation.

What decides a byte of a payload follows from integers: histograms of the top bits of |v|, sums in
fixed point, counts of symbols. Where an update lives on another device these are counted there (see
`kernels_torch`), and the loops below take the same steps from them as `kernels`,
`kernels_rate` and `kernels_structure` take from the entries themselves.
"""

from __future__ import annotations

import numpy as np
from numpy import uint32 as u32

from co3_flower.jit import njit as _njit
from co3_flower.kernels import (
    COARSE_BITS,
    FINE_FROM_BETA,
    fit_coarse,
    fit_fine,
    histogram_moments,
    scale_by_rule,
)
from co3_flower.kernels_structure import (
    DEAD,
    add_classes,
    cheapest_mode,
    class_range,
    code_tensor,
    mode_classes,
    propose_factors,
)


@_njit
def fit_tensors(coarse, sizes, fits, bad, folded, bins):
    """Fit a law to each tensor's coarse histogram, int64 [tensors, 2048].

    fits float64 [tensors, 5] and bad int64 [tensors] are as in `kernels.convert_tensors`; folded
    float64 [tensors, 2048] gets the histogram without zeros, bins int64 [tensors, 3] the first bin,
    the last one + 1, and how many entries of a tensor are to be fitted anew by `refine_fits` (0:
    none).
    """
    histogram = np.zeros((4, 256 << COARSE_BITS), np.uint32)
    work = np.zeros(2 << COARSE_BITS, np.float64)
    for t in range(sizes.size):
        for j in range(coarse.shape[1]):
            histogram[0, j] = u32(coarse[t, j])
        alpha, beta, zeros, normals, wrong, low, high = fit_coarse(histogram, folded[t], work)
        bad[t] = wrong
        if wrong > 0:
            continue
        fits[t, 0], fits[t, 1] = alpha, beta
        fits[t, 2] = zeros / sizes[t] if sizes[t] > 0 else 1.0
        fits[t, 3], fits[t, 4] = histogram_moments(folded[t], low, high)
        bins[t, 0], bins[t, 1] = low, high
        bins[t, 2] = normals if beta > FINE_FROM_BETA else 0


@_njit
def refine_fits(tensors, fine, fits, bins):
    """Fit the given tensors to their fine histograms, int64 [len(tensors), 32768]."""
    histogram = np.zeros((4, fine.shape[1]), np.uint32)
    for i in range(tensors.size):
        t = tensors[i]
        for j in range(fine.shape[1]):
            histogram[0, j] = u32(fine[i, j])
        fits[t, 0], fits[t, 1] = fit_fine(histogram, bins[t, 2], fits[t, 1])


@_njit
def pick_scales(rule, multiplier, fits, folded, bins, powers, peaks, fmt, table, scales):
    """`kernels.pick_scale` for each tensor whose scale float32 [tensors] is not given.

    powers float64 and peaks float32 [tensors] are looked at by the rules that need them.
    """
    for t in range(scales.size):
        if scales[t] < 0:
            scales[t] = -scales[t]
        else:
            scales[t] = scale_by_rule(
                rule, multiplier, fits[t, 0], fits[t, 1], powers[t], peaks[t], folded[t],
                bins[t, 0], bins[t, 1], fmt, table,
            )  # fmt: skip


@_njit
def propose_all(
    sizes, scales, units, rows, cols, taps, gains, row_at, row_sums, row_live, col_at, col_sums,
    col_live, row_class, channel_class, tap_class, col_class, bits, sent,
):  # fmt: skip
    """`kernels_structure.propose_factors` for each tensor that has entries.

    Flat arrays of rows are cut at row_at, those of columns (and of channels and taps, which are
    not more) at col_at; bits float64 and sent int64 are [tensors, 5].
    """
    for t in range(sizes.size):
        bits[t] = np.inf
        if sizes[t] == 0:
            continue
        r0, r1, c0, c1 = row_at[t], row_at[t + 1], col_at[t], col_at[t + 1]
        propose_factors(
            row_sums[r0:r1], col_sums[c0:c1], row_live[r0:r1], col_live[c0:c1],
            np.float64(scales[t]) * units[t] / 4096.0, gains, taps[t], row_class[r0:r1],
            channel_class[c0 : c0 + cols[t] // taps[t]], tap_class[c0 : c0 + taps[t]],
            col_class[c0:c1], bits[t], sent[t],
        )  # fmt: skip


@_njit
def all_mode_classes(
    mode, sizes, cols, taps, row_at, col_at, row_class, channel_class, tap_class, col_class, bits,
    sent, out_rows, out_cols,
):  # fmt: skip
    """Write the classes that a mode gives, for all tensors in which it is to be tried.

    Dead rows elsewhere: they have no costs.
    """
    for t in range(sizes.size):
        r0, r1, c0, c1 = row_at[t], row_at[t + 1], col_at[t], col_at[t + 1]
        if bits[t, mode] == np.inf:
            out_rows[r0:r1] = DEAD
            continue
        mode_classes(
            mode, sent[t, 3], row_class[r0:r1], channel_class[c0 : c0 + cols[t] // taps[t]],
            tap_class[c0 : c0 + taps[t]], col_class[c0:c1], out_rows[r0:r1], out_cols[c0:c1],
        )  # fmt: skip


@_njit
def settle_modes(
    costs, sizes, rows, cols, taps, row_at, col_at, row_class, channel_class, tap_class, col_class,
    bits, sent, modes, out_rows, out_cols, ranges, odds, state, data,
):  # fmt: skip
    """Take each tensor's cheapest mode, costs int64 [tensors, 5], and code how it is given.

    out_rows and out_cols get the classes, ranges int64 [tensors, 2] the first class in use and the
    last one + 1.
    """
    for t in range(sizes.size):
        if sizes[t] == 0:
            continue
        r0, r1, c0, c1 = row_at[t], row_at[t + 1], col_at[t], col_at[t + 1]
        of_rows = row_class[r0:r1]
        of_channels, of_taps = (
            channel_class[c0 : c0 + cols[t] // taps[t]],
            tap_class[c0 : c0 + taps[t]],
        )
        of_cols = col_class[c0:c1]
        mode = 0
        if bits[t, 0] < np.inf:
            mode = cheapest_mode(costs[t], rows[t], sent[t, 4], bits[t])
            if mode == 0:
                of_rows[0] = sent[t, 3]
        mode_classes(
            mode, np.int64(of_rows[0]), of_rows, of_channels, of_taps, of_cols, out_rows[r0:r1],
            out_cols[c0:c1],
        )  # fmt: skip
        code_tensor(mode, of_rows, of_channels, of_taps, of_cols, sent[t], odds, state, data)
        modes[t] = mode
        low, high = class_range(out_rows[r0:r1], out_cols[c0:c1])
        ranges[t, 0], ranges[t, 1] = low, high + 1


@_njit
def list_classes(counted, at, ranges, counts, of_tensor):
    """Give the list of_tensor each tensor's symbols by class, as `kernels_structure` does.

    counted int64 [classes, K] holds them one tensor after the other, tensor t's from at[t] on;
    counts [DEAD, K] gets their sum.
    """
    k_max = counts.shape[1]
    for t in range(ranges.shape[0]):
        mine = np.zeros((at[t + 1] - at[t], k_max + 1), np.int32)
        for q in range(mine.shape[0]):
            mine[q, k_max] = ranges[t, 0] + q
            for k in range(k_max):
                mine[q, k] = counted[at[t] + q, k]
        add_classes(mine, counts)
        of_tensor.append(mine)
