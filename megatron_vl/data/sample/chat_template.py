"""The chat template of a run: the checkpoint's, or the one that ``data.chat_template`` names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_vl.data.sample.conversation_checks import ChatError
from megatron_vl.spec.families.hf_folder import read_chat_template

TEMPLATES_DIR = Path(__file__).with_name("templates")
TOOLS_TEMPLATE = "qwen2_vl_tools"
"""Writes tools for :data:`TOOLS_FAMILIES`, whose released template leaves them out."""
TOOLS_FAMILIES = ("qwen2_vl", "qwen2_5_vl")


class ChatTemplateError(ChatError):
    """The checkpoint's chat template leaves out a part of the conversation. Only another template helps."""


OWN_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")
"""Variables of a template that transformers sets, and this program decides about."""


def check_template_arguments(template: str, arguments: Mapping[str, Any], field_name: str) -> None:
    """Raises ChatTemplateError, which names ``field_name``, if the template does not read an argument."""
    if not arguments:
        return
    from transformers.utils.chat_template_utils import _get_template_variables

    read_names = _get_template_variables(template) - {*OWN_ARGUMENTS}
    if unread_names := sorted(arguments.keys() - read_names):
        raise ChatTemplateError(
            f"{field_name}: the chat template never reads {', '.join(unread_names)}; it reads"
            f" {', '.join(sorted(read_names)) or 'no arguments'}"
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
    own_path = TEMPLATES_DIR / f"{chat_template}.jinja"
    is_own = own_path.parent == TEMPLATES_DIR and own_path.exists()
    template_path = own_path if is_own else Path(chat_template)
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
