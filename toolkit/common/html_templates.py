"""The templates of the HTML pages that commands write."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def template_environment(template_dir: Path) -> Environment:
    """The templates in ``template_dir``. Text that they show is escaped, and a name that is not set is an
    error."""
    return Environment(
        loader=FileSystemLoader(template_dir),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
