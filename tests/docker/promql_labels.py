"""Which labels the result of a PromQL expression has, and whether vectors that meet share them."""

import re
from collections.abc import Iterator

import promql_parser as promql

# What Prometheus adds to each series that it scrapes, and what each of Trident's has.
_SCRAPED = frozenset({"job", "instance"})
_OURS = frozenset({"model_name", "model", "version"})
_OF_ONE_METRIC = {
    "vllm:request_success_total": "finished_reason",
    "trident:requests_refused_total": "reason",
}


def mismatches(expression: promql.Expr) -> Iterator[str]:
    """Yield each operation of two vectors of which no element can match, by their labels."""
    for each in _binaries(expression):
        left, right = labels(each.lhs), labels(each.rhs)
        if left is None or right is None:
            continue
        matching = each.modifier.matching if each.modifier else None
        if matching is None:
            compared = left | right
        elif matching.type == promql.LabelModifierType.Include:
            compared = frozenset(matching.labels)
        else:
            compared = (left | right) - set(matching.labels)
        if lacking := compared - (left & right):
            yield f"{sorted(lacking)} on one side only: {each.prettify()}"


def labels(expression: promql.Expr) -> frozenset[str] | None:
    """Return the labels of each element of a vector; None: a number."""
    match expression:
        case promql.NumberLiteral() | promql.StringLiteral():
            return None
        case promql.VectorSelector():
            return _of_metric(expression.name or "")
        case promql.MatrixSelector():
            return _of_metric(expression.vector_selector.name or "")
        case promql.AggregateExpr():
            inner = labels(expression.expr) or frozenset()
            if (modifier := expression.modifier) is None:
                return frozenset()
            named = set(modifier.labels)
            return inner & named if modifier.type == promql.AggModifierType.By else inner - named
        case promql.Call():
            (inner,) = (found for each in expression.args if (found := labels(each)) is not None)
            return inner - {"le"} if expression.func.name == "histogram_quantile" else inner
        case promql.BinaryExpr():
            left = labels(expression.lhs)
            return labels(expression.rhs) if left is None else left
        case promql.ParenExpr() | promql.UnaryExpr():
            return labels(expression.expr)
    raise NotImplementedError(type(expression))


def _of_metric(name: str) -> frozenset[str]:
    if not re.match("vllm:|trident:", name):
        return _SCRAPED
    found = _SCRAPED | _OURS
    if name.endswith("_bucket"):
        found |= {"le"}
    return found | {_OF_ONE_METRIC[name]} if name in _OF_ONE_METRIC else found


def _binaries(expression: promql.Expr) -> list[promql.BinaryExpr]:
    found: list[promql.BinaryExpr] = []

    def visit(each: promql.Expr) -> None:
        if isinstance(each, promql.BinaryExpr):
            found.append(each)

    promql.walk(expression, visit)
    return found
