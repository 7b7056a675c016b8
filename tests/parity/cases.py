"""The parity table: named cases by number of ranks.

To add a row, write a :func:`case` into the table of its kind, under its number of ranks: a name that no other
case has, the family, its rows (:data:`MIXED_ROWS` if left out), and the settings that differ from one rank
with everything trained (fields of :class:`.training.TableCase`). ``make test`` runs the cases written with
:func:`quick`: few that together have every setting of :data:`PLAIN_CASES`, a training in every way to divide
a step's work, each family in the ways that meet its own code, and YaRN with TP, PP, CP and EP. ``make
test-full`` runs all. The support matrix (:mod:`.matrix`) counts them by itself.
"""

from typing import Any

FOUR = ["image", "text", "two_images", "video"]
"""Four samples, as one row or as four."""
MIXED_ROWS = [
    ["mixed", "text"],
    ["image_between", "short_text"],
    ["two_images"],
    ["text", "short_text", "video"],
]
TEXT_LAST = [["image", "text"], ["two_images"], ["video", "text"], ["text", "short_text"]]
"""With two data-parallel ranks, the last micro-batch of the second rank has no image."""
TEXT_ONE_RANK = [["text"], ["short_text"], ["image"], ["mixed", "text"]]
"""With two data-parallel ranks, the first has no image at all."""
TEXT_ALL = [["text"], ["text", "short_text"], ["short_text"], ["text"]]
BETWEEN = [["video_between", "text"], ["video"], ["mixed"], ["short_text", "image"]]
"""Images with a video between them, and a video alone."""
WITHOUT_LOSS = [["image", "without_loss"], ["without_loss"], ["text", "short_text"], ["without_loss"] * 2]
"""With one or two data-parallel ranks, the last micro-batch has no loss token."""
FULL = {"language": "full", "vision": "full"}
SELECTIVE = {"language": "selective", "language_modules": ["core_attn", "mlp"]}
ACTIVATION = {"language": "selective", "language_modules": ["activation"], "vision": "activation"}

TRAINING = [MIXED_ROWS, TEXT_LAST, MIXED_ROWS]
FEW_TOWERS = [TEXT_ONE_RANK, TEXT_ALL, MIXED_ROWS]
"""With two data-parallel ranks, one, both and none skip the tower."""
TWICE = [MIXED_ROWS] * 2
SEVERAL = [TEXT_LAST, MIXED_ROWS]
NO_LOSS = [WITHOUT_LOSS] * 2
TP2_SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
THREE_WAYS = TP2_SP | {"pp": 2, "vpp": 2, "overlap": True}
EMPTY: dict[str, Any] = {"layers": [2, 0, 0, 2], "overlap": True}
SMALL_BUCKETS: dict[str, Any] = {"overlap": True, "bucket_size": 10_000}
TRAIN: dict[str, Any] = {"steps": TRAINING, "train": True}
TRAINED: dict[str, Any] = {"tied": True, **TP2_SP, "pp": 2, "vpp": 2, **SMALL_BUCKETS}
UNTIED = TRAINED | {"tied": False}
PLAIN = {"distributed_optimizer": False}
NO_LANGUAGE = {"freeze": ["language"]}
NO_VISION = {"freeze": ["vision", "merger"]}
MERGER_ALONE = {"freeze": ["vision", "language"]}

Q2, Q25, Q3, MOE = "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"
Q35, MOE35 = "qwen3_5", "qwen3_5_moe"

SEEDS = {MOE: 11, Q35: 11, MOE35: 11}
"""Seeds of the random weights. If two experts are nearly tied, rounding decides which one a token goes to,
and nothing can be compared. With this seed, the last chosen expert's logit exceeds the next one's by at least
1.3e-4 in all cases, including training (23,440 decisions; rounding is 1e-6); with seed 0, by 1.8e-6.

Small Qwen3.5 with tied embeddings and seed 0 turns one rounding of its weights into 1e-2 of its moments
after four steps, in ``transformers`` alone. With this seed, that is 1.4e-4 (without tied embeddings 4e-5)."""


def case(name: str, family: str = Q25, steps: list[Any] | None = None, **layout: Any) -> dict[str, Any]:
    return {"name": name, "family": family, "tied": False, "steps": steps or [MIXED_ROWS], **layout}


QUICK: set[str] = set()
"""The names of the cases that ``make test`` runs."""


def quick(name: str, *args: Any, **layout: Any) -> dict[str, Any]:
    QUICK.add(name)
    return case(name, *args, **layout)


ONE_IMAGE = [[["image"], ["text"]], [["text"], ["short_text"]], [["text", "image"], ["text"]]]
"""Fewer images in a step than ranks, and none at all."""

DECOUPLED: dict[int, list[dict[str, Any]]] = {
    1: [case("One rank, decoupled, qwen3_5", Q35, patches=64, steps=[[FOUR]])],
    2: [
        case("PP2, decoupled, qwen2_vl", Q2, pp=2),
        case("PP2, decoupled, few images", pp=2, steps=ONE_IMAGE, overlap=True),
        case("PP2, decoupled, few images, language frozen", pp=2, steps=ONE_IMAGE, **NO_LANGUAGE),
        case("PP2, decoupled, vision frozen", pp=2, freeze=["vision"], patches=32),
        case("PP2, decoupled, vision and merger frozen", pp=2, **NO_VISION),
        case("PP2, decoupled, merger alone, qwen3_vl", Q3, pp=2, **MERGER_ALONE),
        case("PP2, decoupled, tied, full recompute", tied=True, pp=2, layers=[3, 1], recompute=FULL),
        case("PP2 x VPP2, decoupled, qwen3_vl", Q3, pp=2, vpp=2, patches=64, steps=[BETWEEN]),
        case("TP2 + SP, decoupled, qwen3_vl, tied", Q3, tied=True, **TP2_SP),
        case("EP2, experts, decoupled", MOE, ep=2),
        case(
            "PP2, decoupled, few images, language frozen, qwen3_5", Q35, pp=2, steps=ONE_IMAGE, **NO_LANGUAGE
        ),
        case("TP2 + SP, ETP2, decoupled, qwen3_5 with experts", MOE35, **TP2_SP, etp=2),
        quick("training, PP2, decoupled, overlap", pp=2, **TRAIN, overlap=True),
        case("training, DP2, decoupled, the tower skipped", steps=FEW_TOWERS, train=True, **SMALL_BUCKETS),
        case("training, PP2, decoupled, tied, plain optimizer", tied=True, pp=2, **TRAIN, **PLAIN),
    ],
    4: [
        case("training, TP2 x PP2 x VPP2 + SP, decoupled, tied, qwen3_5", Q35, **TRAIN, **TRAINED),
        case("PP4, decoupled, qwen3_vl", Q3, pp=4, steps=[BETWEEN]),
    ],
}

YARN = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    | {"beta_fast": 1.0, "beta_slow": 0.0125}
}
"""Positions of videos and of what follows them are up to 10 times the original length. Of the few frequencies
of a small head, the first stays, the next one or two are divided in part, and the others by the factor."""

EDGE_TOKENS = 192
"""Length of rows that ranks share: the edges of their parts are at 96, or at 48, 96 and 144."""
ON_EDGES = [
    ["text", "text", "short_text", "short_text", "image"],
    ["text", "text", "short_text", "short_text", "short_text", "short_text", "image"],
    ["word", "words", "image", "word", "short_text", "video", "words", "word"],
    ["text", "short_text", "words"] * 4,
]
"""The first image crosses an edge amid its windows; a document ends on an edge; the video crosses an edge and
some documents have 1 to 3 tokens; every rank has several documents, and none an image. In all but the last,
the last ranks have only padding."""
SHARED = [ON_EDGES, TEXT_ALL, MIXED_ROWS]
MANY = [[["short_text", "words", "words"] * 560 + ["image", "words"] * 8 + ["video"]]]
"""As many documents as a row of 1,048,576 tokens has, small ones."""
ONE_OF_TWO = {"heads": 2, "kv_heads": 1}
TWO_HEADS = {**ONE_OF_TWO, "mrope_section": (4, 6, 6)}
THREE_HEADS = {"heads": 3, "kv_heads": 1, "mrope_section": (4, 6, 6)}
"""Sizes of models with fewer heads than ranks. Then ranks gather keys and values."""

CONTEXT: dict[int, list[dict[str, Any]]] = {
    2: [
        case("CP2, qwen2_vl", Q2, steps=SHARED),
        case("CP2, language frozen, overlap", steps=SHARED, **NO_LANGUAGE, overlap=True),
        case("CP2, vision frozen, qwen3_vl", Q3, steps=SHARED, freeze=["vision"]),
        case("CP2, vision and merger frozen", steps=SHARED, **NO_VISION),
        case("CP2, merger alone, qwen3_vl", Q3, steps=SHARED, **MERGER_ALONE, overlap=True),
        case("CP2, full recompute, tied, qwen3_vl", Q3, steps=[ON_EDGES], tied=True, recompute=FULL),
        case("CP2, decoupled", steps=SHARED, decoupled=True, patches=32),
        case("CP2, EP2, experts, overlap", MOE, ep=2, steps=SHARED[:2], overlap=True),
        quick("CP2, EP2, qwen3_5 with experts, overlap", MOE35, ep=2, steps=SHARED[:2], overlap=True),
        quick("training, CP2, overlap", steps=[MIXED_ROWS, WITHOUT_LOSS], train=True, **SMALL_BUCKETS),
        case("training, CP2, tied, plain optimizer, qwen3_vl", Q3, tied=True, **TRAIN, **PLAIN),
        case("CP2 beyond the heads, qwen3_vl", Q3, sizes=THREE_HEADS, steps=SHARED),
        quick("CP2, YaRN, qwen3_5", Q35, steps=[ON_EDGES], recompute=SELECTIVE, **YARN),
    ],
    4: [
        quick("CP4 beyond the heads, qwen3_vl", Q3, sizes=ONE_OF_TWO, cp=4, steps=SHARED[:2]),
        case("CP4 above the key/value heads, qwen3_5", Q35, cp=4, steps=SHARED),
        case("CP4, EP2, experts", MOE, cp=4, ep=2, steps=[ON_EDGES]),
        case("CP4, EP2, qwen3_5 with experts", MOE35, cp=4, ep=2, steps=[ON_EDGES]),
        case("CP4, decoupled, qwen3_vl", Q3, cp=4, steps=SHARED, decoupled=True),
        case("CP2 x PP2 x VPP2, overlap, qwen3_vl", Q3, pp=2, vpp=2, steps=SHARED, overlap=True),
        case("CP2 x DP2, EP4, experts", MOE, ep=4, steps=[ON_EDGES]),
        case("CP2 x TP2 + SP, ETP2, experts", MOE, **TP2_SP, etp=2, steps=[ON_EDGES]),
        case("CP2 x PP2, qwen3_5 with experts", MOE35, pp=2, steps=[ON_EDGES]),
        case("CP2 x PP2, decoupled", pp=2, steps=SHARED, decoupled=True, patches=64),
        case("CP4 beyond the heads, qwen2_5_vl", sizes=TWO_HEADS, cp=4, steps=SHARED),
        case("CP2 x TP2 + SP beyond the heads", sizes=TWO_HEADS, **TP2_SP, steps=SHARED, overlap=True),
    ],
    8: [
        case("CP8 beyond the heads, qwen2_5_vl", cp=8, steps=SHARED[:2]),
        case("CP8 beyond the heads, qwen3_5", Q35, cp=8, steps=SHARED),
        case("CP4 x TP2 + SP beyond the heads", cp=4, **TP2_SP, steps=SHARED),
        *(
            case(f"CP8, 1,697 documents, YaRN, {family}", family, cp=8, seq_len=10_240, steps=MANY, **YARN)
            for family in (Q3, Q35)
        ),
    ],
}
"""Cases of context parallelism. Their images, videos and documents cross the edges of the ranks' parts."""

HYBRID: dict[int, list[dict[str, Any]]] = {
    1: [
        quick("selective recompute, qwen3_5", Q35, recompute=SELECTIVE, steps=[[FOUR]]),
        case("vision and merger frozen, qwen3_5", Q35, **NO_VISION),
        case("merger alone, qwen3_5", Q35, **MERGER_ALONE),
        case("activation recompute, qwen3_5", Q35, recompute=ACTIVATION),
        case("vision frozen, qwen3_5 with experts", MOE35, freeze=["vision"]),
        case("vision and merger frozen, qwen3_5 with experts", MOE35, **NO_VISION),
        case("merger alone, qwen3_5 with experts", MOE35, **MERGER_ALONE),
        case("activation recompute, qwen3_5 with experts", MOE35, recompute=ACTIVATION),
        case("full recompute, qwen3_5 with experts", MOE35, recompute=FULL),
        case("selective recompute, qwen3_5 with experts", MOE35, recompute=SELECTIVE),
    ],
    2: [
        case("TP2 + SP, qwen3_5, tied, full recompute", Q35, tied=True, **TP2_SP, recompute=FULL),
        quick("PP2 x VPP2, qwen3_5, empty chunk", Q35, pp=2, vpp=2, layers=[0, 1, 1, 2], overlap=True),
        case("training, DP2, qwen3_5, overlap", Q35, **TRAIN, **SMALL_BUCKETS),
        case("EP2, YaRN, qwen3_5 with experts, overlap", MOE35, ep=2, overlap=True, steps=SEVERAL, **YARN),
        quick("TP2 + SP, ETP2, qwen3_5 with experts", MOE35, **TP2_SP, etp=2),
        case("TP2, qwen3_5, selective recompute", Q35, tp=2, recompute=SELECTIVE),
        case("TP2, qwen3_5, rows without loss, overlap", Q35, tp=2, overlap=True, steps=NO_LOSS),
        case("PP2, qwen3_5, vision frozen", Q35, pp=2, freeze=["vision"]),
        case("training, DP2, qwen3_5, no distributed optimizer", Q35, **TRAIN, **PLAIN),
        case("PP2 x VPP2, qwen3_5 with experts, empty chunk", MOE35, pp=2, vpp=2, layers=[0, 1, 1, 2]),
        case("EP2, qwen3_5 with experts, rows without loss", MOE35, ep=2, overlap=True, steps=NO_LOSS),
        case("TP2 + SP, ETP2, qwen3_5 with experts, language frozen", MOE35, **TP2_SP, etp=2, **NO_LANGUAGE),
        case("training, DP2, qwen3_5 with experts, no distributed optimizer", MOE35, **TRAIN, **PLAIN),
    ],
    4: [
        case("TP4 above the key/value heads + SP, qwen3_5", Q35, tp=4, sequence_parallel=True),
        case("PP4, qwen3_5", Q35, pp=4),
        case("EP4 x TP2 + SP, qwen3_5 with experts", MOE35, **TP2_SP, ep=4),
        case("TP2 x PP2 x VPP2 + SP, qwen3_5 with experts", MOE35, **UNTIED, steps=TWICE),
    ],
}

PLAIN_CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        quick("vision frozen", freeze=["vision"]),
        quick("merger alone", **MERGER_ALONE),
        case("selective recompute", recompute=SELECTIVE),
        case("training, qwen2_vl", Q2, **TRAIN),
        quick("vision and merger frozen, qwen3_vl", Q3, **NO_VISION),
        quick("activation recompute, qwen2_vl", Q2, recompute=ACTIVATION),
        case("activation recompute, qwen3_vl", Q3, recompute=ACTIVATION),
        case("full recompute, qwen3_vl", Q3, recompute=FULL),
        quick("language frozen, experts", MOE, **NO_LANGUAGE),
        case("selective recompute, experts", MOE, recompute=SELECTIVE),
        case("overlap, text first", steps=[[["text"]], [["image"]], [["text", "mixed"]]], overlap=True),
    ],
    2: [
        quick("TP2 + SP, rows without loss, overlap", **TP2_SP, overlap=True, steps=NO_LOSS),
        quick("TP2 + SP, logits of every token", **TP2_SP, seq_len=128, steps=[[["text"], ["image"]]]),
        case("TP2 + SP, language frozen", **TP2_SP, **NO_LANGUAGE),
        quick("PP2, YaRN", pp=2, **YARN),
        quick("TP2, selective recompute", tp=2, recompute={"language": "selective"}),
        case("TP2 + SP, activation recompute", **TP2_SP, recompute=ACTIVATION),
        case("PP2, no decoder layer on the first stage", pp=2, layers=[0, 4]),
        case("PP2 x VPP2, tied, rows without loss", tied=True, pp=2, vpp=2, overlap=True, steps=NO_LOSS),
        case(
            "DP2, overlap, text between", steps=[TEXT_LAST, [["text"]] * 4, TEXT_LAST], overlap=True, **PLAIN
        ),
        case("DP2, qwen2_vl, overlap", Q2, steps=SEVERAL, overlap=True),
        quick("training, DP2, overlap, the tower skipped", steps=FEW_TOWERS, train=True, **SMALL_BUCKETS),
        quick("training, DP2, tied, no distributed optimizer", tied=True, **TRAIN, **PLAIN),
        case("PP2, qwen3_vl, language frozen", Q3, pp=2, **NO_LANGUAGE),
        case("DP2, qwen3_vl, merger alone, overlap", Q3, steps=SEVERAL, overlap=True, **MERGER_ALONE),
        case("EP2, experts, without distributed optimizer", MOE, ep=2, **PLAIN),
        case("EP2, experts, vision frozen", MOE, ep=2, freeze=["vision"], steps=SEVERAL, overlap=True),
        quick("TP2 + SP, EP2, YaRN, experts", MOE, **TP2_SP, ep=2, steps=[BETWEEN], **YARN),
        quick("PP2 uneven, experts, full recompute", MOE, tied=True, pp=2, layers=[1, 3], recompute=FULL),
        case("training, PP2 x VPP2, experts, empty chunks", MOE, pp=2, vpp=2, **EMPTY, **TRAIN),
    ],
    4: [
        *(case(f"TP2 x PP2 x VPP2 + SP, {name}", name, **THREE_WAYS, steps=TWICE) for name in (Q25, Q2)),
        quick("TP4 above the key/value heads + SP", tp=4, sequence_parallel=True),
        quick("PP4", pp=4),
        case("EP2 x PP2 x VPP2, experts, tied", MOE, tied=True, pp=2, vpp=2, ep=2),
        quick("EP4 x TP2 + SP, experts", MOE, **TP2_SP, ep=4),
        case("TP2 x PP2 x VPP2 + SP, experts", MOE, **THREE_WAYS, steps=TWICE),
        case("training, EP2 x PP2, experts", MOE, pp=2, ep=2, layers=[1, 3], **SMALL_BUCKETS, **TRAIN),
        quick("training, EP2 x TP2 + SP, ETP2, experts", MOE, **TP2_SP, ep=2, etp=2, **TRAIN),
        case("training, PP4, experts, empty stages", MOE, pp=4, **EMPTY, **TRAIN),
        case("TP2 x PP2 x VPP2 + SP, qwen3_vl, uneven", Q3, **TRAINED, layers=[0, 2, 1, 1], steps=[BETWEEN]),
        quick("training, TP2 x PP2 x VPP2 + SP, qwen3_vl", Q3, **TRAIN, **TRAINED),
    ],
}
"""Cases of softmax attention in whole rows, with the tower on the first stage."""
CASES = {
    ranks: [
        *PLAIN_CASES.get(ranks, []),
        *HYBRID.get(ranks, []),
        *({"cp": 2, "seq_len": EDGE_TOKENS} | entry for entry in CONTEXT.get(ranks, [])),
        *(entry | {"decoupled": True} for entry in DECOUPLED.get(ranks, [])),
    ]
    for ranks in (1, 2, 4, 8)
}
