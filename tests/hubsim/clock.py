"""The simulated Hub's clock. A test may set it wrong; all that the Hub writes and says follows it."""

from datetime import UTC, datetime, timedelta


class Clock:
    """UTC, `skew` seconds off this machine's time."""

    def __init__(self) -> None:
        self.skew = 0.0

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.skew)


CLOCK = Clock()  # one Hub per process


def now() -> str:
    """The time as the Hub writes it in JSON."""
    return iso(CLOCK.now())


def iso(moment: datetime) -> str:
    """A time in UTC as the Hub writes it in JSON."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def http_date() -> str:
    """The time as a Date header."""
    return CLOCK.now().strftime("%a, %d %b %Y %H:%M:%S GMT")
