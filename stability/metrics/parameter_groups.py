"""The groups of parameters by which a model's gradient is told apart, from their names.

A reader wants to know through which weights an attention's error enters: those that make q, k and
v, the one behind the attention, or all others, which it reaches through the residual stream. The
names are those of our GPT, of `torch.nn`'s layers and of the usual models of transformers. Leaves
out depth: layers are the operator level's subject.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["PARAMETER_GROUPS", "ParameterGroup", "group_of", "grouped"]


class ParameterGroup(NamedTuple):
    """A group: what it holds in words, and the pattern that is in the names of its parameters."""

    label: str
    pattern: str


PARAMETER_GROUPS = {
    "norm": ParameterGroup("normalisations", r"norm|(^|[._])ln(_|\d|\.)"),
    "embedding": ParameterGroup(
        "embeddings, and the layer that makes logits", r"embed|(^|\.)w[tp]e\.|lm_head"
    ),
    "qkv": ParameterGroup(
        "one matrix that makes queries, keys and values", r"c_attn|in_proj|qkv|query_key_value"
    ),
    "query": ParameterGroup("what makes queries", r"(^|[._])(query|q_proj|q_lin|wq|to_q|q)\."),
    "key": ParameterGroup("what makes keys", r"(^|[._])(key|k_proj|k_lin|wk|to_k|k)\."),
    "value": ParameterGroup("what makes values", r"(^|[._])(value|v_proj|v_lin|wv|to_v|v)\."),
    "attention_out": ParameterGroup(
        "the projection behind attention",
        r"attention_residual|attn.*proj\.|out_proj|o_proj|(^|\.)wo\.|to_out|out_lin"
        r"|attention.*output",
    ),
    "mlp": ParameterGroup(
        "the MLP of each layer",
        r"mlp|ffn|feed_?forward|(^|\.)(fc|linear)_?\d|(up|down|gate)_proj|intermediate|lin[12]",
    ),
    "other": ParameterGroup("all other parameters", r""),
}
"""A parameter belongs to the first group whose pattern is in its name."""


def group_of(parameter: str) -> str:
    """Return the group of a parameter by its dotted name."""
    groups = PARAMETER_GROUPS.items()
    return next(name for name, group in groups if re.search(group.pattern, parameter))


def grouped(parameters: Iterable[str]) -> dict[str, list[str]]:
    """Return the names by group, groups in the order of the table, without empty ones."""
    found: dict[str, list[str]] = {name: [] for name in PARAMETER_GROUPS}
    for parameter in parameters:
        found[group_of(parameter)].append(parameter)
    return {name: members for name, members in found.items() if members}
