"""What `up` says at its end: where everything is, what it costs, and how to start the trainer."""

from __future__ import annotations

from collections.abc import Mapping

from delta_weight_sync.plan.prices import READ_ON, SOURCE
from delta_weight_sync.signing import PUBLIC_KEY, PublicKeys
from trainer.deploy.keys import key_file, signing_file
from trainer.deploy.plan import SLEEP_S, Deployment


def summary(deployment: Deployment, urls: Mapping[str, str]) -> str:
    """`urls`: of each Space's app."""
    replicas = " ".join(urls[plan.repo_id] for plan in deployment.replicas)
    usd = sum(plan.usd_per_hour for plan in deployment.spaces)
    return f"""
environment  {urls[deployment.env.repo_id]}
replicas     {replicas}
bucket       {deployment.bucket_url}
signatures   {_signatures(deployment)}

costs        ${usd:.2f} per hour while all of it runs, $0.00 asleep or paused (prices of {READ_ON},
             {SOURCE}); a replica falls asleep after {SLEEP_S // 60} minutes
             without a request, and the next request wakes it

the trainer, on a machine with a GPU:

    set -a; {_sources(deployment)}; set +a    # its keys; set HF_TOKEN and SPACE_HF_TOKEN there as here
    export SPACES="{urls[deployment.env.repo_id]} {replicas}"    # who is sent them, and nobody else
    accelerate launch -m trainer.train --config trainer/configs/qwen3_0_6b.yaml \\
        --bucket {deployment.bucket_url} --run {deployment.run} \\
        --replicas {replicas} \\
        --env_url {urls[deployment.env.repo_id]}"""


def _believed(deployment: Deployment) -> PublicKeys:
    return PublicKeys(deployment.replicas[0].variables.get(PUBLIC_KEY, ""))


def _signatures(deployment: Deployment) -> str:
    if believed := _believed(deployment):
        return f"replicas serve what {believed} has signed, and nothing else"
    return "none: replicas serve whatever somebody writes to the bucket"


def _sources(deployment: Deployment) -> str:
    files = [key_file(deployment.owner)]
    if _believed(deployment):
        files.append(signing_file(deployment.owner, deployment.name))
    return "; ".join(f". {file}" for file in files)
