"""A run that starts from a Hugging Face folder gets bit for bit what a conversion would have written."""

import shutil

import pytest
import torch

from converters.add_tokens import add_tokens
from converters.convert import convert_weights
from converters.hf_checkpoint import HfCheckpoint
from data_tools.sample_sizes import index_datasets
from megatron_vl.config import DataConfig, RunConfigError, parse_config
from megatron_vl.data.sample.tokenizer import load_tokenizer
from megatron_vl.spec.families import FAMILIES, read_spec
from megatron_vl.spec.tensors import EMBEDDING_TENSOR, Sharding
from megatron_vl.training.start_weights import check_start_weights
from megatron_vl.weights.model_digest import model_digest
from megatron_vl.weights.weight_reader import WeightReader
from tests.converters.fp8_folders import fp8_folder
from tests.data.datasets import converted
from tests.support.tiny_run import trained
from tests.tiny import tiny_checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_equal_those_of_converted_weights(family: str, tmp_path) -> None:
    hf = tiny_checkpoint(family)
    convert_weights(hf, tmp_path / "converted")
    from_hf, converted = HfCheckpoint(hf), WeightReader(tmp_path / "converted")
    expert_sizes = {"ep": 2} if from_hf.spec.language.moe else {}
    for sharding in (Sharding(tp=1), Sharding(tp=2, **expert_sizes)):
        for name, info in converted.tensor_infos.items():
            for shard in range(sharding.num_shards(info)):
                expected = converted.read_shard(name, shard, sharding)
                given = from_hf.read_shard(name, shard, sharding)
                assert given.dtype == expected.dtype and torch.equal(given, expected), (name, shard)
    assert model_digest(from_hf) == model_digest(converted)


def test_folder_without_weights_is_refused_with_both_names(tmp_path) -> None:
    shutil.copy(tiny_checkpoint() / "config.json", tmp_path)
    config = parse_config(["--model.hf", str(tmp_path)])
    with pytest.raises(RunConfigError, match="model.checkpoint is empty, and model.hf .* holds no weights"):
        check_start_weights(config, read_spec(tmp_path))


@pytest.mark.ranks
def test_added_tokens_of_a_fp8_folder_train(tmp_path) -> None:
    """More tokens than rows, from FP8 weights, in two ranks: only rows of tokens that occurred move."""
    fp8_folder(tmp_path / "fp8", "qwen3_vl")
    tokens = [f"<loc_{i}>" for i in range(300)]
    (tmp_path / "tokens.txt").write_text("\n".join(tokens))
    hf = tmp_path / "hf"
    add_tokens(tmp_path / "fp8", tmp_path / "tokens.txt", hf)
    used = tokens[290:]
    question = {"from": "human", "value": "Where?"}
    answers = [{"from": "gpt", "value": f"At {used[i % 10]}."} for i in range(24)]
    data = converted(tmp_path, [{"conversations": [question, answer]} for answer in answers])[0]
    index_datasets(DataConfig(path=str(data)), read_spec(hf), hf)
    prepared = {"folder": tmp_path, "hf": hf, "weights": "", "data": data}
    words = "--data.num_workers 0 --parallel.tp 2 --optimizer.weight_decay 0 --optimizer.warmup_steps 0"
    printed = trained(prepared, tmp_path / "run", *words.split(), ranks=2, steps=2)
    assert "rounded once to bfloat16" in printed
    start, after = HfCheckpoint(hf), WeightReader(tmp_path / "run")
    embedding, rows = start.read_shard(EMBEDDING_TENSOR).float(), after.read_shard(EMBEDDING_TENSOR).float()
    is_moved = (embedding != rows).any(1)
    tokenizer, _ = load_tokenizer(hf)
    moved = {tokenizer.convert_ids_to_tokens(i) for i in is_moved.nonzero().flatten().tolist()}
    assert moved & set(tokens) and moved & set(tokens) <= set(used)
