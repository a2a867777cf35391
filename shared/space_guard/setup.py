"""A Space's settings, and the page that it shows until they are complete and valid.

A duplicated Space has the variables of the original but no secrets. Its new owner first sees the setup page,
which names everything that is missing, wrong, or still the original owner's, and what to press.
"""

import asyncio
import base64
import hashlib
import logging
import os
import re
import time
import tomllib
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Annotated, ClassVar, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from space_guard.guard import FRAMING

Problems = Mapping[str, str]  # variable or secret -> what is wrong with it


class Found(NamedTuple):
    """What a look at the outside, such as at a bucket, has found: problems, and notes on what the owner
    should check, although the Space can start with it."""

    problems: Problems = MappingProxyType({})
    notes: Problems = MappingProxyType({})


_WHERE = "Settings → Variables and secrets"
_HTML = Path(__file__).with_name("setup.html").read_text()
_PAGE = Template(_HTML)
_SCRIPT = base64.b64encode(hashlib.sha256(_HTML.split("<script>")[1].split("</script>")[0].encode()).digest())
_POLICY = {
    "content-security-policy": f"default-src 'none'; style-src 'unsafe-inline'; connect-src 'self';"
    f" script-src 'sha256-{_SCRIPT.decode()}'; {FRAMING}",
    "cache-control": "no-store",
}
MIN_KEY_LENGTH = 16
HARDWARE = "hardware"  # stands among the problems for the machine of the Space
LOOK_EVERY_S = 10.0  # seconds for which a look at the outside is reused
_LOOK_S = 4.0  # seconds that the page waits for such a look; later, the page is shown without
_LONGEST = 200  # characters of a value on the page
# What a variable may hold by mistake. Its value is never shown.
_SECRET = re.compile(r"hf_\w{8}|secret|AKIA\w{12}|-----BEGIN|://[^/]*@|key=|token", re.IGNORECASE)
_log = logging.getLogger(__name__)


class SettingsError(ValueError):
    """Settings are missing or wrong; `problems` says what is wrong with each variable."""

    def __init__(self, problems: Problems) -> None:
        super().__init__(f"correct these variables: {listed(problems)}")
        self.problems = dict(problems)


def listed(problems: Problems) -> str:
    return _masked("; ".join(f"{name}: {what}" for name, what in problems.items()))


def _masked(text: str) -> str:
    """`text` without tokens and signing keys, because a sentence may quote the value of a variable."""
    return re.sub(r"(hf|ed25519_secret)_\w{8,}", r"\1_***", text)


def _header_text(text: str) -> str:
    if not re.fullmatch("[!-~]*", text):
        raise ValueError("cannot be sent in a header; use printable ASCII without spaces")
    return text


HeaderText = Annotated[str, AfterValidator(_header_text)]


class SpaceSettings(BaseModel):
    """The settings of a Space: each field is the environment variable `PREFIX` + the field's name.

    If a Space on the Hub has the setting KEY, its value must be too long to be guessed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    PREFIX: ClassVar[str]

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self:
        """The settings in `environ`. Raises `SettingsError`."""
        prefix = cls.PREFIX
        problems = dict[str, str]()
        own = {name.removeprefix(prefix): value for name, value in environ.items() if name.startswith(prefix)}
        if not (key := own.get("KEY", "")):
            problems |= cls.problems_without_key(environ)
        elif "SPACE_ID" in environ and len(key) < MIN_KEY_LENGTH:
            problems[f"{prefix}KEY"] = f"shorter than {MIN_KEY_LENGTH} characters, so it could be guessed"
        problems |= cls.problems(environ)
        try:
            settings = cls.model_validate({name.lower(): value for name, value in own.items()})
        except ValidationError as error:
            known = ", ".join(prefix + field.upper() for field in cls.model_fields)
            unknown = f"there is no such variable; the variables are {known}"
            words = {"missing": "not set", "extra_forbidden": unknown}
            for found in error.errors():  # the sentences leave out the values, which may be secrets
                said = found["msg"].removeprefix("Value error, ").lower()
                problems[f"{prefix}{found['loc'][0]}".upper()] = words.get(found["type"], said)
        if problems:
            raise SettingsError(problems)
        return settings

    @classmethod
    def problems_without_key(cls, environ: Mapping[str, str]) -> Problems:
        """Why the setting KEY may not be missing; empty if it may."""
        return {f"{cls.PREFIX}KEY": "not set"}

    @classmethod
    def problems(cls, environ: Mapping[str, str]) -> Problems:
        """Problems that the fields' types do not show, and problems of variables without `PREFIX`."""
        return {}

    @classmethod
    def notes(cls, environ: Mapping[str, str]) -> Problems:
        """What the owner of a Space should check, because a duplicate has it from the original."""
        return {}

    @classmethod
    def is_secret(cls, name: str) -> bool:
        """Whether the value of the variable `name` may not be shown. True for unknown variables."""
        field = cls.model_fields.get(name.removeprefix(cls.PREFIX).lower())
        return field is None or not field.repr

    @classmethod
    def listen_address(cls, environ: Mapping[str, str]) -> tuple[str, int]:
        """The host and port for the setup page, even if other settings are wrong."""
        host = environ.get(f"{cls.PREFIX}HOST", cls.model_fields["host"].default)
        port = environ.get(f"{cls.PREFIX}PORT", "")
        return host, int(port) if port.isdecimal() else cls.model_fields["port"].default


def space_owner(environ: Mapping[str, str]) -> str:
    """The user or organization that this Space belongs to; empty outside of the Hub."""
    return environ.get("SPACE_ID", "").partition("/")[0]


class Setup:
    """How one Space explains its setup."""

    def __init__(
        self,
        settings: type[SpaceSettings],
        space: str,
        then: str,
        needs: Path,
        usd_per_hour: Mapping[str, float] | None = None,
    ) -> None:
        """`space`: the kind of Space, for the title. `then`: the page that the Space shows after the setup.
        `needs`: a TOML file with a table for each variable and secret: its `kind`, `purpose` and `example`.
        `usd_per_hour`: prices of GPUs, by the Hub's names.
        """
        self.settings = settings
        self.space = space
        self.then = then
        self.needs = tomllib.loads(needs.read_text())
        self._usd_per_hour = usd_per_hour or {}

    def sentence(self, problems: Problems) -> str:
        return f"This Space is not set up. Open its {_WHERE}: {listed(problems)}."

    def app(self, problems: Problems, look: Callable[[], Found] = Found) -> ASGIApp:
        """The app of a Space that is not set up: the page at /, its state at /health, and 503 elsewhere.

        `look` runs in a thread at most every `LOOK_EVERY_S` seconds, while somebody has the page open.
        """
        state = "not set up"
        sentence = self.sentence(problems)
        # Trainers read a replica's `state` and an environment's `status`; clients of a replica read `error`,
        # and clients of an environment read `detail`.
        body = {"status": state, "state": state, "detail": sentence, "error": sentence}

        async def answer(request: Request, _: Exception) -> Response:
            return JSONResponse(body, 200 if request.url.path == "/health" else 503)

        return self.show_page(Starlette(exception_handlers={404: answer}), lambda: problems, look)

    def show_page(
        self, app: ASGIApp, problems: Callable[[], Problems], look: Callable[[], Found] = Found
    ) -> ASGIApp:
        """ASGI middleware: shows the setup page at / while there are problems."""
        outside = _Outside(look)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] == "/" and (found := problems()):
                more = await outside.found()
                page = self.page({**more.problems, **found}, more.notes)
                return await HTMLResponse(page, headers=_POLICY)(scope, receive, send)
            return await app(scope, receive, send)

        return answer

    def page(self, problems: Problems, notes: Problems | None = None) -> str:
        """The setup page: what is wrong first, then what to check, then what is in order.

        The page asks for itself every few seconds, and reloads once its digest has changed. So it stays while
        the Space restarts, and gives way to the Space's own page after the setup.
        """
        notes = {**self.settings.notes(os.environ), **(notes or {})}
        own = [name for name in sorted(os.environ) if name.startswith(self.settings.PREFIX)]
        names = dict.fromkeys([*problems, *self.needs, *notes, *own])
        ranks = {
            name: "missing" if name in problems else "check" if name in notes else "fine" for name in names
        }
        order = ("missing", "check", "fine")
        items = ""
        for name in sorted(names, key=lambda name: order.index(ranks[name])):
            need = self.needs.get(name, {})
            kind = need.get("kind", "" if name == HARDWARE else "variable")
            items += f'<li class="{ranks[name]}">'
            items += f"<h2><code>{escape(name)}</code> <small>{kind}</small></h2>"
            items += f'<p class="problem">{escape(_masked(problems[name]))}</p>' if name in problems else ""
            items += "" if name in problems else self._value(name, kind)
            items += f'<p class="note">{escape(notes[name])}</p>' if name in notes else ""
            items += f"<p>{escape(need['purpose'])}</p>" if need else ""
            wanted = need and not (ranks[name] == "fine" and os.environ.get(name))
            items += (
                f"<small>for example</small><pre>{escape(need['example'])}</pre></li>" if wanted else "</li>"
            )
        return _PAGE.substitute(
            page=hashlib.sha256(items.encode()).hexdigest(),
            space=self.space,
            then=self.then,
            where=_WHERE,
            id=escape(os.environ.get("SPACE_ID", "")),
            cost=escape(self._cost(os.environ.get("ACCELERATOR", ""))),
            items=items,
        )

    def _value(self, name: str, kind: str) -> str:
        """A line with the value, if it may be shown. Called only for values that have no problem."""
        value = os.environ.get(name, "")
        if not value:
            return "<p>not set</p>"
        known = name in self.needs or not self.settings.is_secret(name)
        if kind == "secret" or not known or _SECRET.search(value):
            return "<p>set; the value is not shown</p>"
        return f'<p class="value"><code>{escape(value[:_LONGEST])}</code></p>'

    def _cost(self, accelerator: str) -> str:
        """What this Space costs while it waits; `accelerator` is the Hub's variable ACCELERATOR."""
        usd = self._usd_per_hour.get(accelerator)
        if accelerator in ("", "none"):
            return "While it waits on cpu-basic, it costs nothing."
        price = f"${usd:.2f} per hour" if usd else "what its settings say"
        advice = "Until you have everything, pause it in its settings: a paused Space costs nothing."
        return f"While it waits, it costs {price} ({accelerator}). {advice}"


class _Outside:
    """The newest result of a look at the outside. Looks only when somebody asks, one look after the other."""

    def __init__(self, look: Callable[[], Found]) -> None:
        self._look = look
        self._newest = Found()
        self._since = -LOOK_EVERY_S
        self._running: asyncio.Future[Found] | None = None

    async def found(self) -> Found:
        """The newest result, or an empty one while the first look takes more than `_LOOK_S`."""
        if self._running is None and time.monotonic() - self._since >= LOOK_EVERY_S:
            self._running = asyncio.ensure_future(asyncio.to_thread(self._look))
        if running := self._running:
            await asyncio.wait([running], timeout=_LOOK_S)
            if running.done() and running is self._running:
                self._running = None
                self._since = time.monotonic()
                if error := running.exception():
                    _log.warning("the setup page could not look at the outside: %s", error)
                else:
                    self._newest = running.result()
        return self._newest
