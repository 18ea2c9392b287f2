"""What names mean: the roles that names of modules and parameters have in the ecosystem.

They decide where sizes do not, and every label that follows from one is tried like any other.
"""

from __future__ import annotations

import re

# ---- the residual stream -------------------------------------------------------------------------

# What a square matrix does, by the name of its module: only names tell when its two sizes tie.
READERS = re.compile(
    r"([qkv]|qkv|wqkv|[qkv]_lin|w[qkv]|to_[qkv]|[qkv]_proj|query|key|value|(query|key|value)_proj"
    r"|qkv_proj|query_key_value|c_attn|gate_proj|g_proj|up_proj|gate_up_proj|fc1|fc_in|c_fc|lin1"
    r"|in_proj|in_proj_.*|dense_h_to_4h|w1|w3|receptance|.*gate.*|.*_preact|router|r_proj)",
    re.IGNORECASE,
)
WRITERS = re.compile(
    r"(o|o_proj|out_proj|out_lin|wo|c_proj|fc2|fc_out|lin2|down_proj|dense_4h_to_h|w2|output"
    r"|proj_down|linear_out)",
    re.IGNORECASE,
)
# ``dense`` writes in attention and MLPs; in these it goes from the stream to the stream.
DENSE_WITHIN_STREAM = ("transform", "lm_head")
INTERNAL_NORM = re.compile(
    r"(q|k|v|query|key|value|kv|q_a|kv_a)_?(layer)?_?norm|multihead_norm|attn_sub_norm"
)
ELEMENTWISE = re.compile(r".*(mix|scale|scalar|gain|gamma|lambda|alpha|weight).*")
"""Vectors that multiply coordinate by coordinate, as gains do: they do not feel signs."""
NOT_RESIDUAL = re.compile(r".*(rel_attn\.r|time_decay|time_first|\b(q|kv)_b_proj\.(weight|bias))")
"""Weights of a block's own that may be as wide: relative positions, decays, latent projections."""
PROJECTOR = re.compile(r"projector|connector|merger|embed_vision|visual_projection")
STATE_SPACE = re.compile(r"mamba|mixer|ssm|rglru|temporal|conv|lru")
HYPER_CONNECTION = re.compile(r"hc_|_hc\b|hyper")
BLOCKS = ("layers", "h", "blocks", "layer", "block")
"""Names of the list of decoder blocks."""

# ---- attention -----------------------------------------------------------------------------------

QUERY = ("q_proj", "query", "q", "q_lin", "wq", "query_proj", "to_q")
KEY = ("k_proj", "key", "k", "k_lin", "wk", "key_proj", "to_k")
VALUE = ("v_proj", "value", "v", "v_lin", "wv", "value_proj", "to_v")
OUTPUT = (
    "o_proj", "out_proj", "o", "out_lin", "wo", "dense", "c_proj", "output.dense", "output",
    "to_out",
)  # fmt: skip
FUSED_QKV = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "wqkv", "qkv", "W_pack")
GATES = ("gate_proj", "g_proj", "gate", "attn_gate", "linear_gate")
QUERY_NORM = re.compile(r"q\w*norm")
KEY_NORM = re.compile(r"k\w*norm")
LATENT_QUERY = ("q_b_proj", "q_proj")
LATENT_KEY_VALUE = "kv_b_proj"
"""Multi-head latent attention: what unfolds a compressed query, and keys with values."""
