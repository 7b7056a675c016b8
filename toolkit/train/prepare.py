"""What ``megatron-vl train`` does before ranks start, so that one command trains.

It downloads a model that is given by name, and converts conversations that are given as files, once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_tools.input_files import INDEX_FILE, find_input_files, record_files, record_suffix
from megatron_vl.config import RANDOM_WEIGHTS, RunConfigError, TrainConfig
from megatron_vl.config.parsing import stated_fields
from megatron_vl.system.folder_kind import folder_kind, is_hub_name, why_no_model
from megatron_vl.system.json_files import file_sha256, write_json
from megatron_vl.system.plurals import pluralize
from megatron_vl.system.processes import available_cores
from toolkit.common.options import option_flag
from toolkit.common.record_options import MAX_QUARANTINED, RecordOptions, ignored_keys_text

if TYPE_CHECKING:
    from data_tools.convert import ConversionOptions, DataReport

SOURCE_FILE = "source.json"
"""In the data set's folder: the files that it was converted from."""
ROW_TOKENS = (2048, 32768)
"""Smallest and largest row that is chosen by the sizes of samples."""


def prepare_run(
    run_args: list[str], config: TrainConfig, options: RecordOptions, *, is_first_node: bool
) -> list[str]:
    """Makes the model and the data set available on this node.

    Args:
        run_args: the fields of the run as words, after :func:`with_run_dir`.
        options: how records are read.
        is_first_node: whether this node converts; the others wait for it.

    Returns:
        The words with those fields added that follow: the folders, and the length of a row.

    Raises:
        RunConfigError: the model cannot be downloaded, or the conversations cannot be used.
    """
    added = {}
    if is_hub_name(config.model.hf):
        added["model.hf"] = download_model(config.model.hf)
        config = replace(config, model=replace(config.model, hf=added["model.hf"]))

    if is_records(config.data.path):
        records_path = Path(str(config.data.path))
        dataset_dir = Path(config.checkpoint.dir) / "data"
        added["data.path"] = str(dataset_dir)
        needed = ["usable"] if "data.seq_len" in stated_fields(run_args) else ["usable", "seq_len"]
        if is_first_node:
            if not dataset_dir.exists():
                _check_model(config)
            convert_once(records_path, dataset_dir, options)
            if "seq_len" in needed:
                data_config = replace(config.data, path=str(dataset_dir))
                note_row_length(dataset_dir, choose_row_length(replace(config, data=data_config)))
        else:
            wait_for_dataset(dataset_dir, needed)
        if "seq_len" in needed:
            added["data.seq_len"] = _read_source(dataset_dir)["seq_len"]
    return run_args + [f"--{name}={value}" for name, value in added.items()]


def _check_model(config: TrainConfig) -> None:
    """Refuses a model that cannot be trained before its data are written. Imports torch."""
    from megatron_vl.spec.families import read_spec
    from megatron_vl.weights.run_folder import find_latest_checkpoint
    from megatron_vl.weights.weight_reader import find_weights_dir

    read_spec(config.model.hf)
    is_resumed = find_latest_checkpoint(Path(config.checkpoint.dir)) is not None
    if config.model.checkpoint not in ("", RANDOM_WEIGHTS) and not is_resumed:
        find_weights_dir(config.model.checkpoint)


@contextmanager
def as_converted(run_args: list[str], config: TrainConfig, options: RecordOptions) -> Iterator[TrainConfig]:
    """A run from records as its first start sees it; for ``--dry-run``, which leaves no file.

    Of records that no start has converted, the first stand for all, in a folder that is removed.

    Raises:
        RunConfigError, ConvertError: as :func:`convert_once` raises them.
    """
    if is_hub_name(config.model.hf):
        model = replace(config.model, hf=download_model(config.model.hf, local_files_only=True))
        config = replace(config, model=model)
    if not is_records(config.data.path):
        yield config
        return
    records_path, dataset_dir = Path(str(config.data.path)), Path(config.checkpoint.dir) / "data"
    with tempfile.TemporaryDirectory() as folder:
        if not _was_converted(records_path, dataset_dir, options):
            from data_tools.convert import convert_dataset

            # 256 records, or so many of 25 million.
            conversion = options.conversion_options([records_path], Path(folder), part=(0, 99_999))
            report, dataset_dir = convert_dataset([records_path], conversion), conversion.dataset_dir
            note = f"{records_path} is not converted yet; what follows holds for its first"
            _print_progress(f"{note} {pluralize(report.records, 'record')}")
            if refusals := _report_records(report, conversion):
                raise RunConfigError(refusals)
        config = replace(config, data=replace(config.data, path=str(dataset_dir)))
        if "data.seq_len" not in stated_fields(run_args):
            seq_len = _read_source(dataset_dir).get("seq_len") or choose_row_length(config)
            config = replace(config, data=replace(config.data, seq_len=seq_len))
        yield config


def with_run_dir(run_args: list[str], config: TrainConfig) -> list[str]:
    """The words of a run, with the default ``checkpoint.dir``; that of random rows is empty."""
    path = config.data.path
    paths = [part.get("path", "") for part in path] if isinstance(path, list) else [path]
    if not all(paths) or config.data.is_synthetic or "checkpoint.dir" in stated_fields(run_args):
        return run_args
    name = "+".join(Path(str(path)).resolve().name.split(".")[0] for path in paths)
    if len(name) > 100:  # file systems allow 255 bytes
        name = f"{name[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return [*run_args, f"--checkpoint.dir={Path('runs') / name}"]


def download_model(name: str, *, local_files_only: bool = False) -> str:
    """Downloads a model into the cache of ``huggingface_hub``, unless it is there. Returns its folder.

    Raises:
        RunConfigError: it cannot be downloaded, or is not there with ``local_files_only``.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    unused = ["*.pth", "*.bin", "*.gguf", "original/*"]
    try:
        return snapshot_download(name, ignore_patterns=unused, local_files_only=local_files_only)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        cause = next(iter(str(error).strip().splitlines()), type(error).__name__)
        cause = "--dry-run downloads nothing" if local_files_only else f"it cannot be downloaded: {cause}"
        raise RunConfigError(f"model.hf {why_no_model(name)}; {cause}") from error


# --- The data -----------------------------------------------------------------------------------------------


def _print_progress(text: str) -> None:
    print(f"data: {text}", file=sys.stderr, flush=True)


def is_records(data_path: Any) -> bool:
    """Whether ``data.path`` is a file or folder of records or LLaMA-Factory's index, and no data set."""
    if not data_path or not isinstance(data_path, str) or "://" in data_path:
        return False
    path = Path(data_path)
    if path.is_dir():
        return not folder_kind(path) and any(record_files(path))
    return path.name.startswith(f"{INDEX_FILE}:") or bool(record_suffix(path))


def convert_once(records_path: Path, dataset_dir: Path, options: RecordOptions) -> None:
    """Converts records into a data set, unless it was made of the same records before.

    Raises:
        RunConfigError: the records have changed, none can be used, more than 1 % cannot, or another start
            converts them now.
        ConvertError: as :func:`data_tools.convert.convert_dataset` raises it.
    """
    if _was_converted(records_path, dataset_dir, options):
        _print_progress(f"{dataset_dir} was converted from {records_path} before")
        return
    from data_tools.convert import ConvertError, convert_dataset

    if _read_source(dataset_dir):
        shutil.rmtree(dataset_dir)  # too many of its records could not be used
    # The run's own files would be read as records at the next start.
    if records_path.is_dir() and dataset_dir.resolve().is_relative_to(records_path.resolve()):
        raise RunConfigError(
            f"checkpoint.dir {dataset_dir.parent} lies in data.path {records_path}; give another one"
        )
    if dataset_dir.exists():
        raise RunConfigError(f"{dataset_dir} was not converted from {records_path} by a run; rename it")

    _print_progress(f"converting {records_path} into {dataset_dir}, once")
    source = {"path": str(records_path.resolve()), "files": _file_facts(records_path)}
    source |= {"sha256": _digest(records_path), **options.sample_options()}
    conversion = options.conversion_options([records_path], dataset_dir)
    try:
        report = convert_dataset([records_path], conversion)
    except ConvertError as error:
        raise RunConfigError(str(error).replace("another --out", "another checkpoint.dir")) from error
    refusals = _report_records(report, conversion)
    # This file lets runs use the data set, so it is written last.
    write_json(dataset_dir / SOURCE_FILE, source | {"usable": not refusals})
    if refusals:
        raise RunConfigError(refusals)


def _report_records(report: DataReport, conversion: ConversionOptions) -> str:
    """Prints what became of records. Returns why a run must not use the data set; empty: it may."""
    from data_tools.convert import first_refusal
    from data_tools.media import MISSING

    all_records = pluralize(report.records, "record")
    val_text = f", {report.val} of them for validation" if report.val else ""
    _print_progress(f"{report.samples} of {all_records} converted{val_text}")
    for key_location, counts in report.ignored.items():
        _print_progress(ignored_keys_text(key_location, counts))
    if not report.quarantined_records:
        return ""

    first = first_refusal(conversion.dataset_dir)
    refusals = f"{report.quarantined_records} of {all_records} cannot be used, the first one being {first}"
    if conversion.part[1] == 1:
        refusals += f". {conversion.dataset_dir / 'quarantine.jsonl'} lists them"
    if report.samples and report.quarantined_records <= MAX_QUARANTINED * report.records:
        _print_progress(refusals)
        return ""
    refusals += ". Correct them and start again"
    if any(MISSING in counts for counts in report.refused.values()):
        folders = " and ".join(map(str, conversion.roots.folders))
        refusals += f", or give another folder than {folders} with --media-root"
    if report.samples:
        refusals += (
            ". `megatron-vl data convert --max-quarantined SHARE` leaves more of them out; its folder is a"
            " data.path too"
        )
    return refusals


def _files(records_path: Path) -> list[Path]:
    path = records_file(records_path)
    return [path] * (path.name == INDEX_FILE) + [file.path for file in find_input_files([records_path])]


def records_file(records_path: Path) -> Path:
    """The path without the data sets that ``dataset_info.json:NAME,NAME`` chooses."""
    is_index = records_path.name.startswith(f"{INDEX_FILE}:")
    return records_path.with_name(INDEX_FILE) if is_index else records_path


def _file_facts(records_path: Path) -> list[dict[str, Any]]:
    return [
        {"name": path.name, "bytes": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}
        for path in _files(records_path)
    ]


def _digest(records_path: Path) -> str:
    return hashlib.sha256("".join(map(file_sha256, _files(records_path))).encode()).hexdigest()


def _was_converted(records_path: Path, dataset_dir: Path, options: RecordOptions) -> bool:
    if not records_file(records_path).exists():
        raise RunConfigError(f"data.path {records_path} does not exist")
    if records_path.is_fifo():
        raise RunConfigError(
            f"data.path {records_path} is a named pipe, and each start looks at the records again: convert"
            f" them with `megatron-vl data convert --input {records_path}`"
        )
    source = _read_source(dataset_dir)
    if not source.get("usable"):
        return False
    other = f"another checkpoint.dir, or remove {dataset_dir} and every checkpoint beside it"
    for name, value in options.sample_options().items():
        if source[name] != value:
            raise RunConfigError(
                f"{dataset_dir} was converted with {option_flag(name)} {source[name] or 'unset'}, not"
                f" {value or 'unset'}: give the same again or {other}"
            )
    if _file_facts(records_path) == source["files"] or _digest(records_path) == source["sha256"]:
        return True
    raise RunConfigError(
        f"{dataset_dir} was converted from other records ({source['path']}) than {records_path} holds now. To"
        f" train on these, give {other}"
    )


def _read_source(dataset_dir: Path) -> dict[str, Any]:
    try:
        return json.loads((dataset_dir / SOURCE_FILE).read_text())
    except FileNotFoundError:
        return {}


def note_row_length(dataset_dir: Path, row_length: int) -> None:
    """Writes the length of a row where other nodes read it. If it changes, they may still read the earlier
    one: ranks take that of the first node."""
    source = _read_source(dataset_dir)
    if source.get("seq_len") != row_length:
        write_json(dataset_dir / SOURCE_FILE, source | {"seq_len": row_length})


def wait_for_dataset(dataset_dir: Path, needed: list[str]) -> None:
    """Waits until the first node has written these entries of :data:`SOURCE_FILE`, and says so every 30 s.

    A data set of which too much is unusable does not count: the first node is about to replace it.
    """
    for waited in itertools.count():
        if all(map(_read_source(dataset_dir).get, needed)):
            return
        if waited % 30 == 0:
            _print_progress(
                f"waiting for the first node, at --master-addr, to write {dataset_dir} ({waited} s)"
            )
        time.sleep(1)


def choose_row_length(config: TrainConfig) -> int:
    """Number of tokens of a row that holds every sample, within :data:`ROW_TOKENS`.

    Writes the sizes of samples if they are missing.

    Raises:
        LoaderError: no sample can be used.
    """
    from data_tools.sample_sizes import index_datasets
    from data_tools.sample_sources import open_encoder
    from data_tools.statistics import count_statistics
    from megatron_vl.spec.families import read_spec

    spec = read_spec(config.model.hf)
    index_datasets(config.data, spec, config.model.hf, available_cores())
    encoder = open_encoder(replace(config.data, seq_len=sys.maxsize), spec, config.model.hf)
    statistics = count_statistics(encoder, config.model.hf)
    statistics.check_usable()
    longest = int(statistics.sample_quantity("tokens")[0].max(initial=0))
    row_length = min(max(-(-longest // 256) * 256, ROW_TOKENS[0]), ROW_TOKENS[1])
    _print_progress(f"rows of {row_length:,} tokens; the longest sample has {longest:,}")
    return row_length
