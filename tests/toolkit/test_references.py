"""References that layouts share are computed once for equal inputs and again for any difference."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_vl.spec.families import read_spec
from toolkit.parity import reference
from toolkit.parity.random_samples import make_sample


def test_samples_that_differ_anywhere_have_other_fingerprints(tiny_checkpoint) -> None:
    spec = read_spec(tiny_checkpoint("qwen2_5_vl"))
    image, text = make_sample("image", spec, 0), make_sample("text", spec, 0)
    other_mask = dataclasses.replace(text, loss_mask=~text.loss_mask)
    item = image.media_items[0]
    other_pixel = item.planes.clone()
    other_pixel.view(-1)[7] ^= 1
    other_picture = dataclasses.replace(image, media_items=[dataclasses.replace(item, planes=other_pixel)])
    batches = [
        [image, text],
        [text, image],
        [image],
        [image, other_mask],
        [other_picture, text],
        [make_sample("image", spec, 1)],
    ]

    assert len({reference.samples_fingerprint(batch) for batch in batches}) == len(batches)
    assert reference.samples_fingerprint(
        [make_sample("image", spec, 0), text]
    ) == reference.samples_fingerprint(batches[0])


def test_the_latest_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_cached_results", {})
    monkeypatch.setattr(reference, "MAX_CACHED_RESULTS", 2)
    computed: list[str] = []

    def ask(name: str) -> str:
        return reference.cached_result((name,), lambda: computed.append(name) or name.upper())

    assert [ask(name) for name in "abacabb"] == list("ABACABB")
    assert computed == ["a", "b", "c", "b"]
