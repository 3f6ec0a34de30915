"""The groups of parameters by which a model's gradient is told apart, from their names.

A reader wants to know through which weights an attention's error enters: those that make q, k and
v, the one behind the attention, or all others, which it reaches through the residual stream. The
names are those of our GPT, of `torch.nn`'s layers and of the usual models of transformers. Leaves
out depth: layers are the operator level's subject.
"""

import re
from collections.abc import Iterable

__all__ = ["PARAMETER_GROUPS", "group_of", "grouped"]

PARAMETER_GROUPS = {
    "norm": r"norm|(^|[._])ln(_|\d|\.)",
    "embedding": r"embed|(^|\.)w[tp]e\.|lm_head",
    "qkv": r"c_attn|in_proj|qkv|query_key_value",
    "query": r"(^|[._])(query|q_proj|q_lin|wq|to_q|q)\.",
    "key": r"(^|[._])(key|k_proj|k_lin|wk|to_k|k)\.",
    "value": r"(^|[._])(value|v_proj|v_lin|wv|to_v|v)\.",
    "attention_out": r"attention_residual|attn.*proj\.|out_proj|o_proj|(^|\.)wo\.|to_out|out_lin"
    r"|attention.*output",
    "mlp": r"mlp|ffn|feed_?forward|(^|\.)(fc|linear)_?\d|(up|down|gate)_proj|intermediate|lin[12]",
    "other": r"",
}
"""The pattern of each group; a parameter belongs to the first whose pattern is in its name. `qkv`
is one matrix for all three; `other` takes what is left."""


def group_of(parameter: str) -> str:
    """Return the group of a parameter by its dotted name."""
    return next(name for name, pattern in PARAMETER_GROUPS.items() if re.search(pattern, parameter))


def grouped(parameters: Iterable[str]) -> dict[str, list[str]]:
    """Return the names by group, groups in the order of the table, without empty ones."""
    found: dict[str, list[str]] = {name: [] for name in PARAMETER_GROUPS}
    for parameter in parameters:
        found[group_of(parameter)].append(parameter)
    return {name: members for name, members in found.items() if members}
