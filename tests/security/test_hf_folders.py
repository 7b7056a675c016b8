"""Untrusted Hugging Face folders: pickles, code of their own, templates, names that lead away."""

import ast
import builtins
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from converters.compare import compare_weights
from converters.convert import convert_weights, export_weights
from megatron_vl.config import DataConfig
from megatron_vl.data.sample.chat import ChatEncoder, ChatError
from megatron_vl.data.sample.pixel_settings import read_pixel_settings
from megatron_vl.spec.families import ConfigError, read_spec
from megatron_vl.weights.tensor_files import WeightsError
from toolkit.common.hf_loading import check_hf_folder, load_hf_model, load_hf_processor
from toolkit.demo.reference import DemoReference
from toolkit.evaluate.checkpoint_model import CheckpointModel
from toolkit.parity.reference import load_hf_for_training

from .payload import calls_of, edit

MESSAGES = [{"role": "user", "content": "What is this?"}, {"role": "assistant", "content": "A cat."}]
ASKED = {"dtype": "float32", "min_pixels": None, "max_pixels": None, "max_new_tokens": (2, 2)}
ROOT = Path(__file__).resolve().parents[2]


def use_all_of(hf: Path, out: Path) -> None:
    """Runs everything that opens a Hugging Face folder, once."""
    convert_weights(hf, out / "full", workers=1)
    export_weights(out / "full", hf, out / "back", workers=1)
    assert not compare_weights(hf, out / "back").differences
    ChatEncoder(hf, read_spec(hf)).encode(MESSAGES, [])
    read_pixel_settings(hf, DataConfig(path="unused"))
    load_hf_for_training(hf)
    DemoReference(hf, video_fps=2.0, video_max_frames=4)
    image = out / "image.png"
    Image.new("RGB", (56, 56)).save(image)
    model = CheckpointModel(hf, ASKED, [out])
    question = [{"type": "image", "value": str(image)}, {"type": "text", "value": "What?"}]
    model.answerer.answer(model.encode(question))


@pytest.mark.parametrize("renamed", [False, True])
def test_weights_that_are_pickled_are_refused(hf, mark, tmp_path, renamed):
    """Also a pickle that is named safetensors."""
    for file in [*hf.glob("*.safetensors"), *hf.glob("*.index.json")] if not renamed else ():
        file.unlink()
    mark.torch(min(hf.glob("*.safetensors"), default=hf / "pytorch_model.bin"))
    message = r"model-.*\.safetensors is not a whole" if renamed else "only safetensors weights are read"
    for use in (
        lambda: convert_weights(hf, tmp_path / "full"),
        lambda: load_hf_model(hf, torch.float32),
        lambda: load_hf_for_training(hf),
    ):
        with pytest.raises((FileNotFoundError, WeightsError), match=message):
            use()


@pytest.mark.parametrize("field", ["adapter", "transformers_weights"])
def test_other_weights_than_the_folders_are_refused(hf, mark, field):
    """Both fields make transformers open files that the checks have not seen."""
    (hf / "adapter_model.bin").write_bytes(mark.pickle())
    if field == "adapter":
        adapter = {"base_model_name_or_path": "/somewhere", "peft_type": "LORA"}
        (hf / "adapter_config.json").write_text(json.dumps(adapter))
    else:
        edit(hf / "config.json", transformers_weights="adapter_model.bin")
    with pytest.raises(ConfigError, match=field):
        load_hf_model(hf, torch.float32)


def test_code_of_the_folder_is_not_executed(hf, mark, tmp_path, monkeypatch):
    """Not even if a user at the terminal would say yes. Pickles beside the weights are not opened."""
    monkeypatch.setattr(builtins, "input", lambda *question: "y")
    saved = "pytorch_model.bin model.pt consolidated.00.pth training_args.bin optimizer.pt scheduler.pt"
    for name in saved.split():
        mark.torch(hf / name)
    for name in "rng_state.pth tokenizer.pkl vocab.pkl adapter_model.bin spiece.model tf_model.h5".split():
        (hf / name).write_bytes(mark.pickle())
    index = {"weight_map": {"lm_head.weight": "pytorch_model.bin"}}
    (hf / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for name in "evil.py modeling_evil.py custom_generate/generate.py tokenizer.py processing.py".split():
        (hf / name).parent.mkdir(exist_ok=True)
        (hf / name).write_text(mark.python)

    named: dict[str, object] = {f"Auto{kind}Processor": "evil.Processor" for kind in ("", "Image", "Video")}
    named |= {"AutoConfig": "evil.Config", "AutoModelForImageTextToText": "evil.Model"}
    named |= {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    for file in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        edit(hf / file, auto_map=named)
    edit(hf / "generation_config.json", custom_generate=str(hf))
    use_all_of(hf, tmp_path)


NEEDS_CODE = {
    "config.json": ("model_type", "evil", {"AutoConfig": "evil.Config"}),
    "tokenizer_config.json": ("tokenizer_class", "Evil", {"AutoTokenizer": ["evil.Tokenizer"] * 2}),
    "preprocessor_config.json": ("processor_class", "Evil", {"AutoProcessor": "evil.Processor"}),
}


@pytest.mark.parametrize("file", NEEDS_CODE)
def test_folder_that_needs_its_own_code_is_refused_or_read_without_it(hf, mark, tmp_path, monkeypatch, file):
    monkeypatch.setattr(builtins, "input", lambda *question: "y")
    (hf / "evil.py").write_text(mark.python)
    field, name, auto_map = NEEDS_CODE[file]
    edit(hf / file, **{field: name, "auto_map": auto_map})
    try:
        use_all_of(hf, tmp_path)
    except (ValueError, AttributeError, OSError) as error:
        assert "evil" in str(error).lower() or "custom code" in str(error)
    else:
        assert file != "config.json"


def test_from_pretrained_forbids_remote_code_everywhere():
    """Without the argument, transformers asks at the terminal and runs the code if the answer is yes.

    A whole processor would load the models that its file names.
    """
    loaders = {"AutoTokenizer", "AutoImageProcessor", "AutoVideoProcessor", "AutoModelForImageTextToText"}
    seen = 0
    for folder in ("megatron_vl", "converters", "data_tools", "toolkit", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            for call in calls_of(text, "from_pretrained") if "from_pretrained" in text else ():
                given = {
                    word.arg: getattr(word.value, "value", getattr(word.value, "id", None))
                    for word in call.keywords
                }
                is_safe = given.get(None) == "SAFE_LOADING_ARGUMENTS"
                assert is_safe or given.get("trust_remote_code") is False, f"{path}:{call.lineno}"
                assert ast.unparse(call.func.value) in {*loaders, "peft.PeftModel"}, f"{path}:{call.lineno}"
                seen += 1
    assert seen >= 3


@pytest.mark.parametrize("kind", ["reach for the system", "walk the classes", "read a file", "change a list"])
def test_chat_templates_are_rendered_in_a_sandbox(hf, mark, kind):
    template = {
        "reach for the system": mark.template,
        "walk the classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "read a file": "{% include '/etc/passwd' %}",
        "change a list": "{{ messages.clear() }}",
    }[kind]
    for name in ("chat_template.json", "tokenizer_config.json"):
        edit(hf / name, chat_template=template)
    with pytest.raises(ChatError, match="the chat template refuses"):
        ChatEncoder(hf, read_spec(hf)).render_conversation(MESSAGES)
    with pytest.raises(Exception, match="unsafe|no loader|not safely"):
        load_hf_processor(hf).apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)


@pytest.mark.parametrize(
    ("file", "field", "depth"),
    [
        ("processor_config.json", "audio_tokenizer_name_or_path", ["audio_tokenizer"]),
        ("preprocessor_config.json", "audio_tokenizer_name_or_path", ["audio_tokenizer"]),
        ("video_preprocessor_config.json", "pretrained_model_name_or_path", []),
        ("processor_config.json", "tokenizer_name_or_path", []),
        ("processor_config.json", "_name_or_path", ["image_processor", 0, "any"]),
    ],
)
def test_processor_that_names_another_model_is_refused(hf, tmp_path, file, field, depth):
    """transformers' processors load what the field names, with pickles."""
    if not (hf / file).is_file():
        (hf / file).write_text("{}")
    named: object = {"audio_tokenizer_class": "DacModel", field: str(tmp_path / "outside")}
    for key in reversed(depth):
        named = {key: named} if isinstance(key, str) else [named]
    edit(hf / file, **named)
    for read in (load_hf_processor, check_hf_folder):
        with pytest.raises(ConfigError, match=f"{file}: field '{field}' names another"):
            read(hf)


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/tmp/secret.safetensors", "sub/x.safetensors", "pytorch_model.bin", "..", ""],
)
def test_index_stays_in_its_folder(hf, tmp_path, name):
    """The file exists and holds the tensor; only its name is wrong."""
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    (tmp_path / "secret.safetensors").write_bytes(
        (hf / sorted(set(index["weight_map"].values()))[0]).read_bytes()
    )
    tensor = next(iter(index["weight_map"]))
    edit(hf / "model.safetensors.index.json", weight_map=index["weight_map"] | {tensor: name})
    for use in (
        lambda: convert_weights(hf, tmp_path / "full"),
        lambda: check_hf_folder(hf),
        lambda: load_hf_model(hf, torch.float32),
    ):
        with pytest.raises(WeightsError, match="not a file name of weights"):
            use()


def test_config_of_absurd_size_is_refused_at_once(hf, tmp_path):
    edit(hf / "config.json", num_hidden_layers=10**12)
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        convert_weights(hf, tmp_path / "full")


@pytest.mark.parametrize("name", ["notes.txt", "generation_config.json", "templates/tool.jinja"])
def test_export_carries_nothing_along_that_a_link_leads_to(hf, tmp_path, name):
    """Whoever exports a folder may publish it."""
    convert_weights(hf, tmp_path / "full")
    (tmp_path / "id_rsa").write_text("secret")
    (hf / name).parent.mkdir(exist_ok=True)
    (hf / name).unlink(missing_ok=True)
    (hf / name).symlink_to(tmp_path / "id_rsa")
    with pytest.raises(WeightsError, match="outside the folder"):
        export_weights(tmp_path / "full", hf, tmp_path / "back")
    written = [path for path in (tmp_path / "back").rglob("*") if path.is_file()]
    assert not any(b"secret" in path.read_bytes() for path in written)
