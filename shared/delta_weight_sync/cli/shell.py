"""A command of the user's that runs in a shell for one version."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.protocol import Manifest


class CommandError(DeltaWeightSyncError):
    """The user's command did not do its work."""


def run(command: str, path: Path, manifest: Manifest) -> int:
    """Run `command` and return its exit code; in it {path}, {version} and {digest} stand for the version's.

    They come quoted for the shell. A command that a signal ended has a negative code, or one above 128.
    """
    values = {"path": str(path), "version": str(manifest.version), "digest": manifest.digest}
    filled = re.sub(r"\{(path|version|digest)\}", lambda match: shlex.quote(values[match[1]]), command)
    return subprocess.run(filled, shell=True).returncode
