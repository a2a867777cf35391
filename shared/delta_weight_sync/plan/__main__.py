"""`delta-weight-sync plan --params 1T --changed 1% --replicas 32 --link 1GB/s`: what a run will cost."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import get_args

from delta_weight_sync.plan import text, units
from delta_weight_sync.plan.model import Plan, Question, predict
from delta_weight_sync.plan.rates import Encoding, Trainer


def main(words: list[str] | None = None) -> None:
    """Print the table, or JSON."""
    arguments = _parser().parse_args(words)
    plan = predict(
        Question(
            params=arguments.params,
            share=arguments.changed,
            replicas=arguments.replicas,
            link=arguments.link,
            encoding=arguments.encoding,
            trainer=arguments.trainer,
            anchor_every=arguments.anchor_every,
            steps_per_hour=arguments.steps_per_hour,
            egress_usd_gb=arguments.price_egress,
            cores=arguments.cores,
        )
    )
    try:
        print(json.dumps(as_json(plan), indent=2) if arguments.json else text.table(plan), flush=True)
    except BrokenPipeError:  # `| head` has seen enough; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def as_json(plan: Plan) -> dict[str, object]:
    """All figures, in bytes, seconds and dollars, and the assumptions."""
    derived = {"per_change": plan.per_change, "hand_over_to_serving_s": plan.parts.total}
    return asdict(plan) | derived | {"assumptions": text.assumptions(plan)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="delta-weight-sync plan", description="What a run will cost.")
    parser.add_argument("--params", type=units.weights, required=True, help="weights: 1T, 0.6B, 135M")
    parser.add_argument("--changed", type=units.share, required=True, help="share that a sync changes: 1%%")
    parser.add_argument("--replicas", type=units.positive, required=True, help="how many vLLM replicas")
    parser.add_argument("--link", type=units.speed, required=True, help="of each machine: 100MB/s, 10Gb/s")
    parser.add_argument(
        "--encoding", choices=get_args(Encoding), default="fast", help="of the codec (default: fast)"
    )
    parser.add_argument(
        "--trainer",
        choices=get_args(Trainer),
        default="fp32",
        help="fp32: with fp32 master weights (default); fp32-start: its first steps; bf16: without a master",
    )
    parser.add_argument(
        "--cores",
        type=units.positive,
        default=2,
        metavar="N",
        help="for rank 0 and for each worker (default: 2)",
    )
    parser.add_argument(
        "--anchor-every", type=units.positive, metavar="N", help="versions (default: as the publisher does)"
    )
    parser.add_argument(
        "--steps-per-hour",
        type=units.positive,
        metavar="N",
        help="of the trainer (default: what the system carries)",
    )
    parser.add_argument(
        "--price-egress", type=units.dollars, default=0.0, metavar="USD", help="per GB (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    return parser


if __name__ == "__main__":
    main()
