"""Signed versions: write access to the bucket is not enough to make a reader accept a version.

Each record (manifest, HEAD or trainer state) has a seal: a hash of the record's kind, the run and all other
fields, including the sha256 of each file. The publisher signs the seal with its secret Ed25519 key. Readers
with the public key refuse every record without this signature. The keys are environment variables:

    DELTA_WEIGHT_SYNC_SIGNING_KEY=ed25519_secret_<64 hex digits>     only for the trainer
    DELTA_WEIGHT_SYNC_PUBLIC_KEY=ed25519_public_<64 hex digits>      for readers; separate several by commas

A process without the signing key signs nothing. A process with only the signing key trusts its public half.
A process without any key checks no signature, and does not need `cryptography`.
"""

import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from delta_weight_sync.errors import KeyFormatError, SignatureError
from delta_weight_sync.records import FORMAT, Sealed

SIGNING_KEY: Final = "DELTA_WEIGHT_SYNC_SIGNING_KEY"
PUBLIC_KEY: Final = "DELTA_WEIGHT_SYNC_PUBLIC_KEY"
SECRET = "ed25519_secret_"
_PUBLIC = "ed25519_public_"
Kind = TypeVar("Kind", bound=Sealed)


class SigningKey:
    """The publisher's secret key: `ed25519_secret_` and 64 hex digits. Other text raises `KeyFormatError`."""

    def __init__(self, text: str) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(_parsed(text, SECRET, SIGNING_KEY))

    @property
    def public(self) -> str:
        """The public key, for readers."""
        return _PUBLIC + self._key.public_key().public_bytes_raw().hex()

    def sign(self, record: Kind) -> Kind:
        """A copy of the record with its signature. Signatures are deterministic."""
        return record.model_copy(update={"signature": self._key.sign(_message(record)).hex()})


class PublicKeys:
    """The keys that a reader trusts. A reader without keys accepts every record with a valid seal.

    `text` holds the keys, each `ed25519_public_` and 64 hex digits, separated by commas. Any
    other text raises `KeyFormatError`; "" means that signatures are not checked.
    """

    def __init__(self, text: str = "") -> None:
        words = [word.strip() for word in text.split(",") if word.strip()]
        # The text "," comes from "$A,$B" with both unset. It is an error; it does not mean "no keys".
        words = words or [text] * bool(text)
        self._keys = {word: _parsed(word, _PUBLIC, PUBLIC_KEY) for word in words}

    @classmethod
    def load(cls, given: str | Path | None = None) -> "PublicKeys":
        """The keys to trust, from `given` (a text, or a file of `keygen`); by default the environment's."""
        return keys_in(os.environ)[1] if given is None else cls(_word(given, PUBLIC_KEY, _PUBLIC))

    def __contains__(self, public: str) -> bool:
        return public in self._keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __str__(self) -> str:
        return " or ".join(map(fingerprint, self._keys))

    def signer(self, record: Sealed, key: str) -> str | None:
        """The fingerprint of the key that signed `record`. If no key is trusted at all, returns None.

        Raises `SignatureError` if no trusted key signed `record`. `key` is the record's key in the bucket.
        """
        if not self:
            return None
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        for word, public in self._keys.items():
            with suppress(InvalidSignature, ValueError):  # ValueError: the signature is not hex digits
                signature = bytes.fromhex(record.signature)
                Ed25519PublicKey.from_public_bytes(public).verify(signature, _message(record))
                return fingerprint(word)
        what = f"was not signed by {self}" if record.signature else f"has no signature; {self} must sign it"
        raise SignatureError(
            f"{key} {what}; it was not applied: give the trainer the matching {SIGNING_KEY}, or this reader"
            f" the trainer's public key as {PUBLIC_KEY}, or start another run"
        )


def keys_in(environ: Mapping[str, str]) -> tuple[SigningKey | None, PublicKeys]:
    """The key to sign with, if any, and the keys to trust, which include the signing key's public half.

    Raises `KeyFormatError` if a key is invalid, if the variable for public keys is set but empty, or if the
    public half is not among the trusted keys.
    """
    if environ.get(PUBLIC_KEY) == "":  # as `$NEW` gives where NEW is not set
        raise KeyFormatError(f"{PUBLIC_KEY} is empty: name a key, or unset it to check no signatures")
    text = environ.get(SIGNING_KEY, "")
    signing = SigningKey(text) if text else None
    trusted = PublicKeys(environ.get(PUBLIC_KEY, "") or (signing.public if signing else ""))
    if signing and signing.public not in trusted:
        fix = f"add {signing.public} to {PUBLIC_KEY}, or use the matching key as {SIGNING_KEY}"
        signer = fingerprint(signing.public)
        raise KeyFormatError(f"readers that trust {trusted} would refuse what {signer} signs: {fix}")
    return signing, trusted


def writer_keys(signing_key: str | Path | None = None) -> tuple[SigningKey | None, PublicKeys]:
    """Like `keys_in(os.environ)`, with `signing_key` (a key, or a file of `keygen`) as the signing key.

    Raises:
        KeyFormatError: As for `keys_in`; or there is a public key but no signing key, so readers would refuse
            all versions.
    """
    environ = dict(os.environ)
    if signing_key is not None:
        environ[SIGNING_KEY] = _word(signing_key, SIGNING_KEY, SECRET)
    signing, trusted = keys_in(environ)
    if trusted and not signing:
        fix = f"set {SIGNING_KEY}, or unset {PUBLIC_KEY}"
        raise KeyFormatError(f"readers that trust {trusted} would refuse versions without a signature: {fix}")
    return signing, trusted


def fingerprint(public: str) -> str:
    """The short name of a public key: its first 16 hex digits."""
    return public.removeprefix(_PUBLIC)[:16]


def make_keys(file: Path) -> str:
    """Write a new pair of keys to `file` as the two variables; returns the public key.

    Raises `KeyFormatError` if the file exists, and `OSError` if it cannot be written.
    """
    pair = new_pair()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        file.touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        raise KeyFormatError(f"{file} exists, and overwriting loses its key: name another file") from None
    file.write_text("".join(f"{name}={word}\n" for name, word in pair.items()))
    return pair[PUBLIC_KEY]


def new_pair() -> dict[str, str]:
    """A new pair of keys as the trainer's two variables. Readers get only the second."""
    secret = SECRET + secrets.token_hex(32)
    return {SIGNING_KEY: secret, PUBLIC_KEY: SigningKey(secret).public}


def _message(record: Sealed) -> bytes:
    """The bytes to sign: the seal, after a prefix that no other use of the key has."""
    return f"{FORMAT} {record.seal}".encode()


def _word(given: str | Path, variable: str, kind: str) -> str:
    """The text of a key; `given` is that text, or a file that `make_keys` wrote."""
    if isinstance(given, str) and given.strip().startswith(kind):
        return given
    try:
        lines = Path(given).read_text("utf-8-sig").splitlines()  # Windows may add a byte order mark
        return next(line.partition("=")[2] for line in lines if line.startswith(f"{variable}="))
    except (OSError, ValueError, StopIteration):  # do not quote what was given: it may be a secret
        key = f"a key, which begins with {kind}"
        file = "a file that `delta-weight-sync keygen FILE` wrote"
        raise KeyFormatError(f"the given {variable} is neither {key}, nor {file}") from None


def _parsed(text: str, kind: str, variable: str) -> bytes:
    """The 32 bytes of a key. The error does not quote the text, which may be a secret."""
    if not (found := re.fullmatch(f"{kind}([0-9a-f]{{64}})", text.strip())):
        rest = "64 hex digits, as `delta-weight-sync keygen FILE` writes"
        raise KeyFormatError(f"{variable} is not a key: write {kind} and {rest}")
    return bytes.fromhex(found[1])
