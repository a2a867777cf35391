"""Settings of the vLLM Space: one frozen object, read once from the environment (a Space's variables)."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PREFIX = "REPLICA_"


class SettingsError(ValueError):
    """The environment does not describe a replica; the message names the variable and the fix."""


class Settings(BaseModel):
    """Each field is the variable `REPLICA_<FIELD>`; an unknown `REPLICA_` variable is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket: str  # hf://buckets/<owner>/<name>, s3://<bucket>/<prefix> or file:///<path>
    run: str
    name: str = Field(default_factory=socket.gethostname)  # how the dashboard calls this replica
    host: str = "0.0.0.0"
    port: int = 7860  # the gateway's; vLLM itself takes a free port on loopback
    poll_s: float = 1.0  # how often HEAD is looked at
    max_model_len: int | None = None  # tokens; None: as long as the model allows
    max_num_seqs: int = 64
    vllm_args: str = ""  # further `vllm serve` arguments, as in a shell
    key: str = ""  # of the owner, for the dashboard's controls; empty: nobody has one
    folder: str = "/tmp/replica"  # scratch space: checkpoints, deltas, vLLM's log


def settings_from(environ: Mapping[str, str]) -> Settings:
    """Parse the settings; raises `SettingsError`."""
    values = {key[len(PREFIX) :].lower(): value for key, value in environ.items() if key.startswith(PREFIX)}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problems = (f"{PREFIX}{str(e['loc'][0]).upper()}: {e['msg'].lower()}" for e in error.errors())
        raise SettingsError("set the Space's variables: " + "; ".join(problems)) from None
