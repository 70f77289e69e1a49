"""The fit of the generalized normal law, against SciPy's maximum likelihood and a memcpy.

Run with ``python -m benchmarks.fit``. SciPy takes some microseconds per entry, so it gets a few
tensors of different sizes; on the same ones the log-likelihoods are compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import lgamma

import numpy as np
from scipy import stats

from benchmarks.data import Update, load_updates
from benchmarks.harness import Case, Row, add_timing_options, measure, num_repeats, parser
from benchmarks.report import Report
from co3_flower import GenNorm, fit_gennorm
from co3_flower.kernels import MAX_BETA

MIN_NUMEL = 1024  # below it SciPy and a histogram may differ by more
NUM_TENSORS = 8
MAX_SAMPLE = 60_000  # entries of a tensor that SciPy can fit in a tenth of a second or two


def sample_tensors(update: Update, count: int) -> dict[str, np.ndarray]:
    """Return some tensors between MIN_NUMEL and MAX_SAMPLE entries, of different sizes first."""
    fitting = {n: x for n, x in update.arrays.items() if MIN_NUMEL <= x.size <= MAX_SAMPLE}
    by_size = {x.size: name for name, x in fitting.items()}
    if len(by_size) >= count:
        fitting = {name: fitting[name] for name in by_size.values()}
    names = sorted(fitting, key=lambda name: fitting[name].size)
    chosen = np.unique(np.linspace(0, len(names) - 1, count).round().astype(int))
    return {names[i]: fitting[names[i]] for i in chosen}


def scipy_fit(x: np.ndarray) -> GenNorm:
    """Fit the entries that are not zero with SciPy, location 0."""
    nonzero = x[x != 0].astype(np.float64)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        beta, _, alpha = stats.gennorm.fit(nonzero, floc=0)
    return GenNorm(float(alpha), float(beta), 1.0 - nonzero.size / x.size)


def log_likelihood(x: np.ndarray, fit: GenNorm) -> float:
    """Return the mean log-likelihood in nats of the entries that are not zero."""
    nonzero = np.abs(x[x != 0].astype(np.float64))
    constant = np.log(fit.beta / (2.0 * fit.alpha)) - lgamma(1.0 / fit.beta)
    return float(constant - np.mean((nonzero / fit.alpha) ** fit.beta))


def compare_fits(tensors: dict[str, np.ndarray]) -> list[Row]:
    """Fit each tensor both ways and return the differences in log-likelihood."""
    rows = []
    for name, x in tensors.items():
        ours, theirs = fit_gennorm(x), scipy_fit(x)
        rows.append(
            {
                "tensor": name,
                "entries": x.size,
                "beta": ours.beta,
                "scipy's beta": theirs.beta,
                "nats above scipy": log_likelihood(x, ours) - log_likelihood(x, theirs),
            }
        )
    return rows


def worst_difference(rows: Sequence[Row]) -> float | None:
    """Return the largest difference in nats where SciPy's beta is within the bound."""
    return max(
        (abs(row["nats above scipy"]) for row in rows if row["scipy's beta"] <= MAX_BETA),
        default=None,
    )


def measure_update(report: Report, update: Update, repeats: int, num_tensors: int) -> None:
    """Measure the fit of all tensors of an update, one call each."""
    tensors, flat = list(update.arrays.values()), update.flat()
    out = np.empty_like(flat)
    sample = sample_tensors(update, num_tensors)
    sampled = sum(x.size for x in sample.values())
    cases = [
        Case("co3 fit_gennorm", lambda: [fit_gennorm(x) for x in tensors], flat.size),
        Case("memcpy", lambda: np.copyto(out, flat), flat.size),
        Case(
            f"scipy.stats.gennorm.fit ({len(sample)} tensors)",
            lambda: [scipy_fit(x) for x in sample.values()],
            sampled,
            max_repeats=1,
        ),
        Case("co3, the flat update", lambda: fit_gennorm(flat), flat.size),
    ]
    timings = measure(cases, repeats)
    report.add_timings(f"{update.name}: {len(tensors)} tensors", timings, "entries")
    rows = compare_fits(sample)
    report.add_table(f"{update.name}: log-likelihood per entry against SciPy's", rows)
    where = f"({update.name})"
    report.at_least(f"fit_gennorm {where}", timings[0].best_speed / 1e6, 800, "M entries/s")
    report.at_most(f"log-likelihood against SciPy {where}", worst_difference(rows), 1e-5, "nats")


def main(argv: Sequence[str] | None = None) -> Row:
    """Run the benchmark."""
    arguments = parser("fit_gennorm against scipy.stats.gennorm.fit and memcpy.")
    add_timing_options(arguments)
    options = arguments.parse_args(argv)
    report = Report("fit", options)
    num_tensors = 2 if options.quick else NUM_TENSORS
    for update in load_updates(options):
        measure_update(report, update, num_repeats(options), num_tensors)
    return report.finish()


if __name__ == "__main__":
    main()
