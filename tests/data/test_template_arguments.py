"""Arguments of the chat template: of a run, of a record, in states, sizes and exports."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from converters.convert import convert_weights, export_weights
from data_tools.formats import RecordError, read_conversation
from megatron_vl.config import DataConfig
from megatron_vl.data.sample.chat import ChatEncoder, ChatError, ChatTemplateError
from megatron_vl.data.source.dataset_description import read_description
from megatron_vl.data.source.sample_sizes import compute_tokenization_id, missing_sizes_advice
from megatron_vl.data.state_json import LoaderStateError
from megatron_vl.spec.families import read_spec
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE
from tests.data.datasets import converted, open_loader
from tests.data.test_thinking import (
    GOLDEN,
    HI,
    HM,
    LATER,
    NEXT,
    OPEN,
    PLAIN,
    QUESTION,
    TEMPLATES,
    THINK,
    THOUGHT,
    pieces,
    thinking_encoder,
)
from tests.support.tiny_run import metrics, prepare, trainings
from tests.tiny import tiny_checkpoint
from toolkit.generate.answers import with_trained_media

PRESERVE = {"preserve_thinking": True}


def encoder(**arguments: object) -> ChatEncoder:
    """With the released template of Qwen3.6."""
    return thinking_encoder(LATER, template_arguments=arguments)


def test_earlier_thinking_is_trained_on_if_the_template_keeps_it() -> None:
    messages, _, dropped = GOLDEN["several turns"]
    kept = [(HI + OPEN + THINK, 0), (HM, 1), *dropped[2:]]
    assert pieces(encoder(**PRESERVE), messages) == kept

    ours = encoder()
    given = {"chat_template": ours.chat_template, "tokenize": False, **PRESERVE}
    rendered = ours.tokenizer.apply_chat_template(messages, **given)
    assert rendered.count("<think>") == 2
    for given in (PRESERVE, {**PRESERVE, "enable_thinking": False}):
        assert encoder(**given).render_conversation(messages) == rendered

    # A record's own arguments come first, and the others of the run stay.
    ids, mask = ours.encode(messages, [], template_arguments=PRESERVE)
    assert ids.tolist() == ours.tokenizer(rendered)["input_ids"]
    own = encoder(**PRESERVE).encode(messages, [], template_arguments={"preserve_thinking": False})
    assert [each.tolist() for each in own] == [each.tolist() for each in ours.encode(messages, [])]
    assert int(mask.sum()) == int(own[1].sum()) + 5


@pytest.mark.parametrize("name", ["keep_thinking", "messages", "tools", "add_generation_prompt"])
def test_argument_that_is_not_the_templates_is_refused(name) -> None:
    with pytest.raises(ChatError, match=rf"data\.template_arguments: .* never reads {name}; it"):
        encoder(**{name: True})
    with pytest.raises(ChatTemplateError, match=r"chat_template_kwargs: .* it reads .*preserve_thinking"):
        encoder().encode([QUESTION, PLAIN], [], template_arguments={name: True})


def test_arguments_of_a_record_are_an_object() -> None:
    record = {"messages": [QUESTION, PLAIN]}
    vision = ('{"add_vision_id": true}', {"add_vision_id": True})
    for written, arguments in ((PRESERVE, PRESERVE), vision, ({"a": None}, {}), (None, {})):
        read = read_conversation(record | {"chat_template_kwargs": written})
        assert read.template_arguments == arguments and not read.ignored_keys
    for written in ([1], "yes", True):
        with pytest.raises(RecordError) as caught:
            read_conversation(record | {"chat_template_kwargs": written})
        assert caught.value.field_path == "chat_template_kwargs"


def test_arguments_belong_to_sizes_and_states(tmp_path) -> None:
    """Qwen2.5-VL's template numbers images, which makes samples longer."""
    hf = tiny_checkpoint("qwen2_5_vl")
    out, _ = converted(tmp_path, [{"messages": [QUESTION, PLAIN]}] * 4)
    without = DataConfig(path=str(out), seq_len=256, num_workers=0)
    numbered = replace(without, template_arguments={"add_vision_id": True})
    spec = read_spec(hf)
    assert compute_tokenization_id(hf, spec, without) != compute_tokenization_id(hf, spec, numbered)
    advice = missing_sizes_advice(read_description(numbered.path), hf, numbered)
    assert """ --data.template_arguments '{"add_vision_id": true}'`""" in advice

    state = open_loader(without, hf).state_dict()
    del state["identity"]["template_arguments"]  # as version 0.2.0 wrote it
    open_loader(without, hf).load_state_dict(state)
    with pytest.raises(LoaderStateError, match=r"set data\.template_arguments back"):
        open_loader(numbered, hf).load_state_dict(state)


@pytest.mark.ranks
def test_run_and_its_export_name_the_arguments(tmp_path) -> None:
    """Those of the run, also none: they replace those of the export with which the run began. A resume with
    others is refused."""
    prepared = prepare(tmp_path / "prepared", tiny_checkpoint("qwen2_5_vl", dtype=torch.float32), samples=4)
    path, _ = converted(tmp_path, [{"messages": [QUESTION, THOUGHT, NEXT, PLAIN]}])
    data = DataConfig(path=str(path), chat_template=f"{TEMPLATES / LATER}.chat_template.jinja")
    for arguments in (PRESERVE, {}):  # else each run does it
        open_loader(replace(data, template_arguments=arguments), prepared["hf"])
    options = f"--data.path {path} --data.chat_template {data.chat_template}"
    options += " --data.seq_len 80 --optimizer.warmup_steps 0 --global_batch_size 1 --data.num_workers 0"

    def start(name: str, steps: int, **arguments: object) -> tuple[Path, list[str]]:
        words = [*options.split(), "--steps", str(steps), "--data.template_arguments", json.dumps(arguments)]
        return tmp_path / name, words

    def exported(name: str, hf: Path) -> tuple[Path, dict]:
        export_weights(tmp_path / name / "step_00000001", hf, tmp_path / f"{name}_hf")
        return tmp_path / f"{name}_hf", json.loads((tmp_path / f"{name}_hf" / EXPORT_FACTS_FILE).read_text())

    starts = start("first", 1, **PRESERVE), start("first", 2), start("second", 1)
    refused = trainings(prepared, *starts)[1]
    assert f"saved with template_arguments = {PRESERVE}, this loader has {{}}" in refused
    run_json = json.loads((tmp_path / "first/step_00000001/run.json").read_text())
    assert run_json["fields"]["data.template_arguments"] == PRESERVE
    first, facts = exported("first", prepared["hf"])
    assert facts["template_arguments"] == PRESERVE
    assert with_trained_media(DataConfig(), first).template_arguments == PRESERVE
    convert_weights(first, tmp_path / "again")
    export_weights(tmp_path / "again", prepared["hf"], tmp_path / "back")
    again = json.loads((tmp_path / "back" / EXPORT_FACTS_FILE).read_text())
    assert again["template_arguments"] == facts["template_arguments"]

    _, facts = exported("second", first)
    assert "template_arguments" not in facts
    # Each character is a token, except for "hi". "Hm.", the end of the block and three breaks are 13.
    trained = {name: metrics(tmp_path / name)[0]["loss_tokens"] for name in ("first", "second")}
    assert trained == {"first": 13 + len("No.|Yes.|"), "second": len("No.|Yes.|")}
