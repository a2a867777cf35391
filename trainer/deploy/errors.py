"""One kind of error, each one sentence with the fix, made of whatever huggingface_hub raises."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,  # of httpx or httpx2, whichever this version uses
    LocalTokenNotFoundError,
)

TOKENS = "https://huggingface.co/settings/tokens"


class DeployError(RuntimeError):
    """Nothing more can be done; the message is a sentence that names the fix, and holds no secret."""


@contextmanager
def explained(what: str, variable: str = "HF_TOKEN") -> Iterator[None]:
    """Turn what the client raises while it does `what` with this token into a `DeployError`."""
    try:
        yield
    except LocalTokenNotFoundError:
        raise DeployError(
            f"there is no token: make one with write access at {TOKENS} and set HF_TOKEN"
        ) from None
    except HfHubHTTPError as error:
        raise DeployError(_refusal(error, what, variable)) from error
    except (HTTPError, ConnectionError, TimeoutError) as error:
        raise DeployError(
            f"{what}: the Hub gave no answer ({type(error).__name__}); check the network and HF_ENDPOINT,"
            " then run the same command again"
        ) from error
    except UnicodeEncodeError:
        sentence = f"{variable} holds a letter that no token has; copy it again from {TOKENS}"
        raise DeployError(sentence) from None
    except ValueError as error:  # what the client itself refuses to send
        raise DeployError(f"{what}: {masked(' '.join(str(error).split()))[:300]}") from error


def _refusal(error: HfHubHTTPError, what: str, variable: str) -> str:
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        return f"{what}: the model is gated; accept its licence on its page, with the account of this token"
    if status == 401:
        return (
            f"{what}: the Hub does not know this token (401); make a new one at {TOKENS} and set {variable}"
        )
    if status == 402:
        return (
            f"{what}: the Hub asks for a paid plan (402); Docker Spaces need PRO, Team or Enterprise, and"
            " GPUs prepaid credits: https://huggingface.co/settings/billing"
        )
    if status == 403:
        return (
            f"{what}: this token may not do that (403); set HF_TOKEN to one with write access to this owner,"
            f" made at {TOKENS}"
        )
    if status == 404:
        return f"{what}: it does not exist, or is hidden from this token; check --owner and HF_TOKEN"
    if status == 429 or status >= 500:
        return f"{what}: the Hub answered {status}; run the same command again in some minutes"
    return f"{what}: the Hub refused it ({status}: {_one_line(error)})"


def _one_line(error: HfHubHTTPError) -> str:
    text = error.server_message or str(error)
    return masked(" ".join(re.sub(r"\?\S+", "", text).split())[:300])


def masked(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without these secrets, and without what looks like a token of the Hub or a signing key."""
    for secret in secrets:
        text = text.replace(secret, "***") if secret else text
    return re.sub(r"(hf|ed25519_secret)_[A-Za-z0-9_]{8,}", r"\1_***", text)
