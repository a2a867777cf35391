"""The folder on a replica's own disk: no other user of the machine may put anything into it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from delta_weight_sync.vllm.settings import SettingsError


def private_folder(folder: str, variable: str) -> Path:
    """The folder that `variable` names, made for this user alone where it is missing.

    What is read from it is run, or served. So one that another user has made, as anybody can in /tmp, will
    not do, nor one that everybody may write to. Raises `SettingsError`.
    """
    path = Path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(variable, folder, f"cannot be made ({error.strerror})") from None
    if {path.lstat().st_uid, path.stat().st_uid} != {os.geteuid()}:
        raise _refused(variable, folder, "belongs to another user")
    if path.stat().st_mode & stat.S_IWOTH:
        raise _refused(variable, folder, "may be written to by every user")
    return path


def _refused(variable: str, folder: str, reason: str) -> SettingsError:
    return SettingsError(
        {variable: f"{folder} {reason}; name a folder of your own, or one that is not there"}
    )
