"""The chat template of a run: the checkpoint's, or the one that ``data.chat_template`` names."""

from __future__ import annotations

from pathlib import Path

from megatron_vl.data.sample.conversation_checks import ChatError
from megatron_vl.spec.families.hf_folder import read_chat_template

TEMPLATES_DIR = Path(__file__).with_name("templates")
TOOLS_TEMPLATE = "qwen2_vl_tools"
"""Writes tools for :data:`TOOLS_FAMILIES`, whose released template leaves them out."""
TOOLS_FAMILIES = ("qwen2_vl", "qwen2_5_vl")


def chat_template_path(chat_template: str) -> Path:
    """The file of a template that comes with this program, by its name, or of any other by its path."""
    shipped_path = TEMPLATES_DIR / f"{chat_template}.jinja"
    return (
        shipped_path
        if shipped_path.parent == TEMPLATES_DIR and shipped_path.exists()
        else Path(chat_template)
    )


def read_run_template(hf_dir: str | Path, chat_template: str) -> str:
    """The template of a run.

    Args:
        chat_template: ``data.chat_template``; empty: the template of ``hf_dir``.

    Raises:
        ChatError: there is no such template, or its file is empty.
        FileNotFoundError, ConfigError: as :func:`read_chat_template` raises them.
    """
    if not chat_template:
        return read_chat_template(hf_dir)
    template_path = chat_template_path(chat_template)
    try:
        template = template_path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(sorted(path.stem for path in TEMPLATES_DIR.glob("*.jinja")))
        raise ChatError(
            f"data.chat_template {chat_template} cannot be read ({error}); give a file with a Jinja template,"
            f" or the name of one that comes with this program: {names}"
        ) from error
    if not template.strip():
        raise ChatError(f"data.chat_template {template_path} is empty")
    return template
