"""Where VLMEvalKit runs: it evaluates cells and answers as Python, unpickles files, and downloads."""

import os
import shutil
import subprocess
from pathlib import Path

from huggingface_hub import constants

HIDDEN_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MMEVAL_ROOT EVAL_FORMAT SKIP_ERR "
    "LOCAL_LLM FWD_API EVAL_PROXY FORCE_LOCAL SPLIT_THINK"
).split()
"""Variables of a surrounding torchrun, and those that change what VLMEvalKit does."""


def choose_sandbox(work_dir: Path, with_network: bool) -> tuple[list[str], str]:
    """The best sandbox that works on this system.

    Args:
        work_dir: the only folder that a sandboxed program should write in.
        with_network: leave the network open, for a judge.

    Returns:
        The words to put before a command, and what they keep out.
    """
    network = ("", "with") if with_network else ("--unshare-net", "without")
    bwrap = f"bwrap --die-with-parent --unshare-user --unshare-pid {network[0]} --ro-bind / / --proc /proc"
    bwrap_words = [*bwrap.split(), "--dev-bind", "/dev", "/dev", "--bind", str(work_dir), str(work_dir), "--"]
    if _works(bwrap_words):
        return bwrap_words, f"in bubblewrap, {network[1]} a network; it writes in {work_dir} only"
    # Processes that share the questions speak through the loopback device, which is down at first.
    start = ["sh", "-c", 'ip link set lo up; exec "$0" "$@"']
    unshare_words = ["unshare", "--map-root-user", "--net", "--", *start]
    if not with_network and _works(unshare_words):
        return unshare_words, "without a network, but writes where you can: install bubblewrap"
    return [], "WITHOUT A SANDBOX: install bubblewrap, or use only tables that you trust"


def _works(words: list[str]) -> bool:
    return (
        bool(shutil.which(words[0])) and subprocess.run([*words, "true"], capture_output=True).returncode == 0
    )


def process_variables(work_dir: Path) -> dict[str, str]:
    """Variables of the process: offline, with its own copy of the data and its own temporary files."""
    python_path = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **{name: value for name, value in os.environ.items() if name not in HIDDEN_VARIABLES},
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "VLMEVALKIT_USE_MODELSCOPE": "0",
        "LMUData": str(work_dir / "data"),
        "HF_HUB_CACHE": str(work_dir / "cache" / "hub"),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1"),  # for a judge
        "TMPDIR": str(work_dir / "tmp"),
        "TRITON_CACHE_DIR": str(work_dir / "tmp" / "triton"),
        "PRED_FORMAT": "tsv",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(python_path),
    }


def copy_data(dataset_name: str, lmu_data: Path, work_dir: Path) -> list[Path]:
    """Makes the folders that VLMEvalKit may change: tables are copied, all else is linked.

    A data set without a table in ``lmu_data`` is looked for in Hugging Face's cache.

    Returns:
        The copied tables.
    """
    data_dir = work_dir / "data"
    hub_cache_dir = work_dir / "cache" / "hub"
    (data_dir / "images").mkdir(parents=True)
    hub_cache_dir.mkdir(parents=True)

    tables = []
    for source_path in lmu_data.iterdir():
        if source_path.suffix == ".tsv" and source_path.stem.startswith(dataset_name):
            tables.append(Path(shutil.copyfile(source_path, data_dir / source_path.name)))
        elif source_path.name != "images":
            (data_dir / source_path.name).symlink_to(source_path)
    # VLMEvalKit writes a table's images to images/NAME, and would take those of an earlier one from there.
    for source_path in (lmu_data / "images").glob("*"):
        if source_path.name != dataset_name:
            (data_dir / "images" / source_path.name).symlink_to(source_path)

    for source_path in Path(constants.HF_HUB_CACHE).glob("datasets--*") if not tables else ():
        shutil.copytree(
            source_path.resolve(),
            hub_cache_dir / source_path.name,
            copy_function=os.symlink,
            ignore=shutil.ignore_patterns("blobs"),
        )
    return tables
