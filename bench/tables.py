"""The Markdown tables of the pages, one function per marked place."""

from collections.abc import Sequence
from typing import Any

from bench.results import Results
from delta_weight_sync.util import size_text

_RIVALS = {"modelexpress": "ModelExpress", "fast": "fast", "small": "small"}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a row of headings."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def machine(results: Results) -> str:
    """One line: what it was measured on, and when."""
    about = results["machine"]
    versions = results["machine"]["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    days = sorted({section["date"] for section in results.values() if "date" in section})
    parts = f"{about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB"
    when = " to ".join(sorted({days[0], days[-1]}))
    return f"{parts}, {when}; seconds are of one core's work. Python {about['python']}, {packages}."


def size(results: Results) -> str:
    """Bytes per change of every set."""
    head = [
        "delta",
        "changed",
        "small",
        "its limit",
        "fast",
        "its limit",
        "gaps + zstd",
        "bitmask + zstd",
        "original",
    ]
    return table(head, [_size_row(row) for row in results["size"]["sets"]])


def _size_row(row: dict[str, Any]) -> list[str]:
    per_change = row["per_change"]
    limits = row["limits"]
    return [
        f"{row['model']}, {row['trainer']}",
        f"{row['share']:.2%}",
        f"**{per_change['small']:.3f}**",
        f"{limits['by_exponent']:.3f}",
        f"**{per_change['fast']:.3f}**",
        f"{limits['independent']:.3f}",
        *(f"{per_change[way]:.3f}" for way in ("gap_zstd", "bitmask_zstd", "original")),
    ]


def sync(results: Results) -> str:
    """What one sync of the Qwen3-0.6B-shaped set sends, and what would be sent instead."""
    sizes = next(s["bytes"] for s in results["size"]["sets"] if s["model"].startswith("Qwen"))
    names = {
        "small": "**small**",
        "fast": "**fast**",
        "gap_zstd": "gaps + zstd",
        "bitmask_zstd": "bitmask + zstd",
    }
    names |= {"original": "original layout", "full": "all weights, bf16"}
    rows = [(name, sizes[key]) for key, name in names.items()]
    rows += [
        (f"LoRA adapter instead, r = {a['rank']}, {a['targets']}", a["bytes"])
        for a in results["size"]["adapters"]
    ]
    ordered = sorted(rows, key=lambda row: row[1])
    return table(
        ["one sync of Qwen3-0.6B, 1 % changed", "MB", "of all weights"],
        [[name, f"{count / 1e6:.1f}", f"1/{sizes['full'] / count:.0f}"] for name, count in ordered],
    )


def lora(results: Results) -> str:
    """Bytes of a sync of a LoRA run: merged, and as an adapter."""
    head = [
        "weights",
        "rate",
        "r",
        "changed",
        "merged, fast",
        "small",
        "adapter's delta, fast",
        "small",
        "adapter",
    ]
    return table(head, [_lora_row(row) for row in results["lora"]["rows"]])


def _lora_row(row: dict[str, Any]) -> list[str]:
    def spread(key: str, factor: float, form: str) -> str:
        low, high = (format(factor * value, form) for value in row[key])
        return low if low == high else f"{low} to {high}"

    sizes = [spread(key, 1e-6, ".1f") for key in ("fast", "small", "adapter_fast", "adapter_small")]
    rate = f"{row['lr']:.0e}".replace("e-0", "e-")
    changed = f"{spread('changed', 100, '.2f')} %"
    return [row["model"], rate, str(row["rank"]), changed, *sizes, f"{row['adapter_bytes'] / 1e6:.1f}"]


def speed(results: Results) -> str:
    """Publish and receive per encoding, against the original layout's way."""
    section = results["speed"]
    parts = section["parts"]
    ratios = section["ratios"]
    rows = []
    for encoding in ("fast", "small", "original"):
        columns = ["diff bf16", f"encode {encoding}", f"publish {encoding} bf16", f"publish {encoding} fp32"]
        columns += [f"decode {encoding}", f"apply {encoding}", f"receive {encoding}"]
        row = [encoding, *(f"{parts[part]['median_gb_s']:.1f}" for part in columns)]
        row += [
            f"{ratios[f'publish {encoding} bf16']['median']:.1f}x",
            f"{ratios[f'receive {encoding}']['median']:.2f}x",
        ]
        rows.append(row)
    others = ["", "", "publish by others bf16", "publish by others fp32", "", "", "receive by others"]
    rows.append(["others' way", *(f"{parts[p]['median_gb_s']:.1f}" if p else "" for p in others), "1", "1"])
    head = ["GB/s of model", "diff", "encode", "publish", "publish from fp32", "decode", "apply", "receive"]
    return table([*head, "publish, against others", "receive"], rows)


def parts(results: Results) -> str:
    """The other parts of a sync."""
    measured = results["speed"]["parts"]
    names = {
        "stage": "stage",
        "commit": "commit (write, read back)",
        "undo": "undo",
        "digest": "digest of all weights",
    }
    rows = [
        [name, f"{1e3 * measured[key]['median_s']:.0f} ms", f"{measured[key]['median_gb_s']:.1f}"]
        for key, name in names.items()
    ]
    return table(["part", "Qwen3-0.6B-shaped, 1 %", "GB/s of model"], rows)


def memory(results: Results) -> str:
    """The publisher's peak."""
    measured = {encoding: results["memory"][encoding] for encoding in ("fast", "small")}
    rows = [[f"publisher, {encoding}", f"{row['extra_mib']} MiB"] for encoding, row in measured.items()]
    mirror = f"the mirror of {measured['fast']['model_mib']} MiB"
    return table([f"peak, without parameters and {mirror}", ""], rows)


def dashboard(results: Results) -> str:
    """What 10,000 versions cost a visitor and the server."""
    section = results["dashboard"]
    if "unmeasured" in section:
        return f"Dashboard: unmeasured ({section['unmeasured']})."
    names = {
        "refresh_ms": "a refresh after one more version: read the log, render the page",
        "answer_ms": "the server's answer to a visitor",
        "first_paint_ms": "first paint in a Chromium with an empty cache",
    }
    rows = [
        [text, f"{section[key]['median']:.0f} ms", f"{section[key]['worst']:.0f} ms"]
        for key, text in names.items()
    ]
    rows.append(["reading the whole log, once", f"{section['first_reading_s']:.1f} s", ""])
    return table([f"{section['versions']:,} versions, 3 replicas", "median", "worst"], rows)


def joining(results: Results) -> str:
    """What a replica that joins at version 500 fetches, by each recipe."""
    join = results["joining"]["join"]
    way = join["way"]
    least = join["least"]
    rows = [
        ("the anchor, and one file with the exact difference to it", least),
        (f"**the cheapest recipe**: anchor {way['anchor']}, {way['files']} jumps and deltas", way["bytes"]),
        ("with an anchor every 128 versions: the newest anchor, and deltas", join["anchors_and_deltas"]),
        ("the anchor of version 0 and all deltas", join["naive"]),
    ]
    head = [f"joining at version {join['versions']}, {join['changed']:.2%} changed per version", "", "times"]
    return table(head, [[name, size_text(size), f"{size / least:.2f}"] for name, size in rows])


def live(results: Results) -> str:
    """The replica: commits, pauses, throughput, memory."""
    section = results["live"]
    changed = section["changed"] / section["elements"]
    title = f"vLLM on the CPU, SmolLM2-135M, {changed:.1%} changed, {section['in_flight']} requests in flight"
    return table(
        [title, ""], [*_live_commits(section["commits"]), *_live_load(section), *_live_memory(section)]
    )


def _live_commits(commits: dict[str, Any]) -> list[list[str]]:
    names = {
        "ours": "our commit",
        "sparse loader": "vLLM's sparse loader, same delta",
        "dense": "vLLM's loader, all weights",
    }
    return [[name, f"{1e3 * commits[key]['median_s']:.1f} ms"] for key, name in names.items()]


def _live_load(section: dict[str, Any]) -> list[list[str]]:
    rows = []
    for kind, row in section["syncs"].items():
        pause = row["pause_ms"]
        rows += [
            [f"pause, {row['count']} syncs, {kind}", f"p50 {pause['p50']:.1f} ms, p99 {pause['p99']:.1f} ms"],
            [f"throughput kept, syncs {kind}", f"{section['throughput_kept'][kind]:.1%}"],
        ]
    return rows


def _live_memory(section: dict[str, Any]) -> list[list[str]]:
    memory = section["memory"]
    weights = section["model_bytes"] >> 20
    return [
        [
            "extra memory of a replica during a sync",
            f"{memory['extra_mib']} MiB (all weights take {weights} MiB)",
        ],
        ["the same, vLLM's sparse loader", f"{memory['sparse_loader_extra_mib']} MiB"],
    ]


def hub(results: Results) -> str:
    """Seconds and requests of a version over the Hub."""
    return hub_table(results["hub"]["latencies"])


def hub_table(latencies: dict[str, Any]) -> str:
    """The same, of figures by latency."""
    rows = [
        [
            *(
                f"{latency} s",
                name,
                f"{part['seconds']:.2f} s",
                f"{part['in_turn']:g}" if part["in_turn"] else "",
            ),
            *(f"{part['requests']:g}", f"{part['files']:g}"),
        ]
        for latency, measured in latencies.items()
        for name, part in measured.items()
    ]
    return table(
        ["a request takes", "part", "median", "requests in turn", "all requests", "of these, for files"], rows
    )


def cpu(results: Results) -> str:
    """Tokens per CPU second, without and with our patches."""
    head = ["policy", "CPU", "before", "now", "times", "in the worst round"]
    rows = [
        [r["policy"], r["cpu"], f"{r['without']:.0f}", f"{r['with']:.0f}", f"{r['ratio']}", f"{r['worst']}"]
        for r in results["cpu"]["runs"]
    ]
    return table(head, rows)


def rival(results: Results) -> str:
    """Bytes and speeds next to those of ModelExpress, on the same deltas."""
    section = results.get("rival", {"unmeasured": "not yet"})
    if "unmeasured" in section:
        return f"Beside ModelExpress: unmeasured ({section['unmeasured']})."
    head = [f"{name}, {unit}" for name in _RIVALS.values() for unit in ("B", "out", "in")]
    return table(["delta", "changed", *head], [_rival_row(row) for row in section["sets"]])


def _rival_row(row: dict[str, Any]) -> list[str]:
    cells = [f"{row['model']}, {row['trainer']}", f"{row['share']:.2%}"]
    for way in _RIVALS:
        speeds = (f"{row[side][way]['median_gb_s']:.2f}" for side in ("out", "in"))
        cells += [f"**{row['per_change'][way]:.3f}**", *speeds]
    return cells


TABLES = {
    "machine": machine,
    "lora": lora,
    "size": size,
    "sync": sync,
    "speed": speed,
    "rival": rival,
    "parts": parts,
    "joining": joining,
    "memory": memory,
    "hub": hub,
    "live": live,
    "cpu": cpu,
    "dashboard": dashboard,
}
