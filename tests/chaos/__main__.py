"""`python -m tests.chaos --faults N --seed S [--minutes M]`: N faults; every one must be survived.

Real publishers and followers, and faults of every kind, drawn from the seed. At every moment what a follower
claims to serve must be what a trainer handed over; after each fault all must reach the newest version.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.chaos.play import play


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="give up after so long")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        sys.exit(0 if play(options.faults, options.seed, options.minutes, Path(folder)) else 1)


if __name__ == "__main__":
    main()
