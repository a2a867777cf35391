"""The settings of a vLLM that follows a run: the public half of the signing key and no other."""

import pytest

from delta_weight_sync.errors import SettingsError
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, new_pair
from delta_weight_sync.vllm.server import PREFIX, settings_from

PAIR = new_pair()


def test_a_vllm_that_follows_is_given_the_public_half_of_a_key_and_no_other():
    run = {f"{PREFIX}RUN": "file:///b#a"}
    settings = settings_from(run | {PUBLIC_KEY: PAIR[PUBLIC_KEY]})
    assert settings.public_key == PAIR[PUBLIC_KEY]
    for name, said in ((SIGNING_KEY, "the trainer's alone: unset it here"), (PUBLIC_KEY, "is not a key")):
        with pytest.raises(SettingsError, match=said) as refusal:
            settings_from(run | {name: PAIR[SIGNING_KEY]})
        assert PAIR[SIGNING_KEY][15:] not in str(refusal.value)
