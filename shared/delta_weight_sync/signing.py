"""Signed versions: who may write to the bucket, and has not the key, makes no reader take anything over.

The publisher signs the seal of each manifest and HEAD with an Ed25519 key that it alone holds. Readers that
know the key's public half refuse every record without its signature. A seal covers its record's kind, run and
all other fields, and among them the sha256 of every file. Keys are one word of text each:

    DELTA_WEIGHT_SYNC_SIGNING_KEY=ed25519_secret_<64 hex digits>     the trainer's alone
    DELTA_WEIGHT_SYNC_PUBLIC_KEY=ed25519_public_<64 hex digits>      readers'; several are parted by commas

Without the first nothing is signed, without the second no signature is looked at. `cryptography` is imported
where there is a key.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

from delta_weight_sync.protocol import FORMAT, Sealed
from delta_weight_sync.refs import ProtocolError

SIGNING_KEY: Final = "DELTA_WEIGHT_SYNC_SIGNING_KEY"
PUBLIC_KEY: Final = "DELTA_WEIGHT_SYNC_PUBLIC_KEY"
_SECRET, _PUBLIC = "ed25519_secret_", "ed25519_public_"
_BYTES = 32  # of either half
_FINGERPRINT = 16  # hex digits, the first of the public key's
Kind = TypeVar("Kind", bound=Sealed)


class SignatureError(ProtocolError):
    """A record of the bucket is not signed by a key that is believed here; the message names both."""


class KeyTextError(ProtocolError):
    """A key is not one; the message names its variable and holds nothing of a secret."""


class SigningKey:
    """The publisher's half, which signs."""

    def __init__(self, text: str) -> None:
        """`text`: `ed25519_secret_` and 64 hex digits; else `KeyTextError`."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(_parsed(text, _SECRET, SIGNING_KEY))

    @property
    def public(self) -> str:
        """The other half, as readers are given it."""
        return _PUBLIC + self._key.public_key().public_bytes_raw().hex()

    def sign(self, record: Kind) -> Kind:
        """The same record with its signature, which is the same each time."""
        return record.model_copy(update={"signature": self._key.sign(_message(record)).hex()})


class PublicKeys:
    """The keys whose signatures a reader believes. Without any it believes whatever has a fitting seal."""

    def __init__(self, text: str = "") -> None:
        """`text`: words of `ed25519_public_` and 64 hex digits, parted by commas; else `KeyTextError`."""
        self._words = tuple(word.strip() for word in text.split(",") if word.strip())
        self._keys = {word: _parsed(word, _PUBLIC, PUBLIC_KEY) for word in self._words}

    def __contains__(self, public: str) -> bool:
        return public in self._words

    def __bool__(self) -> bool:
        return bool(self._words)

    def __str__(self) -> str:
        return " or ".join(map(fingerprint, self._words))

    def signer(self, record: Sealed, key: str) -> str | None:
        """The fingerprint of the key that signed `record`, which lies at `key`; None where none is asked for.

        Raises `SignatureError` where no key that is believed did.
        """
        if not self._words:
            return None
        for word, public in self._keys.items():
            if _verifies(public, record):
                return fingerprint(word)
        what = f"was not signed by {self}" if record.signature else f"is not signed, by {self} or anybody"
        raise SignatureError(
            f"{key} {what}; it was not applied: give its trainer that key in {SIGNING_KEY}, or this reader"
            f" the trainer's in {PUBLIC_KEY}, or begin another run"
        )


def keys_of(environ: Mapping[str, str]) -> tuple[SigningKey | None, PublicKeys]:
    """What the environment says: the key to sign with, if any, and those to believe, which include it.

    Raises `KeyTextError`.
    """
    text = environ.get(SIGNING_KEY, "")
    signing = SigningKey(text) if text else None
    believed = PublicKeys(environ.get(PUBLIC_KEY, "") or (signing.public if signing else ""))
    if signing and signing.public not in believed:
        raise KeyTextError(
            f"readers that believe {believed} would refuse what {fingerprint(signing.public)} signs: add"
            f" {signing.public} to {PUBLIC_KEY}, or take the key that belongs to it for {SIGNING_KEY}"
        )
    return signing, believed


def believed_here() -> PublicKeys:
    """The keys that this process's environment names; raises `KeyTextError`."""
    return keys_of(os.environ)[1]


def signs_here() -> SigningKey | None:
    """The key that this process's environment has a writer sign with; raises `KeyTextError`."""
    signing, believed = keys_of(os.environ)
    if believed and not signing:
        raise KeyTextError(
            f"readers that believe {believed} would refuse versions without a signature: set {SIGNING_KEY},"
            f" or unset {PUBLIC_KEY}"
        )
    return signing


def fingerprint(public: str) -> str:
    """How a public key is called: its first 16 hex digits."""
    return public.removeprefix(_PUBLIC)[:_FINGERPRINT]


def make_keys(file: Path) -> str:
    """Write a new pair to `file` as the two variables, for its owner's eyes only; returns the public half.

    Raises `KeyTextError` where there is such a file, and `OSError` of the disk.
    """
    pair = new_pair()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise KeyTextError(f"{file} exists, and a lost key cannot be made again: name another file") from None
    with os.fdopen(descriptor, "w") as out:
        out.writelines(f"{name}={word}\n" for name, word in pair.items())
    return pair[PUBLIC_KEY]


def new_pair() -> dict[str, str]:
    """A new key as the two variables of the trainer; readers get the second alone."""
    secret = _SECRET + secrets.token_hex(_BYTES)
    return {SIGNING_KEY: secret, PUBLIC_KEY: SigningKey(secret).public}


def _message(record: Sealed) -> bytes:
    """What is signed: the seal, after words that no other use of the key would sign."""
    return f"{FORMAT} {record.seal}".encode()


def _verifies(public: bytes, record: Sealed) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(bytes.fromhex(record.signature), _message(record))
    except (InvalidSignature, ValueError):  # ValueError: no hex digits
        return False
    return True


def _parsed(text: str, kind: str, variable: str) -> bytes:
    """The 32 bytes of a key; the text may be a secret, also where a public key belongs."""
    digits = text.strip().removeprefix(kind)
    if digits == text.strip() or len(digits) != 2 * _BYTES or not set(digits) <= set("0123456789abcdef"):
        raise KeyTextError(
            f"{variable} is no key: it is {kind} and {2 * _BYTES} hex digits, as `delta-weight-sync keygen"
            " FILE` writes it"
        )
    return bytes.fromhex(digits)
