"""Settings of the vLLM Space, and the problems that its setup page shows."""

import re
import socket
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import get_token
from pydantic import Field

from delta_weight_sync import gpu_build
from delta_weight_sync.cost import HARDWARE as MACHINES
from delta_weight_sync.errors import (
    AccessDeniedError,
    BucketMissingError,
    DeltaWeightSyncError,
    SignatureError,
)
from delta_weight_sync.reader import RunReader, runs_in
from delta_weight_sync.records import POLL_S, Keys
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, PublicKeys
from delta_weight_sync.store import open_bucket
from delta_weight_sync.vllm.server import NOT_HERE
from space_guard.setup import HARDWARE, Found, HeaderText, Problems, Setup, SpaceSettings, space_owner

TOKENS = "https://huggingface.co/settings/tokens"


class Settings(SpaceSettings):
    """Each field is the variable `REPLICA_<FIELD>`; an unknown `REPLICA_` variable is an error."""

    PREFIX = "REPLICA_"

    bucket: str  # hf://buckets/<owner>/<name>, s3://<bucket>/<prefix> or file:///<path>
    run: str
    name: str = Field(default_factory=socket.gethostname)  # this replica's name on the dashboard
    host: str = "0.0.0.0"
    port: int = 7860
    poll_s: float = POLL_S  # seconds between two polls for a new version, if the store sends no notifications
    max_model_len: int | None = None  # tokens; None: as long as the model allows
    max_num_seqs: int = 64
    # Further `vllm serve` arguments, as in a shell. They may hold a secret, so no page shows them.
    vllm_args: str = Field("", repr=False)
    # Clients that send the key may use inference, the owner's controls, and pokes (requests that make the
    # replica poll the bucket now). The key may be empty only on a loopback address: then inference and pokes
    # need no key, and the owner's controls do not exist.
    key: HeaderText = Field("", repr=False)
    max_requests: int | None = Field(None, ge=1)  # concurrent completions; None: 4 * max_num_seqs
    request_s: float = Field(900.0, gt=0)  # seconds that an inference request may take
    folder: str = "/tmp/replica"  # scratch space for checkpoints and deltas

    @classmethod
    def problems_without_key(cls, environ: Mapping[str, str]) -> Problems:
        if "SPACE_ID" in environ:
            return {"REPLICA_KEY": "not set"}
        host, _ = cls.listen_address(environ)
        if host in ("localhost", "::1") or host.startswith("127."):
            return {}
        return {"REPLICA_KEY": "not set; only a replica with REPLICA_HOST=127.0.0.1 needs no key"}

    @classmethod
    def problems(cls, environ: Mapping[str, str]) -> Problems:
        found = {SIGNING_KEY: NOT_HERE} if environ.get(SIGNING_KEY) else {}
        for name, check in (
            ("REPLICA_BUCKET", open_bucket),
            ("REPLICA_RUN", Keys),
            (PUBLIC_KEY, PublicKeys),
        ):
            try:
                if name in environ:
                    check(environ[name])
            except DeltaWeightSyncError as error:
                found[name] = str(error)
        if "SPACE_ID" in environ and environ.get("ACCELERATOR") == "none" and gpu_build.is_installed():
            price = MACHINES["l4x1"].usd_per_hour
            choice = f"such as l4x1 (${price:.2f} per hour), and a sleep time"
            found[HARDWARE] = f"no GPU: once the rest is set, choose one under Space hardware, {choice}"
        return found

    @classmethod
    def notes(cls, environ: Mapping[str, str]) -> Problems:
        owner = space_owner(environ)
        match = re.match("hf://buckets/([^/]+)/", environ.get("REPLICA_BUCKET", ""))
        if not owner or not match or match[1] == owner:
            return {}
        other = match[1]
        keep = f"set your own, or keep it to follow {other}'s run"
        found = {"REPLICA_BUCKET": f"It belongs to {other}, not to {owner}: {keep}."}
        if environ.get(PUBLIC_KEY):
            fix = "for your own bucket, set your trainer's public key, or delete this variable"
            found[PUBLIC_KEY] = f"It came with {other}'s bucket, and refuses what another key signed: {fix}."
        return found


SETUP = Setup(
    Settings,
    "replica",
    then="dashboard",
    needs=Path(__file__).with_name("setup.toml"),
    usd_per_hour={name: machine.usd_per_hour for name, machine in MACHINES.items()},
)


def look_at_bucket(environ: Mapping[str, str]) -> Found:
    """Whether the bucket and the run can be read with the variables that are set so far."""
    wrong = Settings.problems(environ)
    url = environ.get("REPLICA_BUCKET", "")
    run = "" if "REPLICA_RUN" in wrong else environ.get("REPLICA_RUN", "")
    if not url or wrong.keys() & {"REPLICA_BUCKET", PUBLIC_KEY}:
        return Found()
    try:
        bucket = open_bucket(url)
        if run and RunReader(bucket, run).newest():
            return Found()
        count = len(runs_in(bucket))  # without their names, because strangers may see the page
    except SignatureError as error:
        return Found({PUBLIC_KEY: str(error)})
    except DeltaWeightSyncError as error:
        return Found(access_problems(error, url))
    waits = "This run has no version yet, so the replica will wait for one. " if run else ""
    return Found(notes={"REPLICA_RUN": f"{waits}The bucket holds {count or 'no'} run{'s' * (count > 1)}."})


def access_problems(error: Exception, url: str) -> Problems:
    """The variable or secret to fix if `error` says that the bucket at `url` cannot be read; else empty."""
    if not isinstance(error, AccessDeniedError | BucketMissingError):
        return {}
    on_hub = url.startswith("hf://")
    # Without a token, the Hub may say of a private bucket that it does not exist.
    token_needed = on_hub and (isinstance(error, AccessDeniedError) or not get_token())
    return {"HF_TOKEN" if token_needed else "REPLICA_BUCKET": f"{error}"}
