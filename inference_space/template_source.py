"""What a run's chat template may be made of: what the templates that are in use are made of, and no more.

Each loop and macro pays for its steps where it is run, and whatever grows for its size; see `template_costs`.
"""

from __future__ import annotations

from typing import Any, Final

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from inference_space.template_costs import refuse

MAX_SOURCE: Final = 256 << 10  # characters
CHARGED, CHARGED_PART = "charged", "charged_part"  # the filters by which a template pays


def _words(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


FILTERS: Final = _words(
    "abs capitalize count d default dictsort first float int items join last length list lower map max min",
    "reject rejectattr replace reverse safe select selectattr sort string title tojson trim unique upper",
)
_NODES: Final = _words(
    "Template Output TemplateData For If Macro CallBlock Assign AssignBlock Name NSRef Const List Tuple Dict",
    "Pair Keyword Slice Filter Test Call Getitem Getattr Concat Compare Operand Add Sub Mod Neg Pos And Or",
    "Not CondExpr Break Continue ExprStmt ExtensionAttribute",
)
_METHODS: Final = _words(
    "_generation_support capitalize count endswith find get isdigit items keys lower lstrip rfind rsplit",
    "rstrip split splitlines startswith strip title upper values",
)
_AT_ONCE: Final = 64  # texts that `~` joins
_HIDDEN: Final = ("varargs", "kwargs")  # lists for which nobody would have paid


class Rewriter(NodeTransformer):
    """Refuses what is not listed, and adds what pays. Raises `TemplateRefused`."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """As in Jinja."""
        if type(node).__name__ not in _NODES:
            _not_listed(type(node).__name__)
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - these names are Jinja's
        """One that calls itself would not pay for its turns."""
        if node.recursive:
            _not_listed("a recursive loop")
        return self._paying(node)

    def _paying(self, node: Any) -> nodes.Node:
        """Each turn, or call, pays for all that is in it."""
        steps = sum(1 for _ in node.find_all(nodes.Node))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_charged(nodes.Const(None), nodes.Const(steps))))
        return node  # type: ignore[no-any-return]

    visit_Macro = visit_CallBlock = _paying  # noqa: N815

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802
        """A name that the template gives, or is given."""
        if node.name in _HIDDEN:
            _not_listed(node.name)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        """Those that are listed."""
        if node.name not in FILTERS:
            _not_listed(f"the filter {node.name}")
        return self.generic_visit(node)

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        """Of methods those that are listed; of functions those that there are."""
        called = node.node
        name = getattr(called, "attr", getattr(called, "name", None))
        if isinstance(called, nodes.Name) or name in _METHODS:
            return self.generic_visit(node)
        return _not_listed(f"a call of {name}")

    def _made(self, node: Any) -> nodes.Node:
        """It pays for the size of what it makes."""
        if isinstance(node, nodes.Concat) and len(node.nodes) > _AT_ONCE:
            refuse(f"it joins more than {_AT_ONCE} texts at once")
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _charged(node)

    visit_Concat = visit_List = visit_Dict = visit_Tuple = _made  # noqa: N815

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """A part is a copy."""
        self.generic_visit(node)
        return _charged(node, name=CHARGED_PART) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Texts are compared letter by letter."""
        self.generic_visit(node)
        node.expr = _charged(node.expr)
        for operand in node.ops:
            operand.expr = _charged(operand.expr)
        return node


def _charged(node: nodes.Expr, *arguments: nodes.Expr, name: str = CHARGED) -> nodes.Expr:
    return nodes.Filter(node, name, list(arguments), [], None, None)


def _not_listed(what: str) -> nodes.Node:
    refuse(f"{what} is not among what a template may be made of")
