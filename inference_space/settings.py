"""Settings of the vLLM Space: one frozen object, read once from the environment (a Space's variables)."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, field_validator

from delta_weight_sync.protocol import POLL_S
from delta_weight_sync.vllm.settings import SettingsError, sendable
from delta_weight_sync.vllm.settings import settings_from as _settings_from

__all__ = ["PREFIX", "Settings", "SettingsError", "settings_from"]
PREFIX = "REPLICA_"


class Settings(BaseModel):
    """Each field is the variable `REPLICA_<FIELD>`; an unknown `REPLICA_` variable is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket: str  # hf://buckets/<owner>/<name>, s3://<bucket>/<prefix> or file:///<path>
    run: str
    name: str = Field(default_factory=socket.gethostname)  # how the dashboard calls this replica
    host: str = "0.0.0.0"
    port: int = 7860
    poll_s: float = POLL_S  # how often HEAD is looked at
    max_model_len: int | None = None  # tokens; None: as long as the model allows
    max_num_seqs: int = 64
    vllm_args: str = ""  # further `vllm serve` arguments, as in a shell
    # Opens inference and the owner's controls; empty: inference is open, and nobody has the controls.
    key: str = Field("", repr=False)
    open_inference: bool = False  # whether inference needs no key
    max_requests: int | None = Field(None, ge=1)  # inference requests at once; None: 4 * max_num_seqs
    request_s: float = Field(900.0, gt=0)  # the longest that one of them may take
    folder: str = "/tmp/replica"  # scratch space: checkpoints and deltas

    @field_validator("key")
    @classmethod
    def _sendable(cls, key: str) -> str:
        return sendable(key)


def settings_from(environ: Mapping[str, str]) -> Settings:
    """Parse the settings; raises `SettingsError`."""
    return _settings_from(Settings, PREFIX, environ)
