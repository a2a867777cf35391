"""The README's table of the replica."""

from __future__ import annotations

from typing import Any

from bench.markdown import table
from bench.results import Results


def live(results: Results) -> str:
    """The replica: commits, pauses, throughput, memory."""
    section = results["live"]
    changed = section["changed"] / section["elements"]
    title = f"vLLM on the CPU, SmolLM2-135M, {changed:.1%} changed, {section['in_flight']} requests in flight"
    return table([title, ""], [*_commits(section["commits"]), *_load(section), *_memory(section)])


def _commits(commits: dict[str, Any]) -> list[list[str]]:
    names = {
        "ours": "our commit",
        "sparse loader": "vLLM's sparse loader, same delta",
        "dense": "vLLM's loader, all weights",
    }
    return [[name, f"{1e3 * commits[key]['median_s']:.1f} ms"] for key, name in names.items()]


def _load(section: dict[str, Any]) -> list[list[str]]:
    rows = []
    for kind, row in section["syncs"].items():
        pause = row["pause_ms"]
        rows += [
            [f"pause, {row['count']} syncs, {kind}", f"p50 {pause['p50']:.1f} ms, p99 {pause['p99']:.1f} ms"],
            [f"throughput kept, syncs {kind}", f"{section['throughput_kept'][kind]:.1%}"],
        ]
    return rows


def _memory(section: dict[str, Any]) -> list[list[str]]:
    memory, weights = section["memory"], section["model_bytes"] >> 20
    return [
        ["a sync's extra memory at the replica", f"{memory['extra_mib']} MiB, of weights {weights} MiB"],
        ["the same, vLLM's sparse loader", f"{memory['sparse_loader_extra_mib']} MiB"],
    ]
