"""The replica's settings are parsed once; what is missing or unknown is named with its variable."""

import pytest

from inference_space.settings import SettingsError, settings_from
from inference_space.vllm_server import _environment

GOOD = {"REPLICA_BUCKET": "file:///b", "REPLICA_RUN": "demo"}


def test_variables_become_typed_settings():
    settings = settings_from({**GOOD, "REPLICA_POLL_S": "0.5", "REPLICA_PORT": "80", "HOME": "/home/user"})
    assert (settings.bucket, settings.run, settings.poll_s, settings.port) == ("file:///b", "demo", 0.5, 80)


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"REPLICA_BUCKET": "file:///b"}, "REPLICA_RUN: not set"),
        ({**GOOD, "REPLICA_PORT": "many"}, "REPLICA_PORT: input should be a valid integer"),
        ({**GOOD, "REPLICA_BUKCET": "x"}, "REPLICA_BUKCET: there is no such variable"),
    ],
)
def test_a_wrong_variable_is_named(variables, complaint):
    with pytest.raises(SettingsError, match=complaint):
        settings_from(variables)


def test_vllm_never_sees_a_secret(monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_API_KEY", "DB_PASSWORD"):
        monkeypatch.setenv(name, "do-not-leak")
    assert "do-not-leak" not in _environment().values()
    assert _environment()["VLLM_SERVER_DEV_MODE"] == "1"
