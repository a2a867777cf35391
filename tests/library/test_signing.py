"""Keys and signatures: what is signed is believed by whoever holds the public half, and nothing else is."""

import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import ValidationError

from delta_weight_sync.errors import KeyFormatError, SignatureError
from delta_weight_sync.reader import open_run
from delta_weight_sync.records import Head, Sealed
from delta_weight_sync.signing import (
    PUBLIC_KEY,
    SIGNING_KEY,
    PublicKeys,
    SigningKey,
    fingerprint,
    keys_in,
    new_pair,
    writer_keys,
)
from tests.cli.command import command
from tests.support.real_run import Drifting

PAIR = new_pair()
OTHER = new_pair()
SIGNING = SigningKey(PAIR[SIGNING_KEY])
PUBLIC = PAIR[PUBLIC_KEY]
HEAD = Head(run="a", born=1.5, version=None, manifest=None, writer_term=1, writer="0" * 32)


class Other(Sealed):
    """A record of another kind with nothing in it."""


def test_what_is_signed_is_believed_and_names_its_key():
    signed = SIGNING.sign(HEAD)
    read = Head.model_validate_json(signed.to_bytes())
    for trusted in (PUBLIC, f"{OTHER[PUBLIC_KEY]}, {PUBLIC}"):
        assert PublicKeys(trusted).signer(read, "k") == PUBLIC.partition("_public_")[2][:16]
    assert SIGNING.sign(HEAD) == signed, "the same each time: a manifest is never written in two ways"
    assert PublicKeys("").signer(HEAD, "k") is None, "without a key nothing is checked"


FORGERIES: dict[str, Callable[[Head], Sealed]] = {
    "unsigned": lambda head: head.model_copy(update={"signature": ""}),
    "of another key": SigningKey(OTHER[SIGNING_KEY]).sign,
    "no hex": lambda head: head.model_copy(update={"signature": "signed by me"}),
    "truncated": lambda head: head.model_copy(update={"signature": head.signature[:-2]}),
    "of another run": lambda head: Head(**head.model_dump(exclude={"seal", "run"}), run="b"),
    "of another version": lambda head: Head(**head.model_dump(exclude={"seal", "born"}), born=2.5),
    "of another kind": lambda head: Other(run="a", signature=head.signature),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_forgery_is_refused_by_name(forge):
    with pytest.raises(SignatureError, match=r"runs/a/heads/x\.json .*it was not applied") as refusal:
        PublicKeys(PUBLIC).signer(forge(SIGNING.sign(HEAD)), "runs/a/heads/x.json")
    assert fingerprint(PUBLIC) in str(refusal.value)


@pytest.mark.finding("N11")
@pytest.mark.parametrize("respell", [str.upper, " {}".format, lambda text: text[:2] + " " + text[2:]])
def test_a_signature_has_one_spelling(respell: Callable[[str], str]):
    signed = SIGNING.sign(HEAD)
    forged = signed.to_bytes().replace(signed.signature.encode(), respell(signed.signature).encode())
    with pytest.raises(ValidationError, match="signature"):
        Head.model_validate_json(forged)


@pytest.mark.finding("N6")
@pytest.mark.parametrize("text", [",", " ", ", ,"])
def test_a_variable_without_a_key_in_it_does_not_turn_checking_off(text: str, monkeypatch):
    monkeypatch.setenv(PUBLIC_KEY, text)
    with pytest.raises(KeyFormatError, match=f"{PUBLIC_KEY} is not a key"):
        PublicKeys.load()


@pytest.mark.parametrize(
    "text",
    ["", "mine!", PUBLIC, PAIR[SIGNING_KEY][:-1], PAIR[SIGNING_KEY] + "0", "ü" * 64],
    ids=["empty", "word", "public", "short", "long", "letters"],  # keys are drawn anew in each process
)
def test_what_is_no_secret_key_is_said_and_not_told(text: str):
    with pytest.raises(KeyFormatError, match=SIGNING_KEY) as refusal:
        SigningKey(text)
    assert text == "" or text not in str(refusal.value)


def test_no_message_and_no_object_shows_a_secret():
    """Also not one that is given where a public key belongs."""
    with pytest.raises(KeyFormatError, match=PUBLIC_KEY) as refusal:
        PublicKeys(PAIR[SIGNING_KEY])
    digits = PAIR[SIGNING_KEY].removeprefix("ed25519_secret_")
    assert digits not in f"{refusal.value} {SIGNING!r} {SIGNING} {vars(SIGNING)}"


def test_the_environment_of_a_trainer_names_both_halves_or_none(monkeypatch):
    assert keys_in({})[0] is None
    assert PUBLIC in keys_in({SIGNING_KEY: PAIR[SIGNING_KEY]})[1]
    with pytest.raises(KeyFormatError, match=f"add {PUBLIC} to {PUBLIC_KEY}"):
        keys_in(PAIR | {PUBLIC_KEY: OTHER[PUBLIC_KEY]})
    monkeypatch.setenv(PUBLIC_KEY, PUBLIC)
    with pytest.raises(KeyFormatError, match=f"set {SIGNING_KEY}, or unset {PUBLIC_KEY}"):
        writer_keys()
    monkeypatch.setenv(SIGNING_KEY, PAIR[SIGNING_KEY])
    assert writer_keys()[0] is not None


def test_every_command_that_reads_a_run_asks_for_the_key_of_its_environment(tmp_path: Path, monkeypatch):
    url = (tmp_path / "bucket").as_uri()
    for name, word in PAIR.items():
        monkeypatch.setenv(name, word)
    with closing(Drifting(tmp_path / "bucket")) as run:
        run.step()
    monkeypatch.delenv(SIGNING_KEY)
    assert command("verify", url).code == 0
    monkeypatch.setenv(PUBLIC_KEY, OTHER[PUBLIC_KEY])
    for words in (["verify", url], ["log", url], ["checkout", url, "--out", tmp_path / "out"]):
        refused = command(*words)
        assert (refused.code, len(refused.complaint.splitlines())) == (1, 1)
        assert f"was not signed by {fingerprint(OTHER[PUBLIC_KEY])}" in refused.complaint
    with pytest.raises(SignatureError):
        open_run(url).manifest()
    assert open_run(url, public_key=PUBLIC).manifest().version == 1, "as an argument"


def test_keygen_writes_a_pair_once_and_says_the_public_half(tmp_path: Path):
    file = tmp_path / "keys" / "run.env"
    said = command("keygen", str(file))
    lines = dict(line.split("=") for line in file.read_text().splitlines())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert said.output.strip() == f"{PUBLIC_KEY}={lines[PUBLIC_KEY]}"
    assert SigningKey(lines[SIGNING_KEY]).public == lines[PUBLIC_KEY]
    again = command("keygen", str(file))
    assert (again.code, len(again.complaint.splitlines())) == (1, 1)
    assert "name another file" in again.complaint


@pytest.mark.finding("M14")
def test_an_empty_variable_for_public_keys_does_not_switch_checks_off(monkeypatch):
    monkeypatch.setenv(PUBLIC_KEY, "")
    with pytest.raises(KeyFormatError, match=f"{PUBLIC_KEY} is empty: name a key, or unset it"):
        PublicKeys.load()
