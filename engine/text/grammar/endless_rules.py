"""Leaves out of a grammar in EBNF what no text can finish: rules that always need themselves."""

from __future__ import annotations

from collections.abc import Collection

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    RepetitionNode,
    RuleRefNode,
    SequenceNode,
)

from engine.text.grammar.lexemes import Rules, with_children
from engine.text.grammar.spec import GrammarTextError


def without_endless_rules(rules: Rules, root: str) -> Rules:
    """Return rules for the same texts, each way through which has an end.

    In others, a model that has taken a wrong turn would go on until its limit.

    Args:
        rules: the `used_rules` of `root`.

    Raises:
        GrammarTextError: `root` has no end itself.
    """
    ending = _ending_rules(rules)
    if root not in ending:
        raise GrammarTextError(
            f'rule "{root}" can never end: it always leads to a rule that needs itself'
        )
    if len(ending) == len(rules):
        return rules
    return {name: _pruned(rules[name], ending) for name in rules if name in ending}


def _ending_rules(rules: Rules) -> set[str]:
    """Return the rules that allow a text: a least fixed point."""
    ending: set[str] = set()
    num_known = -1
    while num_known != len(ending):
        num_known = len(ending)
        for name in rules:
            if name not in ending and _ends(rules[name], ending):
                ending.add(name)
    return ending


def _ends(node: ASTNode, ending: Collection[str]) -> bool:
    """Whether `node` allows a text, made of `ending` rules alone."""
    match node:
        case RuleRefNode():
            return node.name in ending
        case RepetitionNode():
            return not node.min_times or _ends(node.node, ending)
        case AlternativeNode():
            return any(_ends(each, ending) for each in node.alternatives)
    return all(_ends(each, ending) for each in node.children())


def _pruned(node: ASTNode, ending: Collection[str]) -> ASTNode:
    """Return `node`, which ends, without the ways through it that do not."""
    if isinstance(node, RepetitionNode) and not _ends(node.node, ending):
        return SequenceNode([])
    children = node.children()
    if isinstance(node, AlternativeNode):
        children = [each for each in children if _ends(each, ending)]
    return with_children(node, [_pruned(each, ending) for each in children])
