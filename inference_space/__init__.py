"""The vLLM Space: a stock vLLM behind one public port, kept at the run's newest version by a follower."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "shared"))  # space_guard, in a Space and in a checkout
