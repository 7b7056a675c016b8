"""A step folder's ``run.json``, with the digest that a run writes and that readers check."""

from pathlib import Path
from typing import Any

from megatron_vl.system.json_files import manifest_digest, write_json
from megatron_vl.weights.run_folder import step_of_dir


def write_run_json(step: Path, facts: dict[str, Any]) -> None:
    facts = {"step": step_of_dir(step), **facts}
    write_json(step / "run.json", facts | {"digest": manifest_digest(facts)})
