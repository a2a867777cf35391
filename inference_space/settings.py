"""Settings of the vLLM Space: one frozen object, read once from the environment (a Space's variables)."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from delta_weight_sync.protocol import POLL_S

PREFIX = "REPLICA_"


class SettingsError(ValueError):
    """The environment does not describe a replica; the message names each variable and the fix."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("set the Space's variables: " + "; ".join(f"{k}: {v}" for k, v in problems.items()))
        self.problems = problems  # variable -> what is wrong with it


class Settings(BaseModel):
    """Each field is the variable `REPLICA_<FIELD>`; an unknown `REPLICA_` variable is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket: str  # hf://buckets/<owner>/<name>, s3://<bucket>/<prefix> or file:///<path>
    run: str
    name: str = Field(default_factory=socket.gethostname)  # how the dashboard calls this replica
    host: str = "0.0.0.0"
    port: int = 7860  # the gateway's; vLLM itself takes a free port on loopback
    poll_s: float = POLL_S  # how often HEAD is looked at
    max_model_len: int | None = None  # tokens; None: as long as the model allows
    max_num_seqs: int = 64
    vllm_args: str = ""  # further `vllm serve` arguments, as in a shell
    # Opens inference and the owner's controls; empty: inference is open, and nobody has the controls.
    key: str = Field("", repr=False)
    open_inference: bool = False  # whether inference needs no key
    max_requests: int | None = Field(None, ge=1)  # inference requests at once; None: 4 * max_num_seqs
    request_s: float = Field(900.0, gt=0)  # the longest that one of them may take
    folder: str = "/tmp/replica"  # scratch space: checkpoints, deltas, vLLM's log

    @field_validator("key")
    @classmethod
    def _sendable(cls, key: str) -> str:
        if not re.fullmatch("[!-~]*", key):
            raise ValueError("a header cannot hold it, use printable ASCII without spaces")
        return key


def settings_from(environ: Mapping[str, str]) -> Settings:
    """Parse the settings; raises `SettingsError`."""
    values = {key[len(PREFIX) :].lower(): value for key, value in environ.items() if key.startswith(PREFIX)}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problems = {f"{PREFIX}{str(e['loc'][0]).upper()}": _in_words(e) for e in error.errors()}
        raise SettingsError(problems) from None


def _in_words(problem: ErrorDetails) -> str:
    """What is wrong, without the value: it may be a secret."""
    words = {"missing": "not set", "extra_forbidden": "there is no such variable"}
    return words.get(problem["type"], problem["msg"].removeprefix("Value error, ").lower())
