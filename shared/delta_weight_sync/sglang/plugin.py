"""The `sglang.srt.plugins` entry point, which makes stock SGLang follow a run.

    DELTA_WEIGHT_SYNC_RUN=hf://buckets/me/wordle#first \\
        python -m sglang.launch_server --model-path MODEL

SGLang loads every installed plugin (or those that SGLANG_PLUGINS names), in each of its processes. Without
DELTA_WEIGHT_SYNC_RUN, this plugin does nothing.
"""

import os
import sys


def register() -> None:
    """Hook into this process of SGLang, if the settings name a run. Exits if that fails: SGLang would log an
    exception, and serve old weights."""
    if "DELTA_WEIGHT_SYNC_RUN" not in os.environ:
        return
    try:
        from delta_weight_sync.sglang.replica import hook

        hook()
    except Exception as error:  # noqa: BLE001 - whatever it was
        sys.exit(f"delta_weight_sync: {type(error).__name__}: {error}")
