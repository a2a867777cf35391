"""The simulated Hub's clock, and its refusals as huggingface_hub understands them."""

from datetime import UTC, datetime, timedelta


class Clock:
    """UTC, `skew` seconds off this machine's time."""

    def __init__(self) -> None:
        self.skew = 0.0

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.skew)


CLOCK = Clock()  # one Hub per process


def now() -> str:
    return iso(CLOCK.now())


def iso(moment: datetime) -> str:
    """A time in UTC as the Hub writes it in JSON."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def http_date() -> str:
    return CLOCK.now().strftime("%a, %d %b %Y %H:%M:%S GMT")


class HubError(Exception):
    """An answer that is not a success; `code` and `message` go into X-Error-Code and X-Error-Message.

    `url` is the path on the Hub of the existing object that conflicts.
    """

    def __init__(self, status: int, message: str, code: str = "", url: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.url = url


def repo_missing(*, anonymous: bool = False) -> HubError:
    """Also the answer to a caller that may not see a private repository."""
    return HubError(401 if anonymous else 404, "Repository not found", "RepoNotFound")


def entry_missing(message: str = "Entry not found") -> HubError:
    return HubError(404, message, "EntryNotFound")
