"""The table of co3_flower/law_table.py, from SciPy's incomplete gamma function.

    python tests/make_law_table.py

writes the module anew; tests/test_laws.py holds that it is what this makes.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

from scipy import special

MODULE = Path(__file__).resolve().parents[1] / "co3_flower" / "law_table.py"
QUARTERS = range(-13, 17)  # of log2 beta
FIRST_OCTAVE, OCTAVES, PER_OCTAVE = -6, 12, 8
FULL = 2**24 - 1
HEX_DIGITS = 6

TEMPLATE = '''"""Generalized normal laws in integers, for code tables that are sent as a law.

Made by tests/make_law_table.py. Row i is for the shape beta = 2**((i - {beta_one}) / 4).
"""

# beta in 1/65536
BETAS = (
{betas}
)

# log2(E|x| / alpha) in 1/65536
MEANS = (
{means}
)

# P(|x| <= alpha * 2**(w / beta)) in 1/2**24, six hexadecimal digits each, w = -6, -5.875, ... 6
PROBABILITIES = (
{probabilities}
)

# Shares of the zero atom in 1/65536: sin(pi * i / 64)**2
ATOMS = (
{atoms}
)
'''


def betas() -> list[int]:
    """Shapes in 1/65536."""
    return [round(2.0 ** (q / 4) * 65536) for q in QUARTERS]


def means() -> list[int]:
    """log2(E|x| / alpha) in 1/65536."""
    found = []
    for quarter in QUARTERS:
        beta = 2.0 ** (quarter / 4)
        log_mean = math.lgamma(2 / beta) - math.lgamma(1 / beta)
        found.append(round(log_mean / math.log(2) * 65536))
    return found


def probabilities() -> list[list[int]]:
    """P(|x| <= alpha * 2**(w / beta)) in 1/2**24, a row for each shape."""
    steps = [FIRST_OCTAVE + i / PER_OCTAVE for i in range(OCTAVES * PER_OCTAVE + 1)]
    return [
        [min(FULL, round(float(special.gammainc(2.0 ** (-q / 4), 2.0**w)) * 2**24)) for w in steps]
        for q in QUARTERS
    ]


def atoms() -> list[int]:
    """Shares of the zero atom in 1/65536."""
    return [round(math.sin(math.pi * i / 64) ** 2 * 65536) for i in range(32)]


def source() -> str:
    """The module's text."""
    rows = []
    for row in probabilities():
        digits = "".join(f"{p:0{HEX_DIGITS}x}" for p in row)
        lines = textwrap.wrap(digits, 15 * HEX_DIGITS)
        rows += [f'    "{line}"' for line in lines[:-1]] + [f'    "{lines[-1]}",']
    return TEMPLATE.format(
        beta_one=-QUARTERS.start,
        betas="\n".join(f"    {value}," for value in betas()),
        means="\n".join(f"    {value}," for value in means()),
        probabilities="\n".join(rows),
        atoms="\n".join(f"    {value}," for value in atoms()),
    )


if __name__ == "__main__":
    MODULE.write_text(source())
