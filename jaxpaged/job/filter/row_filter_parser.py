"""The filter of `jaxpaged retry --where`, from text to a tree of conditions.

    filter     any = all {OR all};  all = term {AND term};  term = {NOT} ( "(" any ")" | condition )
    condition  column                                     a truth value
             | column ( = | == | != | <> | < | <= | > | >= ) literal
             | column IS [NOT] NULL
             | column [NOT] IN ( literal {, literal} )
             | column [NOT] LIKE 'a%_b'
    column     name {. name}                              name or "name" in double quotes
    literal    'text' | 48 | -0.5 | TRUE | FALSE          '' stands for ' in a text

Every operator comes out as one of a few, perhaps under a NOT: in SQL's logic of three values
`x > 1` is `NOT x <= 1`. Knows nothing of columns' types.
"""

import dataclasses
import decimal
from typing import NoReturn

from jaxpaged.errors import ConfigError
from jaxpaged.job.filter import row_filter_tokens as tokens
from jaxpaged.job.filter.row_filter_tokens import Token

MAX_DEPTH = 32

# What a comparison is made of, and whether it is denied.
_COMPARISONS = {
    "=": ("=", False),
    "==": ("=", False),
    "<>": ("=", True),
    "!=": ("=", True),
    "<": ("<", False),
    ">=": ("<", True),
    "<=": ("<=", False),
    ">": ("<=", True),
}
_AFTER_CONDITION = ("AND", "OR", ")", "end")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Literal:
    """A value to compare with, and where it stands."""

    value: str | decimal.Decimal | bool
    token: Token


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What one column is asked.

    Attributes:
        names: The column, then the fields within it.
        column: Where the column stands.
        operator: `=` (any of the literals), `<`, `<=`, `LIKE`, `NULL` (is it?), or `TRUE` (is it?).
        written: The operator as the user wrote it.
        literals: What it is compared with; none for `NULL` and `TRUE`.
    """

    names: tuple[str, ...]
    column: Token
    operator: str
    written: str
    literals: tuple[Literal, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Not:
    """True where the operand is false."""

    operand: "Tree"


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """Two or more operands under one `AND` or `OR`."""

    word: str
    operands: "tuple[Tree, ...]"


Tree = Condition | Not | Joined


def parse(text: str) -> Tree:
    """The tree of a filter.

    Raises:
        ConfigError: The text is no filter; the message shows where, and what was expected.
    """
    return _Parser(text).parse()


class _Parser:
    """Recursive descent over the tokens; each method reads what it is named after."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = tokens.split(text)
        self._index = 0
        self._depth = 0

    def parse(self) -> Tree:
        tree = self._any()
        if not self._accept("end"):
            self._fail("expected AND, OR or the end")
        return tree

    def _any(self) -> Tree:
        operands = [self._all()]
        while self._accept("OR"):
            operands.append(self._all())
        return Joined("OR", tuple(operands)) if len(operands) > 1 else operands[0]

    def _all(self) -> Tree:
        operands = [self._term()]
        while self._accept("AND"):
            operands.append(self._term())
        return Joined("AND", tuple(operands)) if len(operands) > 1 else operands[0]

    def _term(self) -> Tree:
        is_denied = False
        while self._accept("NOT"):
            is_denied = not is_denied
        tree = self._group() if self._next.kind == "(" else self._condition()
        return Not(tree) if is_denied else tree

    def _group(self) -> Tree:
        if self._depth == MAX_DEPTH:
            self._fail(f"parentheses nest deeper than {MAX_DEPTH}", found=False)
        self._depth += 1
        self._expect("(", "(")
        tree = self._any()
        self._expect(")", '")", AND or OR')
        self._depth -= 1
        return tree

    def _condition(self) -> Tree:
        column = self._next
        names = self._column()
        operator, is_denied, literals = "TRUE", False, ()
        written = self._next.text.upper()
        if self._accept(*_COMPARISONS):
            operator, is_denied = _COMPARISONS[written]
            literals = (self._literal(f'after "{written}"'),)
        elif self._accept("IS"):
            operator, is_denied = "NULL", self._accept("NOT")
            self._expect("NULL", "NULL or NOT NULL after IS")
        elif self._next.kind in ("NOT", "IN", "LIKE"):
            is_denied = self._accept("NOT")
            written = self._next.text.upper()
            operator, literals = self._membership()
        elif self._next.kind not in _AFTER_CONDITION:
            self._fail(
                f"expected an operator (=, <>, <, <=, >, >=, IS, IN, LIKE) after {column.shown}"
            )
        condition = Condition(
            names=names, column=column, operator=operator, written=written, literals=literals
        )
        return Not(condition) if is_denied else condition

    def _membership(self) -> tuple[str, tuple[Literal, ...]]:
        if self._accept("LIKE"):
            return "LIKE", (self._literal("after LIKE"),)
        self._expect("IN", "IN or LIKE after NOT")
        self._expect("(", '"(" after IN')
        literals = [self._literal("in the list")]
        while self._accept(","):
            literals.append(self._literal('after ","'))
        self._expect(")", '"," or ")"')
        return "=", tuple(literals)

    def _column(self) -> tuple[str, ...]:
        names = [self._name("a column")]
        while self._accept("."):
            names.append(self._name('the name of a field after "."'))
        return tuple(names)

    def _name(self, expected: str) -> str:
        token = self._next
        if not self._accept("word", "name"):
            hint = ""
            if token.kind in tokens.KEYWORDS:
                hint = "; a column of that name goes in double quotes"
            elif token.kind in ("text", "number"):
                hint = "; the column comes first, as in finish_reason = 'length'"
            self._fail(f"expected {expected}", hint=hint)
        return token.value

    def _literal(self, where: str) -> Literal:
        token = self._next
        if not self._accept("text", "number", "TRUE", "FALSE"):
            hint = ""
            if token.kind == "NULL":
                hint = "; write IS NULL or IS NOT NULL"
            elif token.kind in ("word", "name"):
                hint = "; text goes in single quotes, and columns are compared with literals only"
            self._fail(f"expected a literal {where}", hint=hint)
        if token.kind == "number":
            return Literal(value=decimal.Decimal(token.value), token=token)
        is_text = token.kind == "text"
        return Literal(value=token.value if is_text else token.kind == "TRUE", token=token)

    @property
    def _next(self) -> Token:
        return self._tokens[self._index]

    def _accept(self, *kinds: str) -> bool:
        """Whether the next token is of one of these kinds; if so, it is passed."""
        if self._next.kind not in kinds:
            return False
        self._index += 1
        return True

    def _expect(self, kind: str, expected: str) -> None:
        if not self._accept(kind):
            self._fail(f"expected {expected}")

    def _fail(self, reason: str, *, hint: str = "", found: bool = True) -> NoReturn:
        what = f", found {self._next.shown}" if found else ""
        raise ConfigError(tokens.message(self._text, self._next.start, f"{reason}{what}{hint}"))
