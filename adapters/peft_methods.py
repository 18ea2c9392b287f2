"""PEFT's methods: what the axes of each one's saved tensors index, or why it cannot be moved.

The tables are the whole decision; :mod:`signed_align.adapters.peft` only reads them. An adapted
module has weight W of shape (out, in); in other coordinates it is P_out W P_inᵀ, and an adapter
moves if its own tensors, permuted and sign-flipped axis by axis, change W in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from signed_align.chart import RESIDUAL
from signed_align.labels import Axis


@dataclass(frozen=True)
class Side:
    """What an axis of an adapter's tensor indexes, in words of the module it adapts.

    ``of`` is ``in`` or ``out``: what goes into the module and comes out of it. ``small`` and
    ``large`` are whichever of the two has fewer and more coordinates. ``column`` is the last axis
    of the module's own weight, and ``parameter`` stands for all axes of the parameter that the
    tensor is a copy of. ``cache`` is the keys and values of all layers, one after the other.
    """

    of: str
    signed: bool = True

    @property
    def even(self) -> Side:
        """The same for a quantity that keeps its sign."""
        return replace(self, signed=False)

    def __str__(self) -> str:
        return self.of if self.signed else f"\\|{self.of}\\|"


IN, OUT = Side("in"), Side("out")
SMALL, LARGE = Side("small"), Side("large")
COLUMN, PARAMETER, CACHE = Side("column"), Side("parameter"), Side("cache")

Entry: TypeAlias = Side | Axis | None


@dataclass(frozen=True)
class Case:
    """What a choice between rules may look at: the config, the shape, the module's sizes."""

    config: Mapping[str, Any]
    shape: tuple[int, ...]
    inputs: Callable[[], int]
    outputs: Callable[[], int]


@dataclass(frozen=True)
class Need:
    """What the coordinates on a side may not do, and why: ``move`` at all, or ``flip`` signs."""

    side: Side
    verb: str
    reason: str


@dataclass(frozen=True)
class Rule:
    """What the axes of a tensor index; under which condition; what that needs of the gauge."""

    axes: tuple[Entry, ...]
    when: Callable[[Case], bool] = lambda _: True
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True)
class Entries:
    """Tensors that hold single entries of the weight's update: where they are, and their values.

    ``flat`` indices count the entries of W row by row; others are pairs of a row and a column.
    """

    indices: str
    values: str
    flat: bool = False


@dataclass(frozen=True)
class Method:
    """A method that moves.

    Parameters
    ----------
    tensors : mapping of str to rules
        By the end of a tensor's name, behind the module's path; the first rule that applies.
    embedding : mapping of str to rules
        The same where the adapted module is an embedding, as far as it differs.
    shared : mapping of str to Rule
        Tensors that all adapted modules share: they move if all modules want the same.
    entries : sequence of Entries
        Tensors that are moved entry by entry.
    whole_paths : bool
        Copies that peft ties to each other across layers when it loads them are untied, by naming
        every module by its whole path in ``target_modules``.
    options : mapping of str to (test, reason)
        Settings under which it cannot be moved.
    way_out : str
        What to do where it cannot be moved.
    remark : str
        What a reader of the table should know.
    """

    tensors: Mapping[str, Sequence[Rule]]
    embedding: Mapping[str, Sequence[Rule]] = field(default_factory=dict)
    shared: Mapping[str, Rule] = field(default_factory=dict)
    entries: Sequence[Entries] = ()
    whole_paths: bool = False
    options: Mapping[str, tuple[Callable[[Any], bool], str]] = field(default_factory=dict)
    way_out: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Refusal:
    """A method that cannot be moved, with the mathematical reason and the way out."""

    reason: str
    way_out: str


def _rules(
    tensors: Mapping[str, tuple[Entry, ...] | Rule | tuple[Rule, ...]],
) -> dict[str, tuple[Rule, ...]]:
    """Rules by the end of a name, in which ``*`` is a number; axes alone are an only rule."""
    table: dict[str, tuple[Rule, ...]] = {}
    for name, given in tensors.items():
        if isinstance(given, Rule):
            table[name] = (given,)
        elif any(isinstance(one, Rule) for one in given):
            table[name] = tuple(one for one in given if isinstance(one, Rule))
        else:
            table[name] = (Rule(tuple(one for one in given if not isinstance(one, Rule))),)
    return table


def _unmoved(reason: str, *sides: Side) -> tuple[Need, ...]:
    return tuple(Need(side, "move", reason) for side in sides)


def _unflipped(reason: str, *sides: Side) -> tuple[Need, ...]:
    return tuple(Need(side, "flip", reason) for side in sides)


MERGE = "merge it into the base (merge_and_unload) and move the model"
CONVERT = "convert it to LoRA first (peft.save_as_lora(out, model, rank=1.0))"
CONVERT_EXACT = "convert it to LoRA first (peft.save_as_lora(out, model, rank=r)), which is exact"
BLOCKS = "its blocks of neighbouring coordinates are split by a permutation"
SEEDED = "it is drawn anew in coordinate order when it is loaded and is not saved"

LOW_RANK = _rules(
    {
        "lora_A.weight": (None, IN),
        "lora_B.weight": (OUT, None),
        "lora_B.bias": (OUT,),
        "lora_embedding_A": (None, IN),
        "lora_embedding_B": (OUT, None),
        "lora_magnitude_vector": (OUT.even,),
        "lora_magnitude_vector.weight": (OUT.even,),
        "lora_diag": (None,),
    }
)


def _set(value: Any) -> bool:
    return bool(value)


def _changes_base(init: Any) -> bool:
    return str(init).lower() not in PLAIN_INITS


PLAIN_INITS = {"true", "false", "gaussian", "orthogonal", "eva", "mica", "pissa", "lora_ga", "none"}
"""Initialisations after which an adapter computes the same on a moved base.

``pissa`` takes the leading singular part out of the base whenever it is loaded; that part is
unique and moves with the base.
"""

ROWS = "token_adapter.trainable_tokens_delta"
LORA = Method(
    tensors={
        **LOW_RANK,
        **_rules(
            {ROWS: Rule((None, COLUMN), needs=_unmoved("it names rows, which change places", OUT))}
        ),
    },
    embedding=_rules({ROWS: (None, COLUMN)}),
    options={
        "init_lora_weights": (
            _changes_base,
            "loading it changes the base weights in a way that depends on the order of coordinates "
            "or on chance (OLoRA's QR, CorDA's covariance, a randomised SVD, quantisation blocks)",
        ),
        "use_qalora": (_set, "QA-LoRA averages groups of neighbouring coordinates"),
        "use_bdlora": (_set, "its factors are block-diagonal: " + BLOCKS),
        "megatron_config": (_set, "Megatron shards the adapted layers"),
        "velora_config": (_set, "VeLoRA groups neighbouring coordinates"),
        "monteclora_config": (_set, "MonteCLoRA keeps sampling state beside the factors"),
        "arrow_config": (_set, "an Arrow router is made of further adapters; move those"),
    },
    way_out="save it as a plain LoRA (save_pretrained with path_initial_model_for_weight_conversion"
    "), or merge it",
    remark="with rsLoRA, DoRA, LoRA bias, aLoRA, PiSSA, EVA, KaSA, trainable tokens, replicated "
    "layers, and adapters on bare parameters (experts)",
)

PROMPT = _rules({"prompt_embeddings": (None, RESIDUAL)})
CACHED = _rules({"prompt_embeddings": (None, CACHE)})
READS = (None, RESIDUAL)


def _dense_miss(case: Case) -> bool:
    return case.config.get("init_weights") not in ("bat", "mini")


def _odd_activation(case: Case) -> bool:
    return case.config.get("act_fn", "relu") in ("tanh", "linear")


def _plain_qr(case: Case) -> bool:
    return case.config.get("decomposition_method") == "qr" and bool(case.config.get("para"))


def _relu(case: Case) -> bool:
    return case.config.get("decomposition_method", "relu") == "relu"


def _whole(case: Case) -> bool:
    return case.shape == (case.outputs(), case.inputs())


def _feedforward(case: Case) -> bool:
    return case.shape == (1, case.inputs()) and case.shape != (case.outputs(), 1)


MISS_REASON = "its update repeats every r-th input coordinate, which a permutation breaks"
PEANUT_REASON = "its network is not odd in W: a flipped input flips a row of W inside it"
DEFT_REASON = "it takes relu(P), which does not commute with flipped outputs"
DEFT_QR_REASON = "the signs of the columns of its QR decomposition depend on the order of rows"
KRONECKER = "a Kronecker product ties coordinates to their places in a grid"
CIRCULANT = "a circulant block ties entries by the difference of their indices"
SUBSPACES = "each pair of runs of neighbouring coordinates has factors of its own"
ROTATION = "it rotates fixed pairs of output coordinates"
SHARED_REASON = (
    "one frozen projection is shared by modules, of all layers, whose coordinates change in "
    "different ways"
)

METHODS: Mapping[str, Method] = {
    "LORA": LORA,
    "ADALORA": Method(
        _rules(
            {
                "lora_A": (None, IN),
                "lora_B": (OUT, None),
                "lora_E": (None, None),
                "ranknum": (None,),
            }
        )
    ),
    "ADAPTION_PROMPT": Method(
        _rules({"adaption_prompt": (None, None, RESIDUAL), "adaption_gate": (None,)}),
        remark="Llama and Mistral; peft's GPT-2 variant adds head coordinates to the residual "
        "stream and is refused",
    ),
    "BEFT": Method(_rules({"beft_bias": (None, OUT)})),
    "BOFT": Method(
        _rules(
            {
                "boft_R": (
                    Rule((None, None, IN, IN), when=lambda case: case.shape[:2] == (1, 1)),
                    Rule((None,) * 4, needs=_unmoved(BLOCKS, IN)),
                ),
                "boft_s": (OUT.even, None),
            }
        ),
        way_out=MERGE,
        remark="a single block moves through any gauge",
    ),
    "C3A": Method(
        _rules(
            {
                "c3a_kernel": (
                    Rule((OUT, IN, None), when=lambda case: case.shape[2] == 1),
                    Rule((None,) * 3, needs=_unmoved(CIRCULANT, IN, OUT)),
                )
            }
        ),
        way_out=CONVERT,
        remark="blocks of size 1 move through any gauge",
    ),
    "CARTRIDGE": Method(CACHED, remark="cached keys and values, head by head"),
    "CPT": Method(PROMPT),
    "DEFT": Method(
        _rules(
            {
                "deft_P": (
                    Rule((OUT, None), when=_plain_qr),
                    Rule((OUT, None), when=_relu, needs=_unflipped(DEFT_REASON, OUT)),
                    Rule((OUT, None), needs=_unmoved(DEFT_QR_REASON, OUT)),
                ),
                "deft_R": (None, IN),
            }
        ),
        way_out=MERGE,
        remark="the form of `qr` with `para` moves through any gauge",
    ),
    "DELORA": Method(
        _rules(
            {
                "delora_A": (None, IN),
                "delora_B": (OUT, None),
                "delora_lambda": (None,),
                "delora_w_norm": (IN.even,),
            }
        )
    ),
    "GLORA": Method(
        _rules(
            {
                "glora_A.Xd": (OUT.even, None),
                "glora_A.Xu": (None, IN.even),
                "glora_A.X": (
                    Rule((None,), when=lambda case: len(case.shape) == 1),
                    Rule((OUT.even, None)),
                ),
                "glora_A.zeros": (None, None),
                "glora_B.Xd": (OUT, None),
                "glora_B.Xu": (None, IN),
                "glora_B.X": (
                    Rule(
                        (None,),
                        when=lambda case: len(case.shape) == 1,
                        needs=_unflipped("one constant is added to all of W", IN, OUT),
                    ),
                    Rule(
                        (OUT, None), needs=_unflipped("one vector is added to all columns of W", IN)
                    ),
                ),
                "glora_B.zeros": (None, None),
                "glora_C.Xd": (IN, None),
                "glora_C.Xu": (None, None),
                "glora_C.X": (IN, None),
                "glora_C.zeros": (None, None),
                "glora_D.X": (
                    Rule((None,), when=lambda case: case.shape == (1,)),
                    Rule((OUT.even,)),
                ),
                "glora_D.zeros": (None,),
                "glora_E.X": (
                    Rule(
                        (None,),
                        when=lambda case: case.shape == (1,),
                        needs=_unflipped("one constant is added to all outputs", OUT),
                    ),
                    Rule((OUT,)),
                ),
                "glora_E.zeros": (None,),
            }
        ),
        way_out="write the constant as a vector (config_D_E: vector; config_A_B: lora of rank 1), "
        "or merge it",
    ),
    "GRALORA": Method(
        _rules(
            {
                "gralora_A": (
                    Rule((None, IN, None), when=lambda case: case.shape[0] == 1),
                    Rule((None,) * 3, needs=_unmoved(SUBSPACES, IN, OUT)),
                ),
                "gralora_B": (
                    Rule((None, None, OUT), when=lambda case: case.shape[0] == 1),
                    Rule((None,) * 3, needs=_unmoved(SUBSPACES, IN, OUT)),
                ),
                "gralora_A_general.weight": (None, IN),
                "gralora_B_general.weight": (OUT, None),
            }
        ),
        way_out=CONVERT,
        remark="a `gralora_k` of 1 moves through any gauge",
    ),
    "HIRA": Method(
        _rules(
            {
                "hira_A": (None, IN.even),
                "hira_B": (OUT.even, None),
                "hira_embedding_A": (None, None),
                "hira_embedding_B": (OUT.even, None),
            }
        ),
        remark="it multiplies W entry by entry, so signs cancel",
    ),
    "HRA": Method(_rules({"hra_u": (IN, None)}), remark="reflections follow any orthogonal change"),
    "IA3": Method(
        _rules(
            {
                "ia3_l": (Rule((None, IN.even), when=_feedforward), Rule((OUT.even, None))),
            }
        )
    ),
    "LILY": Method(
        _rules(
            {
                "lily_A.weight": (None, IN),
                "lily_B.weight": (None, OUT),
                "lily_router.weight": (None, None),
            }
        ),
        whole_paths=True,
        remark="layers share factors; they are untied where their coordinates change differently",
    ),
    "LN_TUNING": Method(_rules({"ln_tuning_layers": (PARAMETER,)})),
    "LOHA": Method(
        _rules(
            {
                "hada_w1_a": (OUT, None),
                "hada_w1_b": (None, IN),
                "hada_w2_a": (OUT.even, None),
                "hada_w2_b": (None, IN.even),
            }
        ),
        remark="of two products that are multiplied entry by entry, one carries the signs",
    ),
    "LOKR": Method(
        _rules(
            {
                "lokr_w1": (
                    Rule((None, None), when=lambda case: case.shape == (1, 1)),
                    Rule((None, None), needs=_unmoved(KRONECKER, IN, OUT)),
                ),
                "lokr_w1_a": (
                    Rule((None, None), when=lambda case: case.shape[0] == 1),
                    Rule((None, None), needs=_unmoved(KRONECKER, OUT)),
                ),
                "lokr_w1_b": (
                    Rule((None, None), when=lambda case: case.shape[1] == 1),
                    Rule((None, None), needs=_unmoved(KRONECKER, IN)),
                ),
                "lokr_w2": (
                    Rule((OUT, IN), when=_whole),
                    Rule((None, None), needs=_unmoved(KRONECKER, IN, OUT)),
                ),
                "lokr_w2_a": (
                    Rule((OUT, None), when=lambda case: case.shape[0] == case.outputs()),
                    Rule((None, None), needs=_unmoved(KRONECKER, OUT)),
                ),
                "lokr_w2_b": (
                    Rule((None, IN), when=lambda case: case.shape[1] == case.inputs()),
                    Rule((None, None), needs=_unmoved(KRONECKER, IN)),
                ),
            }
        ),
        way_out=CONVERT,
        remark="a `decompose_factor` of 1 moves through any gauge",
    ),
    "MISS": Method(
        _rules(
            {
                "miss_block": (
                    Rule((None, OUT), when=_dense_miss, needs=_unmoved(MISS_REASON, IN)),
                    Rule(
                        (None, None),
                        when=lambda case: len(case.shape) == 2,
                        needs=_unmoved(MISS_REASON, IN, OUT),
                    ),
                    Rule((None,) * 3, needs=_unmoved(BLOCKS, IN, OUT)),
                )
            }
        ),
        way_out=CONVERT,
    ),
    "MULTITASK_PROMPT_TUNING": Method(
        {
            **PROMPT,
            **_rules(
                {
                    "prefix_task_cols": (None,) * 3,
                    "prefix_task_rows": (None, None, RESIDUAL.unsigned),
                }
            ),
        }
    ),
    "OFT": Method(
        _rules(
            {
                "oft_R.weight": Rule((None, None), needs=_unmoved(BLOCKS, IN)),
                "oft_embedding_R.weight": Rule((None, None), needs=_unmoved(BLOCKS, OUT)),
            }
        ),
        way_out=MERGE,
    ),
    "OSF": Method(
        _rules(
            {
                "osf_svd_params.U_low": (OUT, None),
                "osf_svd_params.S_low": (None,),
                "osf_svd_params.V_low": (None, IN),
            }
        ),
        remark="the base's leading singular part is taken out anew at loading, and moves with it",
    ),
    "PEANUT": Method(
        _rules(
            {
                "peanut_A.weight": (
                    Rule((None, OUT), when=_odd_activation),
                    Rule((None, OUT), needs=_unflipped(PEANUT_REASON, IN)),
                ),
                "peanut_B.weight": (OUT, None),
                "peanut_encoders.*.weight": (None, None),
                "peanut_decoders.*.weight": (None, None),
            }
        ),
        way_out=MERGE,
        remark="with an odd activation (tanh, linear) it moves through any gauge",
    ),
    "POLY": Method(
        _rules(
            {
                "poly_lora_A": (
                    Rule((None, None, IN, None), when=lambda case: case.shape[0] == 1),
                    Rule((None,) * 4, needs=_unmoved(BLOCKS, IN)),
                ),
                "poly_lora_B": (
                    Rule((None, None, None, OUT), when=lambda case: case.shape[0] == 1),
                    Rule((None,) * 4, needs=_unmoved(BLOCKS, OUT)),
                ),
                "poly_router.module_logits": (None, None),
            }
        ),
        remark="an `n_splits` of 1 moves through any gauge",
    ),
    "PREFIX_TUNING": Method(CACHED, remark="cached keys and values, head by head"),
    "PROMPT_TUNING": Method(PROMPT),
    "PVERA": Method(
        _rules({"pvera_lambda_b": (OUT,), "pvera_lambda_d": (None,)}),
        shared={"pvera_A": Rule((None, IN)), "pvera_B": Rule((OUT.even, None))},
        options={"save_projection": (lambda saved: not saved, f"its projection {SEEDED[3:]}")},
        way_out=MERGE,
    ),
    "P_TUNING": Method(PROMPT),
    "RANDLORA": Method(
        _rules({"randlora_lambda": (None, None), "randlora_gamma": (None, SMALL)}),
        shared={
            "randlora_A": Rule((None, None, SMALL.even)),
            "randlora_B": Rule((LARGE, None, None)),
        },
        options={"save_projection": (lambda saved: not saved, f"its projection {SEEDED[3:]}")},
        way_out=MERGE,
    ),
    "ROAD": Method(
        _rules(
            {
                "road_theta": Rule((None,), needs=_unmoved(ROTATION, OUT)),
                "road_alpha": Rule((None,), needs=_unmoved(ROTATION, OUT)),
            }
        ),
        way_out=MERGE,
    ),
    "SHADOW": Method(
        _rules(
            {
                "shadow_down.weight": READS,
                "shadow_up.weight": (RESIDUAL, None),
                "shadow_update_transform.0.weight": READS,
                "shadow_update_transform.0.bias": (None,),
                "shadow_update_transform.2.weight": (RESIDUAL, None),
                "shadow_update_transform.2.bias": (RESIDUAL,),
                "shadow_update_gate.0.weight": READS,
                "shadow_update_gate.0.bias": (None,),
                "shadow_update_gate.2.weight": (RESIDUAL.unsigned, None),
                "shadow_update_gate.2.bias": (RESIDUAL.unsigned,),
                "shadow_projection.weight": (RESIDUAL, None),
                "shadow_head.weight": READS,
            }
        ),
        remark="its own small backbone moves where it is as wide as the base",
    ),
    "SHIRA": Method({}, entries=(Entries("shira_indices", "shira_weight"),)),
    "SUPERTUNING": Method(
        _rules({"supertuning_lora_A.weight": (None, IN), "supertuning_lora_B.weight": (OUT, None)}),
        entries=(Entries("supertuning_indices", "supertuning_values", flat=True),),
        options={
            "save_precomputed_indices": (
                lambda saved: not saved,
                "the places of its values are not saved but ranked anew, and ties rank by order",
            )
        },
        way_out="save it again with save_precomputed_indices=True",
    ),
    "TINYLORA": Method(
        _rules(
            {
                "tinylora_A": (None, IN),
                "tinylora_B": (OUT, None),
                "tinylora_P": (None,) * 3,
                "tinylora_v.*": (None,),
            }
        ),
        embedding=_rules({"tinylora_A": (None, OUT), "tinylora_B": (IN, None)}),
    ),
    "TRAINABLE_TOKENS": Method(
        _rules(
            {
                "trainable_tokens_delta": Rule(
                    (None, COLUMN), needs=_unmoved("it names rows, which change places", OUT)
                ),
            }
        ),
        embedding=_rules({"trainable_tokens_delta": (None, COLUMN)}),
    ),
    "UNILORA": Method(
        _rules(
            {
                "unilora_indices_A": (None, IN.even),
                "unilora_scales_A": (None, IN),
                "unilora_indices_B": (OUT.even, None),
                "unilora_scales_B": (OUT, None),
                "unilora_theta_d": (None,),
            }
        ),
        options={
            "save_indices": (lambda saved: not saved, f"which number stands where {SEEDED[3:]}"),
        },
        way_out=f"save it with save_indices=True, or {CONVERT_EXACT}",
    ),
    "VERA": Method(
        _rules({"vera_lambda_b": (OUT,), "vera_lambda_d": (None,)}),
        shared={"vera_A": Rule((None, IN)), "vera_B": Rule((OUT.even, None))},
        options={"save_projection": (lambda saved: not saved, f"its projection {SEEDED[3:]}")},
        way_out=CONVERT_EXACT,
    ),
    "XLORA": Method(
        _rules(
            {
                "internal_xlora_classifier.layers.0.weight": READS,
                "internal_xlora_classifier.layers.*.weight": (None, None),
                "internal_xlora_classifier.layers.*.bias": (None,),
            }
        ),
        remark="the experts are adapters of their own and move with it, if they lie in its "
        "directory; peft 0.21 leaves out the classifier's first layer when it saves, and such a "
        "file is refused",
    ),
}
"""By PEFT type: how its tensors move."""

REFUSALS: Mapping[str, Refusal] = {
    "ADAMSS": Refusal(
        "which output coordinates belong to which of its subspaces is not saved: it is clustered "
        "anew from the base weights by a seeded SVD and k-means, which do not commute with signed "
        "permutations",
        MERGE,
    ),
    "FOURIERFT": Refusal(
        "its update is a sum of a few Fourier modes over coordinate indices, chosen by a seed; a "
        "permuted mode is no Fourier mode",
        CONVERT,
    ),
    "FROD": Refusal(
        "one of its two bases is not saved but decomposed anew from the base weights, whose "
        "singular vectors have arbitrary signs, and the other is shared by all layers",
        MERGE,
    ),
    "PSOFT": Refusal(
        "it saves numbers in the basis of W's singular vectors and not the basis, whose signs are "
        "arbitrary and come out otherwise on the moved W",
        CONVERT_EXACT,
    ),
    "VBLORA": Refusal(
        "all modules share one bank of vectors, each a run of neighbouring coordinates, which "
        "permutations split",
        CONVERT_EXACT,
    ),
    "WAVEFT": Refusal(
        "its update is a sum of a few wavelets over coordinate indices, chosen by a seed; a "
        "permuted wavelet is no wavelet",
        MERGE,
    ),
}
"""By PEFT type: why it cannot be moved."""
