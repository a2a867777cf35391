"""Simulates five fleets, or variants of two (`--changed`): docs/limits-and-costs.md has the main figures."""

from __future__ import annotations

import argparse
import logging
import math
from dataclasses import replace
from statistics import median, quantiles

from bench.fleet.hub import WINDOW_S, Limits
from bench.fleet.machines import Fleet, Region, Scenario
from bench.tables import table
from delta_weight_sync.cost import EGRESS_RATIO, Plan, Question
from delta_weight_sync.util import size_text, time_text

ACCOUNTS = {"free": Limits(5_000, 1_000), "PRO": Limits(12_000, 2_500), "Team": Limits(20_000, 3_000)}
LATENCIES = 0.02, 0.1, 0.2
NEAR, FAR, FARTHEST = (Region(latency, 1e9, 200e9) for latency in LATENCIES)
# The first numbers of a `Scenario` are weights, share that changes, replicas, seconds per step, and minutes.
BIG = Scenario(235 * 10**9, 0.01, 128, 120, 30, ranks=48, cores=32, regions=(NEAR, FAR))
HUGE = Scenario(10**12, 0.01, 1000, 60, 10, ranks=64, cores=32, regions=(NEAR, FAR, FARTHEST))
FAST = tuple(Region(latency, 16e9, 200e9) for latency in LATENCIES)
STANDARD = {  # name and account -> what is simulated
    ("demo", "free"): Scenario(1_021_568, 0.01, 2, 3, 20, link=1e8, regions=(Region(0.1, 1e8),)),
    ("8B", "PRO"): Scenario(
        8 * 10**9, 0.01, 16, 60, 60, ranks=2, link=2.5e8, regions=(Region(0.1, 2.5e8),), cores=8
    ),
    ("235B", "Team"): BIG,
    ("10^12", "Team"): HUGE,
    ("10^12, links of 16 GB/s", "Team"): replace(
        HUGE, replicas=32, given_workers=16, minutes=60, link=16e9, regions=FAST
    ),
}
CHANGED = {  # "235B", then with one thing changed in each row; "10^12" with few replicas, then with few ranks
    "235B, 128 replicas": BIG,
    "no events": replace(BIG, events=False),
    "one event in five is lost": replace(BIG, lost=0.2),
    "the Hub is down for 5 minutes": replace(BIG, outage=(10, 300)),
    "20 replicas die per hour": replace(BIG, deaths_hour=20, minutes=60),
    "8 replicas, a Team's limits enforced": replace(BIG, replicas=8, limits=ACCOUNTS["Team"]),
    "16 replicas, a Team's limits enforced": replace(BIG, replicas=16, limits=ACCOUNTS["Team"]),
    "8 ranks instead of 48": replace(BIG, ranks=8),
    "10^12, 16 replicas": replace(HUGE, replicas=16, minutes=60),
    "8 ranks instead of 64": replace(HUGE, replicas=16, minutes=60, ranks=8),
}


class Figures:
    """The figures of a finished simulation."""

    def __init__(self, fleet: Fleet) -> None:
        asked = fleet.asked
        hub = fleet.hub
        self.fleet = fleet
        self.asked = asked
        self.hours = asked.minutes / 60
        self.versions = len(fleet.versions)
        # Syncs in a version: more than 1 if the publisher had to merge syncs.
        self.merged = (fleet.versions[-1].sync - fleet.versions[0].sync + 1) / self.versions
        self.lag, self.p95, self.longest = spread(fleet.lags)
        self.egress = hub.received["replica"] / self.hours
        self.stored = fleet.stored / self.hours
        self.uplink = fleet.sent / 3600 / self.hours / (asked.link * asked.machines)
        windows = 60 * asked.minutes / WINDOW_S
        kinds = [(role, quota_of(kind), count) for (role, kind), count in hub.kinds.items()]
        self.trainer, self.replica = (  # requests in five minutes, of the trainer and of one replica
            {q: sum(n for r, of, n in kinds if (r, of) == (role, q)) / windows / some for q in Limits._fields}
            for role, some in (("trainer", 1), ("replica", asked.replicas))
        )
        first = int(fleet.began // WINDOW_S) + 1
        last = int(fleet.clock.now // WINDOW_S)
        self.peak = {q: max(hub.windows[window, q] for window in range(first, last)) for q in Limits._fields}

    def breaks(self, limits: Limits) -> list[tuple[float, str]]:
        """Pairs: the number of replicas that reaches a limit (0: any number does), and the limit's name."""
        asked = self.asked
        found = list[tuple[float, str]]()
        delta = sum(part.size for part in self.fleet.versions[-1].delta)
        if self.merged > 1.05:
            found.append((0, f"the publisher is slower than the steps: {self.merged:.1f} in a version"))
        for quota, text in (("files", "requests for files"), ("api", "requests to the API")):
            trainer = self.trainer[quota]
            fit = asked.replicas * (getattr(limits, quota) - trainer) / (self.peak[quota] - trainer)
            found.append((fit, f"{text} of one account"))
        found.append(
            (EGRESS_RATIO * self.stored / self.egress * asked.replicas, "downloads above 8 x stored")
        )
        if (rate := sum(region.store for region in asked.regions)) < math.inf:
            found.append((rate * asked.step_s / delta, "the store's bandwidth for all regions"))
        return sorted(found)


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, 95th percentile, maximum."""
    return median(values), quantiles(values, n=20)[-1], max(values)


def quota_of(kind: str) -> str:
    """The quota against which the Hub counts a request; "" for the storage."""
    return "api" if "/api/" in kind else "files" if " /buckets/" in kind else ""


def standard(name: str, account: str, one: Figures) -> dict[str, str]:
    """A column of the table of five fleets."""
    asked = one.asked
    limits = ACCOUNTS[account]
    per_hour = 3600 / asked.step_s
    plan = Plan(
        Question(
            asked.params,
            asked.share,
            asked.replicas,
            min(asked.link, *(region.link for region in asked.regions)),
            steps_per_hour=per_hour,
            cores=asked.cores,
            ranks=asked.ranks,
            workers=asked.workers,
        )
    )

    def requests(quota: str) -> str:
        allowed = getattr(limits, quota)
        return f"{one.peak[quota]:,} = {one.peak[quota] / allowed:.0%}"

    first = [
        f"{text} ({f'from {math.ceil(fit):,} replicas on' if fit else 'any fleet'})"
        for fit, text in one.breaks(limits)
    ]
    return {
        "": f"{name}, {asked.replicas:,} replicas",
        "a step every": time_text(asked.step_s),
        "versions per hour": f"{one.versions / one.hours:,.0f}",
        "lag, median": time_text(one.lag),
        "lag, 95 %": time_text(one.p95),
        "lag, longest": time_text(one.longest),
        "lag by `plan`": time_text(plan.hand_over_to_serving_s),
        "egress per hour": size_text(one.egress),
        "egress by `plan`": size_text(plan.egress_hour),
        "stored per hour": size_text(one.stored),
        "stored by `plan`": size_text(plan.stored_hour),
        "egress / stored": f"{one.egress / one.stored:.1f}",
        "trainer's link in use": f"{one.uplink:.0%}",
        "most requests for files in 5 minutes": f"{requests('files')} of {account}",
        "requests for files by `plan`": f"{plan.file_requests:,.0f}",
        "most requests to the API in 5 minutes": f"{requests('api')} of {account}",
        "requests to the API by `plan`": f"{plan.api_requests:,.0f}",
        "a replica's requests in 5 minutes, files and API": " and ".join(
            f"{one.replica[quota]:.1f}" for quota in Limits._fields
        ),
        "what breaks first": first[0],
        "then": first[1],
    }


def changed(name: str, one: Figures) -> list[str]:
    """A row of the table of variants."""
    joins = f"{len(one.fleet.joins)}, {time_text(median(one.fleet.joins))}" if one.fleet.joins else ""
    lags = map(time_text, (one.lag, one.p95, one.longest))
    peaks = (f"{one.peak[quota]:,}" for quota in Limits._fields)
    return [name, f"{one.merged:.2f}", *lags, *peaks, f"{one.fleet.hub.refused:,}", joins]


def main() -> None:
    """Run the scenarios, and print their tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument(
        "--changed", action="store_true", help="print the other table: fleets with one thing changed"
    )
    logging.getLogger("delta_weight_sync").setLevel(logging.ERROR)  # replicas log warnings during outages
    if parser.parse_args().changed:
        rows = [changed(name, Figures(Fleet(asked).run())) for name, asked in CHANGED.items()]
        head = ["scenario", "steps in a version", "lag, median", "95 %", "longest", "most requests for files"]
        print(table([*head, "most to the API", "refused", "joins, median time"], rows))
        return
    columns = [standard(*key, Figures(Fleet(asked).run())) for key, asked in STANDARD.items()]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    print(table(rows[0], rows[1:]), "\n")
    for column in columns:
        print(f"{column['']}: what breaks first: {column['what breaks first']}")


if __name__ == "__main__":
    main()
