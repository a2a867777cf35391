"""The vLLM Space: stock vLLM behind one public port; a follower keeps it at the run's newest version."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "shared"))  # where space_guard is, in a Space and a checkout
