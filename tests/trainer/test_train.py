"""The trainer's own settings."""

import pytest

from trainer.arguments import ScriptArguments

PLACES = {"model": "m", "bucket": "file:///b", "run": "r", "replicas": ["http://127.0.0.1:1"]}


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"encoding": "zip"}, "--encoding must be one of fast, small, original; it is 'zip'"),
        ({"mirror": "disk"}, "--mirror must be one of host, device; it is 'disk'"),
    ],
)
def test_an_unknown_choice_is_refused_with_those_that_exist(setting, sentence):
    """Also where it comes from a YAML file, whose values argparse does not check."""
    with pytest.raises(SystemExit, match=sentence):
        ScriptArguments(**PLACES, **setting)
