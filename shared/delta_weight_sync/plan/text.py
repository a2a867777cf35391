"""The prediction as a table that people read, and the assumptions under it."""

from __future__ import annotations

from collections.abc import Iterator

from delta_weight_sync.plan import coding, rates
from delta_weight_sync.plan.model import Plan
from delta_weight_sync.protocol import POLL_S
from delta_weight_sync.units import count_text, size_text, time_text

_WIDTH = 34


def table(plan: Plan) -> str:
    """Everything, line by line."""
    blocks = (_sync(plan), _pace(plan), _late(plan), _money(plan), _whole(plan))
    lines = [line for block in blocks for line in (*block, "")]
    return "\n".join([*lines, "assumptions", *(f"  - {line}" for line in assumptions(plan))])


def _row(name: str, value: str, note: str = "") -> str:
    return f"  {name:{_WIDTH}} {value:>12}  {note}".rstrip()


def _sync(plan: Plan) -> Iterator[str]:
    asked, parts = plan.question, plan.parts
    what = f"{count_text(asked.params)} weights, {100 * asked.share:.3g} % changed"
    yield f"one sync of {what}, encoding {asked.encoding}, trainer {asked.trainer}"
    yield _row(
        "delta file",
        size_text(plan.delta),
        f"{plan.per_change:.3f} B per change, 1/{plan.full / plan.delta:.0f}",
    )
    yield _row(
        "diff",
        time_text(parts.diff),
        f"the trainer waits; {_several(plan.trainer_ranks, 'rank')}, each its shard",
    )
    yield _row("encode", time_text(parts.encode), f"in the background, {_threads(plan)} of rank 0")
    yield _row("upload", time_text(parts.upload), "in the background")
    yield _row(
        "notice",
        time_text(parts.notice),
        "half of the interval at which HEAD is looked at; less where the store or a poke tells",
    )
    yield _row("fetch", time_text(parts.fetch), "the replica generates meanwhile")
    yield _row(
        "decode and stage",
        time_text(parts.stage),
        f"meanwhile too; {_several(plan.replica_workers, 'worker')}, each decodes with {_threads(plan)}",
    )
    yield _row("commit", time_text(parts.commit), "generation waits")
    yield _row("hand-over to serving", time_text(parts.total))


def _pace(plan: Plan) -> Iterator[str]:
    yield "versions per hour"
    yield _row("the trainer's link alone", _number(plan.link_versions_hour), "jumps and anchors included")
    yield _row("the publisher", _number(plan.publisher_versions_hour))
    yield _row("each replica", _number(plan.replica_versions_hour))
    yield _row("published", _number(plan.published_hour), _pace_note(plan))


def _pace_note(plan: Plan) -> str:
    if plan.steps_per_version > 1.005:
        return f"{plan.steps_per_version:.3g} steps merged into each, whose size is not predicted"
    if plan.published_hour > 1.005 * plan.replica_versions_hour:
        return "each replica falls behind and takes several deltas at once"
    return "every step" if plan.question.steps_per_hour else f"{plan.slowest} sets the pace"


def _late(plan: Plan) -> Iterator[str]:
    join = plan.join
    yield f"a late replica (an anchor every {plan.anchor_every} versions)"
    yield _row("anchor", time_text(join.anchor_s), size_text(plan.full))
    yield _row("jumps and deltas", time_text(join.deltas_s), "half way to the next one; fetch, decode, apply")
    yield _row("rebuild the checkpoint", time_text(join.rebuild_s), "read, prove by digest, write")
    yield _row("before vLLM starts", time_text(join.total), f"at worst {time_text(join.worst_s)}")


def _money(plan: Plan) -> Iterator[str]:
    money, asked = plan.money, plan.question
    yield "storage and money"
    yield _row("bucket grows by", f"{size_text(plan.stored_hour)}/h", "nothing is deleted unless you say so")
    yield _row("egress", f"{size_text(plan.egress_hour)}/h", _egress_note(plan))
    for name, count, allowed in (
        ("requests for files", plan.file_requests, rates.FILES_ALLOWED),
        ("requests to the Hub's API", plan.api_requests, rates.API_ALLOWED),
    ):
        yield _row(name, _number(count), f"in 5 minutes; the Hub allows {_allowed(allowed)}")
    yield _row("host memory of rank 0", size_text(plan.mirror), "the mirror, 2 bytes per weight")
    yield _row("a day's bucket, kept for a month", f"${money.storage_month:,.2f}", "private, on the Hub")
    if money.replicas_hour is None:
        yield _row("replicas as Spaces", "none", f"no flavour has {size_text(_memory(plan))} of GPU memory")
    else:
        yield _row(
            "replicas as Spaces", f"${money.replicas_hour:,.2f}/h", f"{asked.replicas} x {money.space}"
        )
    if asked.egress_usd_gb:
        yield _row("egress at your price", f"${money.egress_hour:,.2f}/h")


def _whole(plan: Plan) -> Iterator[str]:
    whole = plan.whole
    yield "the same with whole checkpoints"
    yield _row("a sync", size_text(whole.size), f"{whole.size / plan.delta:.0f} times as much")
    yield _row("hand-over to loaded", time_text(whole.seconds), "the replica's load stops generation")
    yield _row("versions per hour", _number(whole.versions_per_hour))


def _memory(plan: Plan) -> float:
    return rates.REPLICA_BYTES * plan.question.params


def _threads(plan: Plan) -> str:
    return _several(plan.question.threads, "thread")


def _allowed(limits: dict[str, int]) -> str:
    return ", ".join(f"{plan} {count:,}" for plan, count in limits.items())


def _several(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")


def _number(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _egress_note(plan: Plan) -> str:
    ratio = plan.egress_hour / plan.stored_hour
    limit = rates.EGRESS_RATIO
    return f"{ratio:.1f} times what is stored; the Hub includes {limit:.0f}" + (
        ", and has no price for more" if ratio > limit else ""
    )


def assumptions(plan: Plan) -> list[str]:
    """What the prediction rests on, each a sentence."""
    asked = plan.question
    lines = [
        "seconds are those of an AMD EPYC's core per thread (`make bench`); no GPU was measured",
        f"a rank of the trainer per {rates.GPU_BYTES / 1e9:.0f} GB at {rates.TRAINER_BYTES:.0f} bytes per"
        f" weight, a worker of a replica at {rates.REPLICA_BYTES:.1f}",
        f"each machine has a link of {size_text(asked.link)}/s, and the store serves all of them at once",
        f"requests take no time; on the Hub a version costs the publisher {rates.PUBLISHING.all} of them, one"
        f" after the other, and each replica {rates.TAKING.all}",
        "the Hub's events tell replicas of versions; one that must look by itself makes"
        f" {rates.WINDOW_S / POLL_S:.0f} requests for files in 5 minutes, or fewer where its quota runs out",
        "changes are spread like those of the measured models; clustered ones make smaller files",
        f"prices: {rates.PRICES_READ}; ${rates.PRIVATE_USD_TB_MONTH:.0f} per TB and month beyond"
        f" {rates.INCLUDED_TB:.0f} TB",
    ]
    if plan.trainer_ranks > 1:
        lines.append(
            f"ranks hand rank 0 {size_text(10 * plan.changes)} of changes at each sync, in no time here"
        )
    if asked.threads > 1:
        least, most = rates.TWO_THREADS
        lines.append(
            f"threads share the work evenly; two were measured to be {least:.1f} to {most:.1f} times as fast"
        )
    if not coding.is_calibrated(asked.share, asked.trainer):
        lines.append(f"{100 * asked.share:.3g} % is outside of what was measured for trainer {asked.trainer}")
    if asked.anchor_every:
        lines.append(
            "--anchor-every is a what-if: the publisher puts one where half a model is behind the last"
        )
    return lines
