"""Settings come from WORDLE_ variables, once, and nothing unknown passes."""

import pytest
from pydantic import ValidationError

from env_space.settings import Settings, SettingsError, settings_from


def test_defaults_suit_a_space():
    settings = settings_from({"PATH": "somewhere", "ENV_NAME": "unrelated"})
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)
    assert (settings.answers, settings.max_sessions, settings.session_ttl_s) == (None, 1024, 600)
    assert (settings.length, settings.hard_mode, settings.replica_url) == (5, False, None)


def test_variables_are_parsed():
    settings = settings_from({"WORDLE_ANSWERS": "300", "WORDLE_SESSION_TTL_S": "2.5", "WORDLE_PORT": "8000"})
    assert settings == Settings(answers=300, session_ttl_s=2.5, port=8000)


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Settings().port = 1


def test_an_unknown_variable_is_refused_with_the_known_ones():
    with pytest.raises(SettingsError) as refusal:
        settings_from({"WORDLE_ANSWER": "3"})
    assert str(refusal.value) == (
        "WORDLE_ANSWER is not a setting; the settings are WORDLE_ANSWERS, WORDLE_LENGTH, WORDLE_HARD_MODE, "
        "WORDLE_INVALID_COST, WORDLE_REPEATED_COST, WORDLE_MAX_SESSIONS, WORDLE_SESSION_TTL_S, "
        "WORDLE_REPLICA_URL, WORDLE_REPLICA_PROMPT, WORDLE_REPLICA_KEY, WORDLE_KEY, WORDLE_OPEN, "
        "WORDLE_HOST, WORDLE_PORT."
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WORDLE_ANSWERS", "0"),
        ("WORDLE_ANSWERS", "many"),
        ("WORDLE_MAX_SESSIONS", "0"),
        ("WORDLE_SESSION_TTL_S", "0"),
        ("WORDLE_SESSION_TTL_S", "nan"),
        ("WORDLE_SESSION_TTL_S", "inf"),
        ("WORDLE_LENGTH", "8"),
        ("WORDLE_HARD_MODE", "maybe"),
        ("WORDLE_INVALID_COST", "-0.1"),
        ("WORDLE_INVALID_COST", "nan"),
        ("WORDLE_REPEATED_COST", "2"),
        ("WORDLE_REPLICA_URL", "replica.example"),
        ("WORDLE_HOST", ""),
        ("WORDLE_PORT", "70000"),
    ],
)
def test_an_unusable_value_is_named(variable, value):
    with pytest.raises(SettingsError, match=f"^{variable}={value} cannot be used: "):
        settings_from({variable: value})
