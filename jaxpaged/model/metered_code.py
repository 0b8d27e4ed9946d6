"""A template's syntax tree with what it costs written into it.

Every body that can run more than once begins by paying for its parts; whatever makes a text without
a call that the sandbox sees goes through a filter that pays. The filters' names are no names that a
template could write behind a bar. Knows nothing of what things cost: see `template_budget`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.visitor
from jinja2 import nodes

from jaxpaged.model import template_budget

_PAY, _WEIGHED, _WRITTEN, _MADE, _SCANNED, _JOINED = (
    "(pay)",
    "(weighed)",
    "(written)",
    "(made)",
    "(scanned)",
    "(joined)",
)

# Steps of an iteration, and of a call, beside those of its parts.
_TURN = 20
_CALL = 100
_PART = 4

_SEARCHES = ("in", "notin")


def metered(tree: nodes.Template, environment: jinja2.Environment) -> nodes.Template:
    """The tree, changed in place, for an environment with `filters()` among its filters."""
    _Meter().visit(tree)
    tree.set_environment(environment)
    return tree


def filters() -> Mapping[str, Callable[..., Any]]:
    """What the changed tree calls."""
    # Those that want the context are never called while a template is compiled.
    return {name: jinja2.pass_context(function) for name, function in _FILTERS.items()}


class _Meter(jinja2.visitor.NodeTransformer):
    """Visits the parts of a node first, so that bodies are counted with their parts changed."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:
            steps, num_bytes = _cost([node.test])
            node.test = nodes.And(_pay(node, _TURN + steps, num_bytes), node.test)
        return self._paid(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._paid(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._paid(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._paid(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            part if isinstance(part, nodes.TemplateData) else _through(_WRITTEN, part)
            for part in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through(_JOINED, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _through(_MADE, node)
        node.arg = _weighed(node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _weighed(node.key)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        # What is compared with a constant is not looked into.
        if len(node.ops) > 1 or not any(isinstance(side, nodes.Const) for side in sides):
            node.expr = _weighed(node.expr)
            for operand in node.ops:
                operand.expr = _weighed(operand.expr)
        elif node.ops[0].op in _SEARCHES:
            node.ops[0].expr = _through(_SCANNED, node.ops[0].expr)
        return node

    def _paid(self, node: Any) -> nodes.Node:  # noqa: ANN401 - whatever has a body
        self.generic_visit(node)
        steps, num_bytes = _cost(node.body)
        turn = _TURN if isinstance(node, nodes.For) else _CALL
        payment = nodes.ExprStmt(_pay(node, turn + steps, num_bytes), lineno=node.lineno)
        node.body = [payment, *node.body]
        return node


def _cost(parts: Sequence[nodes.Node]) -> tuple[int, int]:
    """Steps and bytes of evaluating the parts once, without what pays for itself."""
    steps = num_bytes = 0
    waiting = list(parts)
    while waiting:
        part = waiting.pop()
        steps += _PART
        if isinstance(part, nodes.TemplateData):
            num_bytes += len(part.data)
        elif isinstance(part, nodes.List | nodes.Tuple | nodes.Dict):
            num_bytes += 2 * template_budget.ENTRY_BYTES
        pays = isinstance(part, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block)
        waiting.extend(part.iter_child_nodes(exclude=("body",) if pays else None))
    return steps, num_bytes


def _pay(node: nodes.Node, steps: int, num_bytes: int) -> nodes.Expr:
    return _through(_PAY, nodes.Const(steps, lineno=node.lineno), nodes.Const(num_bytes))


def _through(name: str, node: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _weighed(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _through(_WEIGHED, node)


def _pay_for(_: jinja2.runtime.Context, steps: int, num_bytes: int) -> bool:
    template_budget.spend(steps, num_bytes)
    return True


def _weighed_value(_: jinja2.runtime.Context, value: object) -> object:
    template_budget.weigh(value)
    return value


def _written(_: jinja2.runtime.Context, value: object) -> object:
    template_budget.spend(0, template_budget.weigh(value))
    return value


def _made(_: jinja2.runtime.Context, value: object) -> object:
    return template_budget.made(value)


def _scanned(_: jinja2.runtime.Context, value: object) -> object:
    if isinstance(value, str | list | tuple):
        template_budget.spend(1 + len(value) // 16)
    return value


def _joined(context: jinja2.runtime.Context, values: list[object]) -> str:
    template_budget.fit(sum(map(template_budget.weigh, values)))
    if context.eval_ctx.autoescape:
        return template_budget.made(jinja2.runtime.markup_join(values))
    return template_budget.made(jinja2.runtime.str_join(values))


_FILTERS: Mapping[str, Callable[..., Any]] = {
    _PAY: _pay_for,
    _WEIGHED: _weighed_value,
    _WRITTEN: _written,
    _MADE: _made,
    _SCANNED: _scanned,
    _JOINED: _joined,
}
