"""Settings of the vLLM Space, and the problems that its setup page shows."""

import socket
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import get_token
from pydantic import Field

from delta_weight_sync.errors import AccessDeniedError, BucketMissingError, DeltaWeightSyncError
from delta_weight_sync.records import POLL_S, Keys
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, PublicKeys
from delta_weight_sync.store import open_bucket
from delta_weight_sync.vllm.server import NOT_HERE
from space_guard.setup import HeaderText, Problems, Setup, SpaceSettings

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
    vllm_args: str = ""  # further `vllm serve` arguments, as in a shell
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

    def problems(self, environ: Mapping[str, str]) -> Problems:
        found = {SIGNING_KEY: NOT_HERE} if environ.get(SIGNING_KEY) else {}
        for name, check, value in (
            ("REPLICA_BUCKET", open_bucket, self.bucket),
            ("REPLICA_RUN", Keys, self.run),
            (PUBLIC_KEY, PublicKeys, environ.get(PUBLIC_KEY, "")),
        ):
            try:
                check(value)
            except DeltaWeightSyncError as error:
                found[name] = str(error)
        return found


SETUP = Setup("replica", then="dashboard", needs=Path(__file__).with_name("setup.toml"))


def access_problems(error: Exception, url: str) -> Problems:
    """The variable or secret to fix if `error` says that the bucket at `url` cannot be read; else empty."""
    if not isinstance(error, AccessDeniedError | BucketMissingError):
        return {}
    on_hub = url.startswith("hf://")
    # Without a token, the Hub may say of a private bucket that it does not exist.
    token_needed = on_hub and (isinstance(error, AccessDeniedError) or not get_token())
    return {"HF_TOKEN" if token_needed else "REPLICA_BUCKET": f"{error}"}
