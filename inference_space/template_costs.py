"""What a run's chat template pays with: so many steps, and so much text, in each render."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, MappingView
from typing import Any, Final, NoReturn

import jinja2

STEPS: Final = 5_000_000  # parts of the template that are evaluated: seconds at most
TEXT: Final = 32 << 20  # characters, and members of lists, that are made
_LISTED: Final = (Iterator, MappingView)  # what filters and methods make, and whose size nobody knows


class TemplateRefused(jinja2.TemplateError):
    """The run's chat template does what none needs to; vLLM tells it to whoever asked, as a 400."""


def refuse(why: str) -> NoReturn:
    """Raise `TemplateRefused`."""
    raise TemplateRefused(f"the run's chat template is not rendered, as {why}: publish a simpler one")


class Purse(threading.local):
    """What the render in this thread may still do."""

    steps, text = STEPS, TEXT

    def fill(self) -> None:
        """A render begins."""
        self.steps, self.text = STEPS, TEXT

    def pay(self, steps: int = 0, text: int = 0) -> None:
        """Raises `TemplateRefused` where there is not so much left."""
        self.steps, self.text = self.steps - steps, self.text - text
        if self.steps < 0 or self.text < 0:
            refuse("it takes too many steps" if self.steps < 0 else "it makes too much text")


purse = Purse()


@jinja2.pass_context  # so that Jinja does not call it already when it compiles
def charge(_: Any, value: Any, steps: int = 1) -> Any:
    """The filter by which a template pays for a value, and for so many steps."""
    purse.pay(steps, size(value))
    return value


@jinja2.pass_context
def charge_part(_: Any, value: Any) -> Any:
    """The same for a part of a value, whose members are not new."""
    purse.pay(1, members(value))
    return value


def paying(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for what it reads and for what it makes."""

    @functools.wraps(work)
    def call(*given: Any, **options: Any) -> Any:
        arguments = [list(each) if isinstance(each, _LISTED) else each for each in given]
        purse.pay(sum(map(steps, arguments)))
        if name in _GROWING:
            purse.pay(text=_GROWING[name](*arguments, **options))
        made = work(*arguments, **options)
        purse.pay(1, members(made))
        return made

    return call


def steps(value: Any) -> int:
    """What it takes to go through a value."""
    return len(value) >> 6 if isinstance(value, str) else members(value)


def members(value: Any) -> int:
    """The characters of a text, the members of a list or dictionary, the bytes of a number."""
    if isinstance(value, int):
        return value.bit_length() >> 3
    return len(value) if isinstance(value, (str, list, tuple, dict, range)) else 1


def size(value: Any) -> int:
    """All characters and members, to the depth; raises `TemplateRefused` for more than may still be made."""
    total, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        total += members(each)
        if total > purse.text:
            refuse("it makes too much text")
        if isinstance(each, (dict, list, tuple)):
            purse.pay(1 + len(each))
            waiting += [*each.keys(), *each.values()] if isinstance(each, dict) else each
    return total


def _joined(_: Any, value: Any, d: Any = "", attribute: Any = None) -> int:
    if not isinstance(value, (str, list, tuple, dict, range)):
        refuse("it joins what is not a list")
    return size(value) + len(value) * members(d)


def _replaced(_: Any, text: Any, old: Any, new: Any, count: Any = None) -> int:
    return str(text).count(str(old)) * len(str(new))


def _dumped(value: Any, *how: Any, **options: Any) -> int:
    return size(value) * (1 + sum(map(_width, (*how, *options.values()))))


def _width(value: Any) -> int:
    return abs(value) if isinstance(value, int) else size(value)


# How many characters they make at most, which may be more than they read.
_GROWING: Final[dict[str, Callable[..., int]]] = {"join": _joined, "replace": _replaced, "tojson": _dumped}
