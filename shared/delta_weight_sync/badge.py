"""A badge of a run, as SVG for model cards: its name, a version, and whether that version was verified."""

from html import escape
from typing import Final, Literal

from delta_weight_sync.errors import printable

Verdict = Literal["good", "bad", "unknown"]
VERIFIED: Final = "verified"
NOT_VERIFIED: Final = "not verified"
_COLOURS: Final[dict[Verdict, str]] = {"good": "#1d7a46", "bad": "#b3261e", "unknown": "#5f6570"}
_LONGEST: Final = 128  # characters of each half
# Widths of letters, in pixels; `textLength` fits the text of any font into their sum.
_NARROW: Final = " ·.,:;'|!()[]-/fijlrtI1"
_WIDE: Final = "mwMW@%<>&+=#"
_PAD: Final = 7


def draw(name: str, text: str, verdict: Verdict) -> str:
    """The badge, with `name` on the left and `text` on the right. Both may come from outside: they are
    escaped, and cut to 128 characters."""
    left = _half(name)
    right = _half(text)
    widths = [sum(map(_width, half)) for half in (left, right)]
    first = widths[0] + 2 * _PAD
    full = first + widths[1] + 2 * _PAD
    texts = "".join(
        f'<text x="{x}" y="14" textLength="{width}">{escape(half)}</text>'
        for x, width, half in ((_PAD, widths[0], left), (first + _PAD, widths[1], right))
    )
    label = escape(f"{left}: {right}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{full}" height="20" role="img" aria-label="{label}">'
        f'<title>{label}</title><rect width="{full}" height="20" rx="3" fill="{_COLOURS[verdict]}"/>'
        f'<path d="M3 0H{first}V20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#24292f"/>'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{texts}</g></svg>\n'
    )


def of_version(run: str, version: int, verdict: Verdict, *, signed: bool = False) -> str:
    """The badge of a version. `good`: its weights were rebuilt or served, and have the published digest."""
    texts = {"good": VERIFIED, "bad": "digest differs", "unknown": NOT_VERIFIED}
    return draw(run, f"v{version} · {texts[verdict]}{' · signed' * signed}", verdict)


def _width(letter: str) -> int:
    return 4 if letter in _NARROW else 10 if letter in _WIDE else 7


def _half(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
