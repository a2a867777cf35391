"""The replica's settings are parsed once; what is missing or unknown is named with its variable."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import inference_space
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, new_pair
from delta_weight_sync.vllm.settings import PREFIX
from delta_weight_sync.vllm.settings import Settings as Follows
from delta_weight_sync.vllm.settings import settings_from as follows_from
from inference_space.settings import SettingsError, settings_from

PAIR = new_pair()
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


def test_vllms_engine_never_sees_a_secret():
    secrets = dict.fromkeys(("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_API_KEY", "DB_PASSWORD"), "do-not-leak")
    environment = {**os.environ, **secrets, "ENGINE_PYTHON": sys.executable, "PLAIN": "a value\nof two lines"}
    script = Path(inference_space.__file__).with_name("engine_python.sh")
    command = ["sh", script, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    seen = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    assert "do-not-leak" not in seen.values()
    assert (seen["PLAIN"], seen["HF_HUB_OFFLINE"]) == (environment["PLAIN"], "1")


def test_a_vllm_that_follows_is_given_the_public_half_of_a_key_and_no_other():
    run = {f"{PREFIX}RUN": "file:///b#a"}
    settings = follows_from(Follows, PREFIX, run | {PUBLIC_KEY: PAIR[PUBLIC_KEY]})
    assert settings.public_key == PAIR[PUBLIC_KEY]
    for name, said in ((SIGNING_KEY, "the trainer's alone: unset it here"), (PUBLIC_KEY, "is no key")):
        with pytest.raises(SettingsError, match=said) as refusal:
            follows_from(Follows, PREFIX, run | {name: PAIR[SIGNING_KEY]})
        assert PAIR[SIGNING_KEY][15:] not in str(refusal.value)
