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
from typing import NamedTuple

from delta_weight_sync import signing
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


def signing_file(owner: str, name: str) -> Path:
    """Where the keys that sign this deployment's versions are kept, for its trainer to read as shell.

    Each deployment has its own, or runs of one bucket could be served in place of another's.
    """
    return NOTES / owner / f"{name}.env"


class SigningKeys(NamedTuple):
    """The public halves of a deployment's keys."""

    signs: str  # of the one that its trainer signs with
    believed: str  # by its replicas: that one, and others while the owner changes keys; parted by commas


def signing_keys(owner: str, name: str) -> SigningKeys | None:
    """What this deployment's file says, or None if there is none here."""
    file = signing_file(owner, name)
    if not file.exists():
        return None
    file.chmod(0o600)
    pairs = [line.strip().partition("=") for line in file.read_text().splitlines()]
    lines = {variable: value for variable, _, value in pairs}
    try:
        signs, _ = signing.keys_of(lines)
    except signing.KeyTextError as error:
        raise DeployError(f"{file}: {error}") from None
    if signs is None or not lines.get(signing.PUBLIC_KEY):
        raise DeployError(
            f"{file} lacks {signing.SIGNING_KEY} or {signing.PUBLIC_KEY}; delete it to get new keys"
        )
    return SigningKeys(signs.public, lines[signing.PUBLIC_KEY])
