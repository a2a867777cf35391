"""A Space's settings, and the page that it shows until they are complete and valid.

A duplicated Space has the variables of the original but no secrets. Its new owner first sees the setup page,
which names each variable and secret, its purpose, and where to set it.
"""

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from space_guard.guard import FRAMING

Problems = Mapping[str, str]  # variable or secret -> what is wrong with it

_WHERE = "Settings → Variables and secrets"
_PAGE = Template(Path(__file__).with_name("setup.html").read_text())
_POLICY = {"content-security-policy": f"default-src 'none'; style-src 'unsafe-inline'; {FRAMING}"}
MIN_KEY_LENGTH = 16


class SettingsError(ValueError):
    """Settings are missing or wrong; `problems` says what is wrong with each variable."""

    def __init__(self, problems: Problems) -> None:
        super().__init__(f"correct these variables: {listed(problems)}")
        self.problems = dict(problems)


def listed(problems: Problems) -> str:
    return "; ".join(f"{name}: {what}" for name, what in problems.items())


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
        try:
            settings = cls.model_validate({name.lower(): value for name, value in own.items()})
            problems |= settings.problems(environ)
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

    def problems(self, environ: Mapping[str, str]) -> Problems:
        """Problems that the fields' types do not show, and problems of variables without `PREFIX`."""
        return {}

    @classmethod
    def listen_address(cls, environ: Mapping[str, str]) -> tuple[str, int]:
        """The host and port for the setup page, even if other settings are wrong."""
        host = environ.get(f"{cls.PREFIX}HOST", cls.model_fields["host"].default)
        port = environ.get(f"{cls.PREFIX}PORT", "")
        return host, int(port) if port.isdecimal() else cls.model_fields["port"].default


class Setup:
    """How one Space explains its setup."""

    def __init__(self, space: str, then: str, needs: Path) -> None:
        """`space`: the kind of Space, for the title. `then`: the page that the Space shows after the setup.
        `needs`: a TOML file with a table for each variable and secret: its `kind`, `purpose` and `example`.
        """
        self.space, self.then, self.needs = space, then, tomllib.loads(needs.read_text())

    def sentence(self, problems: Problems) -> str:
        return f"This Space is not set up. Open its {_WHERE}: {listed(problems)}."

    def app(self, problems: Problems) -> ASGIApp:
        """The app of a Space that is not set up: the page at /, its state at /health, and 503 elsewhere."""
        state = "not set up"
        sentence = self.sentence(problems)
        # Trainers read a replica's `state` and an environment's `status`; clients of a replica read `error`,
        # and clients of an environment read `detail`.
        body = {"status": state, "state": state, "detail": sentence, "error": sentence}

        async def answer(request: Request, _: Exception) -> Response:
            return JSONResponse(body, 200 if request.url.path == "/health" else 503)

        return self.show_page(Starlette(exception_handlers={404: answer}), lambda: problems)

    def show_page(self, app: ASGIApp, problems: Callable[[], Problems]) -> ASGIApp:
        """ASGI middleware: shows the setup page at / while there are problems."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] == "/" and (found := problems()):
                return await HTMLResponse(self.page(found), headers=_POLICY)(scope, receive, send)
            return await app(scope, receive, send)

        return answer

    def page(self, problems: Problems) -> str:
        """The setup page. The page reloads itself, so the Space's own page appears after the setup."""
        items = ""
        for name in {**self.needs, **problems}:
            problem = problems.get(name, "")
            need = self.needs.get(name, {})
            items += f'<li class="{"missing" if problem else "fine"}">'
            items += f"<h2><code>{escape(name)}</code> <small>{need.get('kind', 'variable')}</small></h2>"
            items += f'<p class="problem">{escape(problem)}</p>' if problem else ""
            items += f"<p>{escape(need['purpose'])}</p>" if need else ""
            items += f"<pre>{escape(need['example'])}</pre></li>" if problem and need else "</li>"
        space_id = escape(os.environ.get("SPACE_ID", ""))
        return _PAGE.substitute(space=self.space, then=self.then, where=_WHERE, id=space_id, items=items)
