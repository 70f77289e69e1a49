"""Command line of the fuzzer."""

from __future__ import annotations

import argparse

from .bases import make_bases
from .campaign import Campaign


def main() -> None:
    """Run the cases that are asked for and print what came of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000, help="how many (default 20000)")
    parser.add_argument("--seed", type=int, default=1, help="of all cases (default 1)")
    parser.add_argument("--first", type=int, default=0, help="index of the first (default 0)")
    parser.add_argument("--only", type=int, help="the one case of this index, to see it again")
    parser.add_argument("--log-every", type=int, default=20_000, help="cases between lines")
    arguments = parser.parse_args()
    campaign = Campaign(make_bases())
    first = arguments.first
    indices = range(first, first + arguments.cases)
    if arguments.only is not None:
        indices = range(arguments.only, arguments.only + 1)
    print(campaign.run(arguments.seed, indices, arguments.log_every))


if __name__ == "__main__":
    main()
