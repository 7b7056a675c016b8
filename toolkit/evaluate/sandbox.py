"""Where VLMEvalKit runs: it evaluates cells and answers as Python, unpickles files, and downloads."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from huggingface_hub import constants

HIDDEN = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MMEVAL_ROOT PRED_FORMAT EVAL_FORMAT SKIP_ERR "
    "LOCAL_LLM FWD_API EVAL_PROXY FORCE_LOCAL SPLIT_THINK"
).split()
"""Variables of a surrounding torchrun, and those that change what VLMEvalKit does."""


def sandbox(work: Path, network: bool) -> tuple[list[str], str]:
    """The best sandbox that works on this system.

    Args:
        work: the only folder that a sandboxed program should write in.
        network: leave the network open, for a judge.

    Returns:
        The words to put before a command, and what they keep out.
    """
    bubblewrap = "bwrap --die-with-parent --unshare-user --unshare-pid --ro-bind / / --dev-bind /dev /dev"
    bubblewrap += f" --proc /proc{'' if network else ' --unshare-net'}"
    choices = {"bwrap": [*bubblewrap.split(), "--bind", str(work), str(work), "--"]}
    if not network:
        choices["unshare"] = ["unshare", "--map-root-user", "--net", "--"]
    names = {
        "bwrap": f"in bubblewrap, {'with' if network else 'without'} a network; it writes in {work} only",
        "unshare": "without a network, but writes where you can: install bubblewrap for tables of others",
    }

    for name, words in choices.items():
        if shutil.which(name) and subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            return words, names[name]
    return [], "WITHOUT A SANDBOX: install bubblewrap, or use only tables that you trust"


def environment(work: Path, rank: int) -> dict[str, str]:
    """Variables of a process: offline, with its own copies of the data and its own temporary files."""
    variables = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "VLMEVALKIT_USE_MODELSCOPE": "0"}
    variables |= {"LMUData": str(work / f"data_{rank}"), "HF_HUB_CACHE": str(work / f"cache_{rank}" / "hub")}
    variables |= dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1")  # for a judge
    variables |= {"TMPDIR": str(work / "tmp"), "TRITON_CACHE_DIR": str(work / "tmp" / "triton")}
    packages = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return variables | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(packages)}


def copy_data(name: str, lmu_data: Path, work: Path, rank: int) -> list[Path]:
    """Makes the folders that VLMEvalKit may change: tables are copied, all else is linked.

    A data set without a table in ``lmu_data`` is looked for in Hugging Face's cache.

    Returns:
        The copied tables.
    """
    data = work / f"data_{rank}"
    hub = work / f"cache_{rank}" / "hub"
    (data / "images").mkdir(parents=True)
    hub.mkdir(parents=True)

    tables = []
    for path in lmu_data.iterdir():
        if path.suffix == ".tsv" and path.stem.startswith(name):
            tables.append(Path(shutil.copyfile(path, data / path.name)))
        elif path.name != "images":
            (data / path.name).symlink_to(path)
    # VLMEvalKit writes a table's pictures to images/NAME, and would take those of an earlier one from there.
    for path in (lmu_data / "images").glob("*"):
        if path.name != name:
            (data / "images" / path.name).symlink_to(path)

    for path in Path(constants.HF_HUB_CACHE).glob("datasets--*") if not tables else ():
        blobs = shutil.ignore_patterns("blobs")
        shutil.copytree(path.resolve(), hub / path.name, copy_function=os.symlink, ignore=blobs)
    return tables
