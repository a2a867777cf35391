"""The secrets of a deployment: where they come from, and how to tell that a Space has them.

The Hub never shows a secret's value again, so each is stored with a fingerprint as its description: an HMAC
of the value under the SPACE_KEY. The description is replaced together with the value, is shown only to those
who may change the Space, restarts nothing, and means nothing without the key. A local note would still say
"set" of a Space that was deleted and made again, or that was changed from another machine.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from trainer.deploy.errors import DeployError

NOTES = Path(".deploy")  # in the folder where the command runs


@dataclass(frozen=True, repr=False)
class Secrets:
    """Values that are sent to the Hub and shown to nobody."""

    space_key: str
    space_token: str  # read-only

    def value(self, name: str) -> str:
        """The value of a Space's secret."""
        return self.space_token if name == "HF_TOKEN" else self.space_key

    def fingerprint(self, name: str) -> str:
        """What stands beside the secret on the Hub."""
        message = f"{name}={self.value(name)}".encode()
        return "fingerprint " + hmac.new(self.space_key.encode(), message, hashlib.sha256).hexdigest()[:32]

    def all(self) -> tuple[str, str]:
        """What must not be seen anywhere."""
        return self.space_key, self.space_token


def key_file(owner: str) -> Path:
    """Where the SPACE_KEY of this owner's Spaces is kept, for trainers to read as shell."""
    return NOTES / owner / "env"


def read_key(owner: str) -> str | None:
    """The owner's SPACE_KEY, or None if there is none here."""
    file = key_file(owner)
    if not file.exists():
        return None
    file.chmod(0o600)
    lines = [line for line in file.read_text().splitlines() if line.startswith("SPACE_KEY=")]
    key = lines[0].removeprefix("SPACE_KEY=").strip() if lines else ""
    if len(key) < 32:
        raise DeployError(f"{file} holds no SPACE_KEY of at least 32 characters; delete it to get a new key")
    return key


def make_key(owner: str) -> str:
    """A new SPACE_KEY, written where only this user can read it."""
    file, key = key_file(owner), secrets.token_urlsafe(32)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(f"SPACE_KEY={key}\n")
    return key
