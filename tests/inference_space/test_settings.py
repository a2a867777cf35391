"""The replica's settings are parsed once; what is missing or unknown is named with its variable."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import inference_space
from inference_space.settings import Settings
from space_guard.setup import SettingsError

GOOD = {"REPLICA_BUCKET": "file:///b", "REPLICA_RUN": "demo"}


def test_variables_become_typed_settings():
    settings = Settings.read({**GOOD, "REPLICA_POLL_S": "0.5", "REPLICA_PORT": "80", "HOME": "/home/user"})
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
        Settings.read(variables)


def test_vllms_engine_never_sees_a_secret():
    secrets = dict.fromkeys(("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_API_KEY", "DB_PASSWORD"), "do-not-leak")
    environment = {**os.environ, **secrets, "ENGINE_PYTHON": sys.executable, "PLAIN": "a value\nof two lines"}
    script = Path(inference_space.__file__).with_name("engine_python.sh")
    command = ["sh", script, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    seen = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    assert "do-not-leak" not in seen.values()
    assert (seen["PLAIN"], seen["HF_HUB_OFFLINE"]) == (environment["PLAIN"], "1")
