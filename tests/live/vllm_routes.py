"""A program for test_route_audit.py: every route that vLLM's source can register, as one JSON list of paths.

With our plugin's, and with more than a replica's own vLLM has: of all kinds of models, and what the arguments
given here switch on, so that the audit also covers what other settings of a replica would open.
"""

import json
import os
import sys
import warnings
from importlib import import_module

warnings.simplefilter("ignore")
os.environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
os.environ |= {"VLLM_PLUGINS": "delta_weight_sync", "DELTA_WEIGHT_SYNC_RUN": "file:///run#x"}
os.environ |= {"DELTA_WEIGHT_SYNC_KEY": "a-key"}

from starlette.routing import Mount  # noqa: E402
from vllm.entrypoints.launchers.app import build_app  # noqa: E402
from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

TASKS = ("generate", "render", "transcription", "realtime")
POOLING = ("pooling", "classify", "embed", "scoring")  # its app asks a model which of these it offers


def main() -> None:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
    pooling = [import_module(f"vllm.entrypoints.pooling.{kind}.api_router").router for kind in POOLING]
    paths = set()
    for route in (route for app in (build_app(args, TASKS), *pooling) for route in app.routes):
        paths.add(route.path)
        if isinstance(route, Mount):
            paths |= {f"{route.path}/", f"{route.path}/x"}
    print(json.dumps(sorted(paths)))


if __name__ == "__main__":
    main()
