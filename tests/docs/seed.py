"""`python -m tests.docs.seed URL...`: a run of a tiny policy in each bucket, as `make demo` leaves one."""

import sys
import tempfile
from pathlib import Path

import torch

from tests.support.published_run import write_run


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for url in sys.argv[1:]:
            torch.manual_seed(0)
            write_run(url, Path(folder), versions=9, run="demo")


if __name__ == "__main__":
    main()
