"""The command plan: predicts the cost of a run before it starts."""

import argparse
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import get_args

from delta_weight_sync import cost
from delta_weight_sync.cost import Plan, Question
from delta_weight_sync.records import POLL_S, STRIDES
from delta_weight_sync.runlog import VERSION_BYTES
from delta_weight_sync.util import count_text, size_text, time_text

_STILL_MEASURED = 4 / 3  # a share this many times outside of the measured range counts as measured
_SCALES = {"%": 1e-2, "m": 1e-3, "": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def configure(parser: argparse.ArgumentParser, _: str) -> None:
    """Add the arguments of `plan`; each stores a field of `Question`."""
    add = parser.add_argument
    params = _quantity("([KMBT]?)", 1, math.inf, "a number of weights: write 1T, 0.6B, 135M or 240K")
    covered = "a share that `plan` covers: write a percentage from 0.01% to 30%, such as 1%"
    speed = "a link speed: write bytes as 100MB/s or 1GB/s, bits as 10Gb/s"
    link = _quantity("([KMGT]?)[Bb]/s", 1, math.inf, speed)
    share = _quantity("(%)", 1e-4, 0.3, covered)
    seconds = _quantity("(m?)s", 0, math.inf, "a time: write 100ms or 0.3s")
    add("--params", type=params, required=True, help="number of weights of the model: 1T, 0.6B, 135M")
    add("--changed", dest="share", type=share, required=True, help="share of weights changed in a sync: 1%%")
    add("--replicas", type=_positive, required=True, help="number of vLLM replicas")
    add("--link", type=link, required=True, help="link speed of each machine: 100MB/s, 10Gb/s")
    latency = "time of a request to the Hub, without the transfer of its bytes (default: 100ms)"
    add("--latency", type=seconds, default=Question.latency, help=latency)
    add("--encoding", choices=(*cost.ENCODE,), default="fast", help="encoding of deltas (default: fast)")
    kinds = "fp32 (default): fp32 master weights; fp32-start: same, early in a run; bf16: no master weights"
    add("--trainer", choices=get_args(cost.Trainer), default="fp32", help=kinds)
    add("--ranks", type=_positive, help="ranks of the trainer (default: as many as its memory needs)")
    add("--workers", type=_positive, help="workers of each replica (default: as many as its memory needs)")
    add("--cores", type=_positive, default=2, help="cores of each rank and of each worker (default: 2)")
    add("--steps-per-hour", type=_positive, help="steps of the trainer (default: as many as possible)")
    add("--json", action="store_true", help="print all figures as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    plan = Plan(Question(**{field.name: getattr(arguments, field.name) for field in fields(Question)}))
    figures = vars(plan) | {"question": asdict(plan.question), "assumptions": _assumptions(plan)}
    print(json.dumps(figures, indent=2) if arguments.json else _table(plan))


def _quantity(unit: str, least: float, most: float, wanted: str) -> Callable[[str], float]:
    """Return a parser of numbers such as 10Gb/s. `unit` is a regular expression, whose group matches a key
    of `_SCALES`. The error for any other text is "'<text>' is not <wanted>"."""

    def parse(text: str) -> float:
        match = re.fullmatch(rf"(\d+(?:\.\d+)?){unit}", text)
        if not match or not least <= (found := float(match[1]) * _SCALES[match[2]]) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        found = float(f"{found / (8 if 'b' in text else 1):.12g}")  # bits to bytes; 4.1 * 1e9 is not whole
        return int(found) if found.is_integer() else found

    return parse


def _positive(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number: write digits only")
    return int(text)


def _assumptions(plan: Plan) -> list[str]:
    asked = plan.question
    shares = cost.SIZES[plan.question.trainer].shares
    threads = cost.TWO_THREADS
    gpu = f"one for every {cost.GPU_BYTES / 1e9:.0f} GB"
    machines = f"{plan.trainer_machines} for the trainer, {plan.replica_machines} for a replica"
    taken = plan.taken_requests + cost.POLLS
    text = f"""\
times assume one core of an AMD EPYC for each thread (`make bench`); no GPU was measured
the trainer needs {cost.TRAINER_BYTES:.0f} bytes per weight; its ranks: {asked.ranks or gpu}
a replica needs {cost.REPLICA_BYTES:.1f} bytes per weight; its workers: {asked.workers or gpu}
a machine has up to {cost.PER_MACHINE} ranks or workers: {machines}
each machine has a link of {size_text(asked.link)}/s, and the store serves all of them simultaneously
the publisher makes {plan.publishing("all"):.3g} requests per version, {plan.uploads} of them in sequence
the run's log takes at most a tenth of the deltas' bytes, or {size_text(VERSION_BYTES)} a version
each replica makes {taken} requests per version, {cost.POLLS} of them to poll; {plan.fetches} are in sequence
a request takes {time_text(asked.latency)}, and the transfer of its bytes takes time in addition
request counts assume that the Hub announces versions; times assume that a replica polls every {POLL_S:.0f} s
changes are spread like those of the measured models; clustered changes make smaller files
prices as of {cost.PRICES_READ_ON}: huggingface.co/pricing, /storage and /docs/hub/spaces-gpus
private storage is ${cost.PRIVATE_USD_TB_MONTH:.0f} per TB and month beyond {cost.INCLUDED_TB:.0f} TB"""
    if plan.replica_machines > 1:
        text += "\none machine of a replica fetches; other machines read its files instantly (never tried)"
    if plan.threads > 1:
        times = f"{threads[0]:.1f} to {threads[1]:.1f} times"
        text += f"\nthreads share the work evenly; two measured threads were {times} as fast as one"
    if not shares[0] / _STILL_MEASURED <= asked.share <= shares[-1] * _STILL_MEASURED:
        text += f"\nsizes at {100 * asked.share:.3g} % were not measured for trainer {asked.trainer}"
    return text.split("\n")


def _table(plan: Plan) -> str:
    asked = plan.question
    size = size_text
    time = time_text
    smaller = f"{plan.full / plan.delta:.0f}"
    exchange = ", exchange included" if plan.trainer_ranks > 1 else ""
    all_smaller = f"{plan.full / plan.sync_bytes:.0f}"
    threads = _count(plan.threads, "thread")
    workers = _count(plan.replica_workers, "worker")
    slow = "replicas set" if plan.replica_versions_hour < plan.publisher_versions_hour else "publisher sets"
    pace = "every step" if asked.steps_per_hour else f"the {slow} the pace"
    if plan.steps_per_version > 1.005:  # a smaller ratio would be printed as 1
        pace = f"each version merges {plan.steps_per_version:.3g} steps; its size is not predicted"
    elif plan.published_hour > 1.005 * plan.replica_versions_hour:
        pace = "each replica falls behind and takes several deltas together"
    ratio = plan.egress_hour / plan.stored_hour
    no_price = ", and publishes no price for more" if ratio > cost.EGRESS_RATIO else ""
    included = f"the Hub includes {cost.EGRESS_RATIO:.0f} times{no_price}"
    spaces = f"none|no Space has {size(cost.REPLICA_BYTES * asked.params)} of GPU memory"
    if plan.replicas_usd_hour is not None:
        spaces = f"${plan.replicas_usd_hour:,.2f}/h|{asked.replicas} x {plan.space}"
    how = f"encoding {asked.encoding}, trainer {asked.trainer}"
    ranks = _count(plan.trainer_ranks, "rank")
    links = _count(plan.trainer_machines, "link")
    rows = f"""\
one sync of {count_text(asked.params)} weights, {100 * asked.share:.3g} % changed, {how}
sent altogether|{size(plan.sync_bytes)}|1/{all_smaller} of the model: what follows, jumps, anchors
delta file|{size(plan.delta)}|{plan.per_change:.3f} B per change, 1/{smaller} of the model
manifest and HEAD|{size(plan.manifest)}|the same at each version of a long run
log|{size(plan.log)}|at most
diff|{time(plan.diff_s)}|the trainer waits; {ranks}{exchange}
encode|{time(plan.encode_s)}|in the background, {ranks} with {threads} each
upload|{time(plan.upload_s)}|in the background, over {links}
notification|{time(plan.notification_s)}|half of a poll interval; less with events or pokes
fetch|{time(plan.fetch_s)}|generation goes on; over 1 link
decode and stage|{time(plan.stage_s)}|generation goes on; {workers} with {threads} each
commit|{time(plan.commit_s)}|generation waits
hand-over to serving|{time(plan.hand_over_to_serving_s)}|the sum, from `publish` until a replica serves

versions per hour
the trainer's link alone|{_figure(plan.link_versions_hour)}|{links}, jumps and anchors (below) included
the publisher|{_figure(plan.publisher_versions_hour)}
each replica|{_figure(plan.replica_versions_hour)}
published|{_figure(plan.published_hour)}|{pace}
{max(STRIDES)} versions behind|{time(plan.behind_s)}|a replica catches up by one jump, a delta over them

a replica that joins late (an anchor, a whole checkpoint, every {plan.anchor_every} versions)
anchor|{time(plan.join_anchor_s)}|{size(plan.full)} over 1 link; its upload takes {time(plan.anchor_s)}
jumps and deltas|{time(plan.join_deltas_s)}|halfway to the next anchor; fetch, decode, apply
rebuild the checkpoint|{time(plan.join_rebuild_s)}|read, check the digest, write
total, before staging|{time(plan.join_s)}|at most {time(plan.join_worst_s)}

storage and money
bucket grows by|{size(plan.stored_hour)}/h|nothing is deleted unless you ask for it
trainer states, uploaded|{size(plan.states_hour)}/h|in addition; the bucket keeps two, {size(plan.state)} each
copy a trainer state|{time(plan.copy_state_s)}|training waits; at most every {cost.STATE_MINUTES:.0f} minutes
egress|{size(plan.egress_hour)}/h|{ratio:.1f} times what is stored; {included}
requests for files|{_figure(plan.file_requests)}|in 5 minutes; the Hub allows {cost.FILES_ALLOWED}
requests to the Hub's API|{_figure(plan.api_requests)}|in 5 minutes; the Hub allows {cost.API_ALLOWED}
host memory of each rank|{size(plan.mirror)}|the mirror (bf16 copy): tensors that it owns, its shard of others
a day's bucket, kept for a month|${plan.storage_usd_month:,.2f}|private, on the Hub
replicas as Spaces|{spaces}

the same with full checkpoints
a sync|{size(plan.full)}|{all_smaller} times as many bytes as all of the above
until it is loaded|{time(plan.full_s)}|loading stops generation
versions per hour|{_figure(plan.full_versions_hour)}

assumptions"""
    lines = [_row(*row.split("|")) for row in rows.split("\n")]
    return "\n".join([*lines, *(f"  - {line}" for line in _assumptions(plan))])


def _row(name: str, value: str = "", note: str = "") -> str:
    return f"  {name:34} {value:>12}  {note}".rstrip() if value else name


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count != 1 else "")


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
