"""Games of Wordle for reinforcement learning: over HTTP, over OpenEnv's WebSocket, and on a page."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "shared"))  # space_guard, in a Space and in a checkout
