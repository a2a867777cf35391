"""Checks of everything that a deployment and a trainer need; each problem comes with its fix.

It needs no deployment: what does not exist yet is not a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from delta_weight_sync.store import BucketError
from trainer.deploy import checks_box, checks_hub
from trainer.deploy.checks_scene import Check, Problem, Scene
from trainer.deploy.errors import DeployError, masked

CHECKS: dict[str, Check] = {
    "token": checks_hub.token,
    "Space's token": checks_hub.space_token,
    "plan": checks_hub.plan,
    "model licence": checks_hub.licence,
    "clock": checks_hub.clock,
    "Spaces awake": checks_hub.awake,
    "protocol": checks_hub.protocol,
    "signatures": checks_hub.signatures,
    "versions": checks_box.versions,
    "disk": checks_box.disk,
    "GPU of the replicas": checks_box.replica_gpu,
    "GPU of the trainer": checks_box.trainer_gpu,
    "software for GPUs": checks_box.gpu_software,
    "bucket": checks_hub.bucket,  # last: opening a bucket gives the Hub's client other time limits
}


@dataclass(frozen=True)
class Finding:
    """What one check found out; of a problem the text names the fix. No text: it has no object here."""

    name: str
    ok: bool
    text: str


def examine(scene: Scene, say: Callable[[str], None] = print) -> bool:
    """Run all checks and say what each found; True if there is no problem."""
    findings = [_finding(name, check, scene, say) for name, check in CHECKS.items()]
    problems = sum(not finding.ok for finding in findings)
    say(f"{problems} of {len(findings)} checks found a problem" if problems else "no problem found")
    return not problems


def _finding(name: str, check: Check, scene: Scene, say: Callable[[str], None]) -> Finding:
    try:
        finding = Finding(name, True, check(scene))
    except (Problem, DeployError, BucketError) as error:
        finding = Finding(name, False, masked(str(error), scene.secrets))
    if finding.text:
        say(f"{'ok     ' if finding.ok else 'PROBLEM'}  {name}: {finding.text}")
    return finding
