"""The place of a data set: a local folder, or a prefix in an object store.

Energon reads object stores through the Multi-Storage Client. Its profiles (endpoint, bucket, credentials) lie
in the file that ``MSC_CONFIG`` names, so that no credentials enter a run file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_vl.errors import UserError

if TYPE_CHECKING:
    from megatron.energon.epathlib import EPath

type Location = Path | EPath

STORE = "msc://"
"""Beginning of the path of a data set in an object store: ``msc://PROFILE/FOLDER``."""


class StoreError(UserError, ValueError):
    """An object store that cannot be reached, or a path that does not name one."""


def in_store(path: str) -> bool:
    """Whether a path names an object store. Energon is not imported for this."""
    return "://" in path


def location(path: str) -> Location:
    """The place that ``data.path`` names.

    Raises:
        StoreError: the path has another scheme than ``msc://``, or its profile is not configured.
    """
    if not in_store(path):
        return Path(path)
    if not path.startswith(STORE):
        raise StoreError(
            f"data.path {path}: object stores are read through the Multi-Storage Client; write"
            f" {STORE}PROFILE/FOLDER, with the profile in the file that MSC_CONFIG names"
        )

    # Importing Energon takes seconds, and local paths do not need it.
    from megatron.energon.epathlib import EPath

    try:
        return EPath(path)
    except Exception as error:  # the client raises errors of its own and of each provider
        raise StoreError(f"data.path {path} cannot be opened: {error}{_advice(error)}") from error


def _advice(error: BaseException) -> str:
    if isinstance(error, ImportError) or "boto3" in str(error):
        return "; install the client of the store: pip install 'megatron-vl[object-storage]'"
    return "; the file that MSC_CONFIG names must describe the profile"


def is_file(place: Location) -> bool:
    """Whether there is a file.

    Raises:
        StoreError: the store does not answer.
    """
    if isinstance(place, Path):
        return place.is_file()
    try:
        return place.is_file()
    except Exception as error:
        raise StoreError(f"{place} cannot be read: {error}") from error


def size(place: Location) -> int:
    """Size of a file in bytes. Raises OSError if there is none."""
    if isinstance(place, Path):
        return place.stat().st_size
    return int(place.size())


def suffix(place: Location) -> str:
    """``.yaml`` of ``blend.yaml``."""
    return Path(place.name).suffix


def read_text(place: Location, **decoding: Any) -> str:
    """The text of a file in UTF-8.

    Args:
        decoding: further arguments of ``bytes.decode``, such as ``errors``.
    """
    return place.read_bytes().decode("utf-8", **decoding)
