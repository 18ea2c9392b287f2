"""Charts are discovered and proved without weights; a chart with a wrong label is not believed."""

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import AutoConfig

from signed_align import chart_cache, proof
from signed_align.chart import RESIDUAL, Chart, Layout, Part
from signed_align.dimensions import Dimensions
from signed_align.discovery import TOLERANCE, Bench, Discovery
from signed_align.errors import ChartError, SignedAlignError
from signed_align.groups import Within
from signed_align.labels import Axis
from signed_align.miniature import miniature_model

torch.set_num_threads(1)

RMS = Within.SIGNED_PERMUTATION
LAYER = Within.PERMUTATION_AND_GLOBAL_SIGN

# How the coordinates of each kind of space move.
PERMUTED = {(Within.PERMUTATION, "")}
SIGNED = {(Within.SIGNED_PERMUTATION, "")}
HALF = {(Within.PLANE_SIGNS, "half")}
INTERLEAVED = {(Within.PLANE_SIGNS, "interleaved")}

ATTENTION = {"heads": PERMUTED, "values": SIGNED}
ROTARY = {**ATTENTION, "keys": HALF}
GATED = {**ROTARY, "mlp": SIGNED}
EXPERTS = {**GATED, "experts": PERMUTED}
PLAIN = {**ROTARY, "mlp": PERMUTED}
LEARNT_POSITIONS = {**ATTENTION, "keys": SIGNED, "mlp": PERMUTED}

EXPECTED = {
    "bloom": (LAYER, {"values": SIGNED, "keys": SIGNED, "mlp": PERMUTED}),
    "cohere": (LAYER, {**GATED, "keys": INTERLEAVED}),
    "deepseek_v3": (RMS, {**ATTENTION, "nopes": SIGNED, "experts": PERMUTED, "mlp": SIGNED}),
    "falcon": (LAYER, PLAIN),
    "falcon_h1": (RMS, GATED),
    "gemma": (RMS, GATED),
    "gemma2": (RMS, GATED),
    "gemma3_text": (RMS, GATED),
    "gpt2": (LAYER, LEARNT_POSITIONS),
    "gpt_neox": (LAYER, PLAIN),
    "gpt_oss": (RMS, {**ROTARY, "experts": PERMUTED, "mlp": PERMUTED}),
    "gptj": (LAYER, {**PLAIN, "keys": INTERLEAVED}),
    "granite": (RMS, GATED),
    "granitemoe": (RMS, EXPERTS),
    "jamba": (RMS, {**EXPERTS, "keys": SIGNED, "ssm": PERMUTED}),
    "llama": (RMS, GATED),
    "mamba": (RMS, {"ssm": PERMUTED}),
    "mistral": (RMS, GATED),
    "mixtral": (RMS, EXPERTS),
    "nemotron": (LAYER, PLAIN),
    "olmo2": (RMS, GATED),
    "opt": (LAYER, LEARNT_POSITIONS),
    "phi3": (RMS, GATED),
    "qwen2": (RMS, GATED),
    "qwen3": (RMS, GATED),
    "qwen3_moe": (RMS, EXPERTS),
    "qwen3_next": (RMS, {"heads": PERMUTED, "keys": HALF, "experts": PERMUTED, "mlp": SIGNED}),
    "smollm3": (RMS, GATED),
    "stablelm": (LAYER, GATED),
    "starcoder2": (LAYER, PLAIN),
}


def config_of(model_type, **settings):
    return AutoConfig.for_model(model_type, **settings)


@functools.cache
def proved(model_type, settings=()):
    return proof.prove(config_of(model_type, **dict(settings)))


@functools.cache
def bench_of(model_type, settings=()):
    """A miniature of the type, in float64, with tokens to run it on."""
    model = miniature_model(config_of(model_type, **dict(settings))).double()
    tokens = torch.randint(3, 100, (2, 24), generator=torch.Generator().manual_seed(5))
    return Bench(model, {"input_ids": tokens})


@functools.cache
def small_chart(model_type, settings=()):
    """The proved chart, bound to the sizes of the miniature."""
    chart, _ = proved(model_type, settings)
    return replace(chart, dimensions=Dimensions.of(bench_of(model_type, settings).model.config))


def forms(chart):
    """For each kind of space, how its coordinates move, at any site."""
    found: dict[str, set] = {}
    for site in chart.sites.values():
        for kind, form in site.spaces.items():
            found.setdefault(kind, set()).add((form.within, form.pairing))
    return found


# ---- what is proved --------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", EXPECTED)
def test_a_chart_is_proved_and_covers_what_the_type_admits(model_type):
    group, kinds = EXPECTED[model_type]
    chart, shown = proved(model_type)
    assert shown.holds
    assert chart.native_group is group
    found = forms(chart)
    assert {kind: found.get(kind) for kind in kinds} == kinds
    assert chart.kinds == shown.spaces
    assert chart.kinds[0] == "residual"
    assert max(shown.changes.values()) <= TOLERANCE
    assert set(shown.changes) >= {"float32"}
    assert shown.unproved == ()
    assert shown.unread == ()


@pytest.mark.parametrize("model_type", EXPECTED)
def test_the_group_is_as_large_as_it_can_be(model_type):
    """Independent signs move a LayerNorm model, and are a symmetry of all others."""
    group, _ = EXPECTED[model_type]
    chart, shown = proved(model_type)
    assert ("LayerNorm" in chart.norm) is (group is LAYER)
    assert (shown.violation is None) is (group is RMS)
    assert shown.violation is None or shown.violation >= proof.NOTICEABLE


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("bloom", "heads"), ("mpt", "heads"), ("mamba", "mlp"), ("gpt2", "experts")],
)
def test_what_is_no_symmetry_is_not_covered(model_type, kind):
    """The slopes of ALiBi tell heads apart, for instance."""
    assert kind not in proved(model_type)[0].kinds


@pytest.mark.parametrize("model_type", EXPECTED)
def test_discovery_runs_on_less_than_five_million_parameters(model_type):
    assert bench_of(model_type).model.num_parameters() < 5_000_000


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "deepseek_v3", "jamba"])
def test_other_weights_and_other_gauges_agree_with_the_proof(model_type):
    """The chart was found on one random model; it holds for further ones."""
    chart = small_chart(model_type)
    for seed in (1, 2):
        model = miniature_model(config_of(model_type), seed=seed).double()
        bench = Bench(model, bench_of(model_type).inputs)
        assert proof.verify(chart, bench, seed=seed).holds


# ---- settings --------------------------------------------------------------------------------

VARIANTS = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 1}),
    ("falcon", {"multi_query": False}),
    ("falcon", {"new_decoder_architecture": True}),
    ("falcon", {"parallel_attn": False, "bias": True}),
    ("gpt_neox", {"rotary_pct": 1.0}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("gpt_bigcode", {"multi_query": True}),
    ("gpt_bigcode", {"multi_query": False}),
    ("phi3", {"partial_rotary_factor": 0.5}),
    ("opt", {"do_layer_norm_before": False}),
    ("opt", {"word_embed_proj_dim": 512}),
    ("stablelm", {"use_qkv_bias": True, "use_parallel_residual": True}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    ("qwen2", {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("model_type", "settings"), VARIANTS)
def test_a_config_gets_a_chart_that_holds_for_it(model_type, settings):
    group, kinds = EXPECTED.get(model_type, (LAYER, LEARNT_POSITIONS))
    chart, shown = proved(model_type, tuple(settings.items()))
    assert shown.holds
    assert chart.native_group is group
    found = forms(chart)
    assert {kind: found.get(kind) for kind in kinds} == kinds


def test_switches_change_the_chart():
    plain, biased = small_chart("llama"), small_chart("llama", (("attention_bias", True),))
    bias = "layers.*.self_attn.q_proj"
    assert "bias" not in plain.modules[bias].parameters
    assert "bias" in biased.modules[bias].parameters
    alibi = proved("falcon", (("alibi", True),))[0]
    assert "heads" not in alibi.kinds
    assert forms(alibi)["keys"] == SIGNED, "no rotary planes"


@pytest.mark.parametrize(("fraction", "rotated"), [(0.25, 4), (0.5, 8), (1.0, 16)])
def test_only_rotated_coordinates_are_paired(fraction, rotated):
    chart = small_chart("gpt_neox", (("rotary_pct", fraction),))
    planes = chart.dimensions.planes(16, "half")
    paired = [plane for plane in planes if planes.count(plane) == 2]
    assert len(paired) == rotated
    assert planes[:rotated] == tuple(range(rotated // 2)) * 2


def test_layer_norms_on_queries_and_keys_are_labelled():
    """Their weights have two axes: heads, and coordinates of a head."""
    chart, shown = proved("cohere", (("use_qk_norm", True),))
    assert shown.holds
    assert "values" in chart.kinds


@pytest.mark.parametrize("width", [48, 96])
def test_a_chart_is_bound_to_the_width_asked_for(width):
    for model_type in ("llama", "gpt2"):
        chart = Chart.for_model(model_type, width)
        assert chart.width == width
        assert chart.group("residual", width).size == width


# ---- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "table"), [("xglm", "embed_positions"), ("ctrl", "pos_encoding")]
)
def test_fixed_positions_in_the_residual_stream_are_refused(model_type, table):
    with pytest.raises(ChartError, match=f"fixed table of positions \\({table}"):
        proof.prove(config_of(model_type))
    with pytest.raises(ChartError, match=f"{model_type} models have no chart: .*positions"):
        Chart.for_model(model_type)


def test_an_unknown_type_is_refused_by_name():
    with pytest.raises(ChartError, match="'no-such-type'"):
        Chart.for_model("no-such-type")


def test_a_type_without_a_causal_model_is_refused():
    with pytest.raises(ChartError, match=r"t5.*no such type"):
        Chart.for_model("t5")


def test_a_chart_that_does_not_hold_is_not_handed_out(monkeypatch):
    """A wrong label anywhere in discovery ends in an error, whatever the label was."""
    discovered = Discovery.chart

    def wrong(discovery):
        return gains_signed(discovered(discovery))

    gains_signed = relabel("input_layernorm.weight", residual(signed))
    monkeypatch.setattr(Discovery, "chart", wrong)
    with pytest.raises(ChartError, match="does not hold: the logits of a miniature change by"):
        proof.prove(config_of("llama"))


# ---- mutations -------------------------------------------------------------------------------


def relabel(suffixes, change):
    """A chart in which parameters whose names end so are labelled otherwise."""
    endings = tuple(f".{suffix}" for suffix in suffixes.split())

    def mutate(chart):
        modules = {
            pattern: replace(
                label,
                parameters={
                    name: change(axes) if f".{pattern}.{name}".endswith(endings) else axes
                    for name, axes in label.parameters.items()
                },
            )
            for pattern, label in chart.modules.items()
        }
        assert modules != dict(chart.modules), "nothing is mutated"
        return replace(chart, modules=modules)

    return mutate


def reform(kind, **changes):
    """A chart in which the coordinates of a kind of space move otherwise."""

    def mutate(chart):
        sites = {
            pattern: replace(
                site,
                spaces={
                    name: replace(form, **changes) if name == kind else form
                    for name, form in site.spaces.items()
                },
            )
            for pattern, site in chart.sites.items()
        }
        assert sites != dict(chart.sites), "nothing is mutated"
        return replace(chart, sites=sites)

    return mutate


def counted(**changes):
    """A chart whose dimensions say something else."""

    def mutate(chart):
        dimensions = replace(chart.dimensions, **changes)
        assert dimensions != chart.dimensions, "nothing is mutated"
        return replace(chart, dimensions=dimensions)

    return mutate


def one_expert_group(chart):
    candidates = tuple({**one, "expert_group": 1} for one in chart.dimensions.candidates)
    return counted(candidates=candidates)(chart)


def native(group):
    return lambda chart: replace(chart, native_group=group)


def residual(change):
    """A change of the labels of residual axes."""
    return lambda axes: tuple(
        change(axis) if isinstance(axis, Axis) and axis.space == "residual" else axis
        for axis in axes
    )


def inside(change):
    """A change of the labels of axes inside a site."""
    return lambda axes: tuple(change(axis) if isinstance(axis, Layout) else axis for axis in axes)


def swapped(axes):
    return axes[::-1]


def left(_):
    return None


def unsigned(axis):
    return axis.unsigned


def signed(axis):
    if isinstance(axis, Axis):
        return Axis(axis.space)
    return replace(axis, parts=tuple(Part(part.factors) for part in axis.parts))


def gate_exchanged(axis):
    gate, up = axis.parts
    return replace(axis, parts=(Part(gate.factors, up.even), Part(up.factors, gate.even)))


def reversed_parts(axis):
    return replace(axis, parts=axis.parts[::-1])


def by_head(axis):
    """Queries, keys and values of each head together, instead of all queries first."""
    parts = (Part(("query", "key")), Part(("key",)), Part(("value",)))
    return replace(axis, outer=("kv",), parts=parts)


def by_role(axis):
    """All queries first, instead of queries, keys and values of each head together."""
    parts = (Part(("kv", "query", "key")), Part(("kv", "key")), Part(("kv", "value")))
    return replace(axis, outer=(), parts=parts)


def query_first(axis):
    """Query heads of one key-value head apart, instead of side by side."""
    (part,) = axis.parts
    kv, query, coordinate = part.factors
    return replace(axis, parts=(Part((query, kv, coordinate), part.even),))


def queries_of_a_fused_axis_first(axis):
    first = query_first(replace(axis, parts=axis.parts[:1])).parts
    return replace(axis, parts=(*first, *axis.parts[1:]))


@dataclass(frozen=True)
class Family:
    """A type, the settings under which each mutation matters, and names of its weights."""

    model_type: str
    settings: dict
    embedding: str
    reader: str
    writer: str
    gains: str
    down: str
    mutations: dict


RMS_MUTATIONS = {
    "the group is taken too small": native(LAYER),
}
LAYER_MUTATIONS = {
    "the group is taken too large": native(RMS),
}
ROTARY_MUTATIONS = {
    "planes are paired otherwise": reform("keys", pairing="interleaved"),
    "rotated coordinates change places": reform(
        "keys", within=Within.SIGNED_PERMUTATION, pairing=""
    ),
}
GATED_MUTATIONS = {
    "the gate feels the sign of units": relabel("gate_proj.weight", inside(signed)),
    "up does not feel the sign of units": relabel("up_proj.weight", inside(unsigned)),
    "up is left": relabel("up_proj.weight", inside(left)),
    "gate and up are exchanged": lambda chart: relabel("up_proj.weight", inside(unsigned))(
        relabel("gate_proj.weight", inside(signed))(chart)
    ),
}
FUSED_GATE_MUTATIONS = {
    "the gate feels the sign of units": relabel(
        "gate_up_proj.weight experts.gate_up_proj", inside(signed)
    ),
    "gate and up are exchanged": relabel(
        "gate_up_proj.weight experts.gate_up_proj", inside(gate_exchanged)
    ),
    "units of gate and up are left": relabel(
        "gate_up_proj.weight experts.gate_up_proj", inside(left)
    ),
}
PLAIN_MUTATIONS = {
    "units of an MLP without a gate change sign": reform("mlp", within=Within.SIGNED_PERMUTATION),
}
HEAD_MUTATIONS = {
    "queries are read in another order": relabel("q_proj.weight", inside(query_first)),
    "queries are left": relabel("q_proj.weight", inside(left)),
    "keys are left": relabel("k_proj.weight", inside(left)),
    "values are left": relabel("v_proj.weight", inside(left)),
    "signs of values are dropped": relabel("v_proj.weight", inside(unsigned)),
    "outputs are read in another order": relabel("o_proj.weight", inside(query_first)),
}
BIAS_MUTATIONS = {
    "the bias of queries is left": relabel("q_proj.bias", inside(left)),
    "the bias of values is left": relabel("v_proj.bias", inside(left)),
    "the bias of the output is left": relabel("o_proj.bias", residual(left)),
    "signs of the output's bias are dropped": relabel("o_proj.bias", residual(unsigned)),
}
MLP_BIAS_MUTATIONS = {
    "the bias of up is left": relabel("up_proj.bias", inside(left)),
    "the bias of the gate is left": relabel("gate_proj.bias", inside(left)),
    "the bias of the gate feels signs": relabel("gate_proj.bias", inside(signed)),
    "the bias of down is left": relabel("down_proj.bias", residual(left)),
}
EXPERT_MUTATIONS = {
    "the router is left": relabel("mlp.gate.weight", inside(left)),
    "the router does not read the residual stream": relabel("mlp.gate.weight", residual(left)),
    "experts write in old places": relabel("experts.down_proj", inside(left)),
    "signs of what experts write are dropped": relabel("experts.down_proj", residual(unsigned)),
}
LAYER_NORM_MUTATIONS = {
    "signs of a norm's bias are dropped": relabel(
        "ln_1.bias input_layernorm.bias", residual(unsigned)
    ),
    "a norm's bias is left": relabel("ln_1.bias input_layernorm.bias", residual(left)),
}

LLAMA_NAMES = {
    "embedding": "embed_tokens.weight",
    "reader": "v_proj.weight",
    "writer": "o_proj.weight",
    "gains": "input_layernorm.weight",
    "down": "down_proj.weight",
}
GROUPED = {"num_key_value_heads": 8}
FAMILIES = [
    Family(
        "llama",
        {**GROUPED, "attention_bias": True, "mlp_bias": True},
        **LLAMA_NAMES,
        mutations={
            **RMS_MUTATIONS, **ROTARY_MUTATIONS, **GATED_MUTATIONS, **HEAD_MUTATIONS,
            **BIAS_MUTATIONS, **MLP_BIAS_MUTATIONS,
            "the unembedding is left": relabel("lm_head.weight", residual(left)),
            "the last gain feels signs": relabel("norm.weight", residual(signed)),
        },
    ),
    Family(
        "granite",
        {**GROUPED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
        **LLAMA_NAMES,
        mutations={
            **RMS_MUTATIONS, **ROTARY_MUTATIONS, **GATED_MUTATIONS, **HEAD_MUTATIONS,
            **BIAS_MUTATIONS, **MLP_BIAS_MUTATIONS,
        },
    ),
    Family(
        "gemma2",
        {"tie_word_embeddings": False},
        **LLAMA_NAMES,
        mutations={
            **RMS_MUTATIONS, **ROTARY_MUTATIONS, **GATED_MUTATIONS, **HEAD_MUTATIONS,
            "gains after the MLP feel signs": relabel(
                "post_feedforward_layernorm.weight", residual(signed)
            ),
        },
    ),
    Family(
        "olmo2",
        GROUPED,
        **{**LLAMA_NAMES, "gains": "post_attention_layernorm.weight"},
        mutations={
            **RMS_MUTATIONS, **ROTARY_MUTATIONS, **GATED_MUTATIONS, **HEAD_MUTATIONS,
            "gains of queries feel signs": relabel("q_norm.weight", inside(signed)),
            "gains of queries are left": relabel("q_norm.weight", inside(left)),
            "gains of keys are left": relabel("k_norm.weight", inside(left)),
        },
    ),
    Family(
        "phi3",
        GROUPED,
        **{**LLAMA_NAMES, "reader": "qkv_proj.weight"},
        mutations={
            **RMS_MUTATIONS, **ROTARY_MUTATIONS, **FUSED_GATE_MUTATIONS,
            "values come before keys": relabel("qkv_proj.weight", inside(reversed_parts)),
            "heads are laid out one by one": relabel("qkv_proj.weight", inside(by_head)),
            "queries are read in another order": relabel(
                "qkv_proj.weight", inside(queries_of_a_fused_axis_first)
            ),
            "outputs are read in another order": relabel("o_proj.weight", inside(query_first)),
        },
    ),
    Family(
        "qwen3_moe",
        {"attention_bias": True},
        **{**LLAMA_NAMES, "down": "experts.down_proj"},
        mutations={
            **RMS_MUTATIONS, **ROTARY_MUTATIONS, **FUSED_GATE_MUTATIONS, **HEAD_MUTATIONS,
            **BIAS_MUTATIONS, **EXPERT_MUTATIONS,
        },
    ),
    Family(
        "deepseek_v3",
        {"n_group": 8, "topk_group": 4},
        **{**LLAMA_NAMES, "reader": "q_a_proj.weight"},
        mutations={
            **RMS_MUTATIONS, **GATED_MUTATIONS, **FUSED_GATE_MUTATIONS, **EXPERT_MUTATIONS,
            "experts leave their group": one_expert_group,
            "the bias of the router is left": relabel("e_score_correction_bias", inside(left)),
            "heads of queries are left": relabel("q_b_proj.weight", inside(left)),
            "latent keys and values are left": relabel("kv_b_proj.weight", inside(left)),
            "values come before keys": relabel("kv_b_proj.weight", inside(reversed_parts)),
            "signs of values are dropped": relabel("kv_b_proj.weight", inside(unsigned)),
            "shared experts write in old places": relabel(
                "shared_experts.down_proj.weight", inside(left)
            ),
        },
    ),
    Family(
        "gpt2",
        {"tie_word_embeddings": False},
        embedding="wte.weight",
        reader="c_attn.weight",
        writer="attn.c_proj.weight",
        gains="ln_1.weight",
        down="mlp.c_proj.weight",
        mutations={
            **LAYER_MUTATIONS, **PLAIN_MUTATIONS, **LAYER_NORM_MUTATIONS,
            "positions are left": relabel("wpe.weight", residual(left)),
            "the square output projection is transposed": relabel("attn.c_proj.weight", swapped),
            "values come before keys": relabel(
                "c_attn.weight c_attn.bias", inside(reversed_parts)
            ),
            "heads are laid out one by one": relabel("c_attn.weight c_attn.bias", inside(by_head)),
            "the bias of attention is left": relabel("c_attn.bias", inside(left)),
            "the bias of units is left": relabel("c_fc.bias", inside(left)),
            "the bias of the output is left": relabel("attn.c_proj.bias", residual(left)),
            "signs of the MLP's bias are dropped": relabel("mlp.c_proj.bias", residual(unsigned)),
        },
    ),
    Family(
        "gpt_neox",
        {"rotary_pct": 0.5},
        embedding="embed_in.weight",
        reader="query_key_value.weight",
        writer="attention.dense.weight",
        gains="input_layernorm.weight",
        down="dense_4h_to_h.weight",
        mutations={
            **LAYER_MUTATIONS, **PLAIN_MUTATIONS, **ROTARY_MUTATIONS, **LAYER_NORM_MUTATIONS,
            "all coordinates are taken for rotated": counted(rotary_fraction=1.0),
            "the square output projection is transposed": relabel(
                "attention.dense.weight", swapped
            ),
            "heads are taken apart": relabel(
                "query_key_value.weight query_key_value.bias", inside(by_role)
            ),
            "the bias of attention is left": relabel("query_key_value.bias", inside(left)),
            "the bias of units is left": relabel("dense_h_to_4h.bias", inside(left)),
            "signs of the output's bias are dropped": relabel(
                "attention.dense.bias", residual(unsigned)
            ),
        },
    ),
    Family(
        "falcon",
        {"bias": True, "tie_word_embeddings": False},
        embedding="word_embeddings.weight",
        reader="query_key_value.weight",
        writer="self_attention.dense.weight",
        gains="input_layernorm.weight",
        down="dense_4h_to_h.weight",
        mutations={
            **LAYER_MUTATIONS, **PLAIN_MUTATIONS, **ROTARY_MUTATIONS, **LAYER_NORM_MUTATIONS,
            "the square output projection is transposed": relabel(
                "self_attention.dense.weight", swapped
            ),
            "values come before keys": relabel(
                "query_key_value.weight query_key_value.bias", inside(reversed_parts)
            ),
            "the bias of attention is left": relabel("query_key_value.bias", inside(left)),
            "the bias of the output is left": relabel(
                "self_attention.dense.bias", residual(left)
            ),
        },
    ),
]  # fmt: skip


def mutations_of(family):
    """What can go wrong in any chart, and what can go wrong in this one."""
    yield "the embedding is left", relabel(family.embedding, residual(left))
    yield "signs of the embedding are dropped", relabel(family.embedding, residual(unsigned))
    yield "a reader is left", relabel(family.reader, residual(left))
    yield "signs of a reader are dropped", relabel(family.reader, residual(unsigned))
    yield "a writer is left", relabel(family.writer, residual(left))
    yield "signs of a writer are dropped", relabel(family.writer, residual(unsigned))
    yield "the writer is transposed", relabel(family.writer, swapped)
    yield "gains feel signs", relabel(family.gains, residual(signed))
    yield "gains are left", relabel(family.gains, residual(left))
    yield "outputs of heads are left", relabel(family.writer, inside(left))
    yield "signs of outputs of heads are dropped", relabel(family.writer, inside(unsigned))
    yield "units are left", relabel(family.down, inside(left))
    yield from family.mutations.items()


@pytest.mark.parametrize(
    ("family", "mutate"),
    [
        pytest.param(family, mutate, id=f"{family.model_type}: {what}")
        for family in FAMILIES
        for what, mutate in mutations_of(family)
    ],
)
def test_one_wrong_label_is_noticed(family, mutate):
    settings = tuple(family.settings.items())
    assert proved(family.model_type, settings)[1].holds
    chart = small_chart(family.model_type, settings)
    assert not believed(mutate(chart), bench_of(family.model_type, settings))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_the_chart_itself_is_believed(family):
    """On the same miniature, so that it is the wrong labels that are noticed above."""
    settings = tuple(family.settings.items())
    assert believed(small_chart(family.model_type, settings), bench_of(family.model_type, settings))


def believed(chart, bench):
    try:
        return proof.verify(chart, bench).holds
    except SignedAlignError:
        return False


def test_ties_with_two_labels_are_noticed():
    """One tensor under two names must be labelled alike under both."""
    bench, chart = bench_of("gemma2"), small_chart("gemma2")
    assert bench.model.config.tie_word_embeddings
    assert believed(chart, bench)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert not believed(relabel(name, residual(left))(chart), bench)


def test_a_chart_that_moves_nothing_proves_nothing():
    bench, chart = bench_of("llama"), small_chart("llama")
    assert not believed(replace(chart, modules={}), bench)


# ---- the cache -------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "_CHARTS", {})
    return tmp_path


@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "mixtral", "deepseek_v3", "olmo2", "jamba", "gpt_neox"]
)
def test_a_chart_comes_back_from_the_cache_as_it_was(empty_cache, model_type):
    chart, _ = proved(model_type)
    chart_cache.store("key", chart)
    assert chart_cache.load("key") == chart
    assert chart_cache.load("another key") is None


def test_what_is_cached_is_not_proved_again(empty_cache, monkeypatch):
    config = config_of("llama")
    first = Chart.of(config)
    assert list(empty_cache.rglob("*.json"))
    monkeypatch.setattr(proof, "_CHARTS", {})  # as in a new process
    monkeypatch.setattr(proof, "prove", lambda _: pytest.fail("proved again"))
    assert Chart.of(config) == first
    assert Chart.of(config_of("llama", hidden_size=2048, vocab_size=777)).width == 2048


def test_configs_that_switch_on_other_things_do_not_share_a_chart(empty_cache):
    plain = Chart.of(config_of("llama"))
    biased = Chart.of(config_of("llama", attention_bias=True))
    assert "bias" not in plain.modules["layers.*.self_attn.q_proj"].parameters
    assert "bias" in biased.modules["layers.*.self_attn.q_proj"].parameters
    assert len(list(empty_cache.rglob("*.json"))) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"class": "Chart"}', '{"class": "x"}'])
def test_a_damaged_file_in_the_cache_is_no_chart(empty_cache, damage):
    chart_cache.store("key", proved("llama")[0])
    (file,) = empty_cache.rglob("key.json")
    file.write_text(damage)
    assert chart_cache.load("key") is None


def test_a_damaged_cache_is_proved_anew(empty_cache):
    first = Chart.of(config_of("llama"))
    (file,) = empty_cache.rglob("*.json")
    file.write_text("{")
    proof._CHARTS.clear()
    assert Chart.of(config_of("llama")) == first
    assert chart_cache.load(file.stem) is not None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(proof, "_CHARTS", {})
    assert Chart.of(config_of("llama")).modules["norm"].parameters["weight"] == (RESIDUAL.unsigned,)


# ---- every type ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_whole_table():
    from signed_align.support import table

    entries = table()
    covered = {
        kind: {entry.model_type for entry in entries if kind in entry.spaces_proved}
        for kind in ("residual", "mlp", "heads")
    }
    assert len(covered["residual"]) >= 165
    assert len(covered["mlp"]) >= 150
    assert len(covered["heads"]) >= 135
    for entry in entries:
        assert entry.model_type in covered["residual"] or entry.reason, entry.model_type
