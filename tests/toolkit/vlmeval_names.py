"""Prints the data sets of the installed VLMEvalKit, in the form of ``toolkit/evaluate/names.json``.

python -m tests.toolkit.vlmeval_names > toolkit/evaluate/names.json
"""

from __future__ import annotations

import json
from typing import Any


def parts_of(name: str) -> tuple[str, list[str]]:
    """The parts of a data set in VLMEvalKit: its kind, and the names of its tables or repositories."""
    from vlmeval.dataset import DATASET_CLASSES, ConcatDataset, ConcatVideoDataset, supported_video_datasets

    if name in ConcatDataset.DATASET_SETS:
        return "tables", list(ConcatDataset.DATASET_SETS[name])
    made = supported_video_datasets.get(name)
    if made is not None:
        base = str(made.keywords.get("dataset", name))
        kind = made.func
    else:
        base = name
        kind = next(one for one in DATASET_CLASSES if name in one.supported_datasets())
    if getattr(kind, "MODALITY", "IMAGE") != "VIDEO":
        return "table", [name]
    parts = kind.DATASET_SETS.get(base, [base]) if issubclass(kind, ConcatVideoDataset) else [base]
    return "video", list(dict.fromkeys([base, *parts]))


def names() -> dict[str, Any]:
    """``table``: names of single tables; ``tables`` and ``video``: name -> parts."""
    from vlmeval.dataset import SUPPORTED_DATASETS, ConcatDataset, supported_video_datasets

    found: dict[str, Any] = {"table": [], "tables": {}, "video": {}}
    for name in sorted({*SUPPORTED_DATASETS, *supported_video_datasets, *ConcatDataset.DATASET_SETS}):
        kind, parts = parts_of(name)
        if kind == "table":
            found["table"].append(name)
        else:
            found[kind][name] = parts
    return found


if __name__ == "__main__":
    print(json.dumps(names(), indent=0))
