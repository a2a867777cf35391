"""The local files with a deployment's keys: the SPACE_KEY of the owner's Spaces, and the signing keys."""

import secrets
import shlex
from pathlib import Path

from delta_weight_sync import signing
from delta_weight_sync.errors import KeyFormatError
from trainer.deploy import DeployError

FOLDER = Path(".deploy")  # in the folder where the command runs


def space_key_file(owner: str) -> Path:
    """The shell file that holds the SPACE_KEY of all Spaces of this owner."""
    return FOLDER / owner / "env"


def read_space_key(owner: str) -> str | None:
    """The owner's SPACE_KEY, or None if this machine has no file with it."""
    if not (file := space_key_file(owner)).exists():
        return None
    if len(key := _variables(file).get("SPACE_KEY", "")) < 32:
        raise DeployError(f"{file} has no SPACE_KEY of 32 or more characters: delete it to get a new key")
    return key


def ensure_space_key(owner: str) -> str:
    """Return the owner's SPACE_KEY; if it is missing, make it, in a file that only this user can read."""
    if known := read_space_key(owner):
        return known
    file = space_key_file(owner)
    key = secrets.token_urlsafe(32)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file.touch(mode=0o600, exist_ok=False)
    file.write_text(f"SPACE_KEY={key}\n")
    print(f"made a new SPACE_KEY in {file}; `up` sets it on the Spaces in place of any other key")
    return key


def signing_file(owner: str, name: str) -> Path:
    """The shell file that holds the signing keys of this deployment. Each deployment has its own
    keys: otherwise its replicas would also serve a run that was copied from another deployment's bucket."""
    return FOLDER / owner / f"{name}.env"


def read_signing_keys(owner: str, name: str) -> tuple[str, str] | None:
    """The public half of the key with which the trainer signs, and the public keys that replicas trust
    (several while keys are changed). None if this machine has no file with this deployment's keys."""
    if not (file := signing_file(owner, name)).exists():
        return None
    lines = _variables(file)
    try:
        signs, _ = signing.keys_in(lines)
    except KeyFormatError as error:
        raise DeployError(f"{file}: {error}") from None
    if signs is None or not (trusted := lines.get(signing.PUBLIC_KEY)):
        lacks = f"{file} lacks {signing.SIGNING_KEY} or {signing.PUBLIC_KEY}"
        raise DeployError(f"{lacks}: delete the file to get new keys")
    return signs.public, trusted


def signing_key(owner: str, name: str) -> dict[str, str]:
    """The trainer's variable with the key that signs; empty if this machine has no such key."""
    file = signing_file(owner, name)
    found = _variables(file) if file.exists() else {}
    return {signing.SIGNING_KEY: found[signing.SIGNING_KEY]} if found.get(signing.SIGNING_KEY) else {}


def _variables(file: Path) -> dict[str, str]:
    """Read the variables that a shell file sets, and make the file readable only for this user."""
    file.chmod(0o600)
    try:
        words = shlex.split(file.read_text(), comments=True)  # takes quotes away, as a shell does
    except ValueError as error:
        fix = "correct it, or delete it to get new keys"
        raise DeployError(f"{file} is not a shell file ({error}): {fix}") from None
    pairs = [word.partition("=") for word in words]
    return {variable: value for variable, _, value in pairs}
