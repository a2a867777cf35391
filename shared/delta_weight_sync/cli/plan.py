"""`delta-weight-sync plan --params 1T --changed 1% --replicas 32 --link 1GB/s`: what a run will cost."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import get_args

from delta_weight_sync.cli import quantities
from delta_weight_sync.plan import text
from delta_weight_sync.plan.model import Plan, Question, predict
from delta_weight_sync.plan.rates import Encoding, Trainer


def configure(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    _required(parser)
    parser.add_argument(
        "--encoding", choices=get_args(Encoding), default="fast", help="of the codec (default: fast)"
    )
    parser.add_argument(
        "--trainer",
        choices=get_args(Trainer),
        default="fp32",
        help="fp32: with fp32 master weights (default); fp32-start: its first steps; bf16: without a master",
    )
    for name, default, said in (
        ("--cores", 2, "for rank 0 and for each worker (default: 2)"),
        ("--anchor-every", None, "versions (default: as the publisher does)"),
        ("--steps-per-hour", None, "of the trainer (default: what the system carries)"),
    ):
        parser.add_argument(name, type=quantities.positive, default=default, metavar="N", help=said)
    parser.add_argument(
        "--price-egress", type=quantities.dollars, default=0.0, metavar="USD", help="per GB (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="all figures as JSON")


def _required(parser: argparse.ArgumentParser) -> None:
    for name, kind, said in (
        ("--params", quantities.weights, "weights: 1T, 0.6B, 135M"),
        ("--changed", quantities.share, "share that a sync changes: 1%%"),
        ("--replicas", quantities.positive, "how many vLLM replicas"),
        ("--link", quantities.speed, "of each machine: 100MB/s, 10Gb/s"),
    ):
        parser.add_argument(name, type=kind, required=True, help=said)


def run(arguments: argparse.Namespace) -> None:
    """Print the table, or JSON."""
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
    print(json.dumps(as_json(plan), indent=2) if arguments.json else text.table(plan))


def as_json(plan: Plan) -> dict[str, object]:
    """All figures, in bytes, seconds and dollars, and the assumptions."""
    derived = {"per_change": plan.per_change, "hand_over_to_serving_s": plan.parts.total}
    return asdict(plan) | derived | {"assumptions": text.assumptions(plan)}
