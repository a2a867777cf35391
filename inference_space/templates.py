"""Chat templates come from the bucket, and are programs: here each render has its bounds.

Jinja's sandbox keeps a template from Python and from this machine. It keeps none from counting to 10^15, nor
from doubling a text until no memory is left; and vLLM's time limit ends the waiting for it, not the work.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.runtime import Namespace
from jinja2.sandbox import ImmutableSandboxedEnvironment

from delta_weight_sync.vllm.engine import EngineError
from inference_space.template_costs import charge, charge_part, members, paying, purse, refuse, steps
from inference_space.template_source import CHARGED, CHARGED_PART, FILTERS, MAX_SOURCE, Rewriter

_RANGE: Final = 10_000
_STOCK: Final = "ImmutableSandboxedEnvironment"


class _Template(jinja2.Template):
    def render(self, *arguments: Any, **options: Any) -> str:
        """As in Jinja, with a full purse."""
        purse.fill()
        return super().render(*arguments, **options)


class _Quiet(Namespace):
    def __repr__(self) -> str:
        """Not what is in it: that may be itself, many times over."""
        return "<namespace>"


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds: raises `TemplateRefused`, and what Jinja does."""

    template_class = _Template
    intercepted_binops = frozenset("+%")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.globals = {"namespace": _Quiet, "range": _range}

    def _parse(self, source: str, *arguments: Any) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            refuse(f"it has more than {MAX_SOURCE} characters")
        return super()._parse(source, *arguments)

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        purse.fill()
        self.filters = {name: paying(name, self.filters[name]) for name in FILTERS}
        self.filters |= {CHARGED: charge, CHARGED_PART: charge_part}
        return super()._generate(Rewriter().visit(source), *arguments, **options)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What a template or a macro has made."""
        made = []
        for part in parts:
            purse.pay(1, len(part))
            made.append(part)
        return "".join(made)

    def call(__self, __context: Any, __obj: Any, *arguments: Any, **options: Any) -> Any:  # noqa: N805
        """As in Jinja."""
        purse.pay(steps(getattr(__obj, "__self__", None)))
        made = super().call(__context, __obj, *arguments, **options)
        purse.pay(1, members(made))
        return made

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`+` pays for what it makes; `%` is for numbers."""
        if operator == "%" and isinstance(left, str):
            refuse("it fills in a text with %")
        purse.pay(1, members(left) + members(right) if operator == "+" else 0)
        return super().call_binop(context, operator, left, right)


def _range(*arguments: int) -> range:
    found = range(*arguments)
    if len(found) > _RANGE:
        refuse(f"it counts to more than {_RANGE}")
    return found


def install() -> None:
    """Have transformers, and so vLLM, render with bounds, in this process.

    Ends when transformers bounds its templates. Raises `RuntimeError` where it compiles them otherwise.
    """
    from transformers.utils import chat_template_utils

    if not hasattr(chat_template_utils, _STOCK):
        raise RuntimeError("this transformers was not tested: its chat templates would have no bounds")
    setattr(chat_template_utils, _STOCK, BoundedEnvironment)


def require_short(checkpoint: Path) -> None:
    """Raise `EngineError` for a template that is too long to be read: vLLM does that before it renders."""
    for name, template in _templates(checkpoint):
        if len(template) > MAX_SOURCE:
            raise EngineError(
                f"the chat template in {name} has {len(template)} characters, where at most {MAX_SOURCE} are"
                " read: publish a simpler one",
                "TemplateError",
            )


def _templates(checkpoint: Path) -> Iterable[tuple[str, str]]:
    for path in sorted(checkpoint.glob("*.jinja")):
        yield path.name, path.read_text(errors="replace")
    for path in sorted(checkpoint.glob("*.json")):
        if path.name in ("tokenizer_config.json", "chat_template.json", "processor_config.json"):
            yield path.name, json.dumps(_within(path))


def _within(path: Path) -> Any:
    try:
        told = json.loads(path.read_bytes())
    except ValueError:
        return None
    return told.get("chat_template") if isinstance(told, dict) else None
