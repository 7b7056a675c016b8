"""The location of a data set: a local folder, or a prefix in an object store.

Energon reads object stores through the Multi-Storage Client. Its profiles (endpoint, bucket, credentials) are
in the file that ``MSC_CONFIG`` names, so that run files contain no credentials.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_vl.config import RunConfigError
from megatron_vl.system.errors import UserError
from megatron_vl.system.folder_kind import folder_kind

if TYPE_CHECKING:
    from megatron.energon.epathlib import EPath

type Location = Path | EPath
type DataPath = str | list[dict[str, Any]]
"""``data.path``: one data set, or a blend as a list of ``{path, weight}``."""

PART_NAME = re.compile(r"part-(\d{5})-of-(\d{5})")
"""The name of a part of a data set: its number from 0, and the number of parts."""

STORE_PREFIX = "msc://"
"""Beginning of the path of a data set in an object store: ``msc://PROFILE/FOLDER``."""
S3_PREFIX = "s3://"
TARS_REMEDY = "make a data set of tars of images and captions with `megatron-vl data index --input`"


class LoaderError(UserError, ValueError):
    """A data set or a setting that cannot be loaded. The message says what to change."""


def is_in_object_store(dataset_path: str) -> bool:
    """Whether a path names an object store. Energon is not imported for this."""
    return "://" in dataset_path


def store_url(path: str) -> str:
    """The path as ``msc://...``, if it is ``s3://BUCKET/...``.

    The client makes a profile of this name for a bucket, with the address and credentials that boto3 finds.
    """
    return re.sub(f"^{S3_PREFIX}", f"{STORE_PREFIX}_s3-", path)


def resolve_location(dataset_path: str) -> Location:
    """The location that ``data.path`` names.

    Raises:
        LoaderError: the path has another scheme than ``msc://`` and ``s3://``, or its profile is not
            configured.
    """
    if not is_in_object_store(dataset_path):
        return Path(dataset_path)
    dataset_path = store_url(dataset_path)
    if not dataset_path.startswith(STORE_PREFIX):
        raise LoaderError(
            f"data.path {dataset_path}: object stores are read through the Multi-Storage Client; write"
            f" {STORE_PREFIX}PROFILE/FOLDER, with the profile in the file that MSC_CONFIG names, or"
            f" {S3_PREFIX}BUCKET/FOLDER"
        )

    # Importing Energon takes seconds, and local paths do not need it.
    from megatron.energon.epathlib import EPath

    try:
        return EPath(dataset_path)
    except Exception as error:  # the client raises its own errors and those of each provider
        advice = "the file that MSC_CONFIG names must describe the profile"
        if isinstance(error, ImportError) or "boto3" in str(error):
            advice = "install the client of the store: pip install 'megatron-vl[object-storage]'"
        raise LoaderError(f"data.path {dataset_path} cannot be opened: {error}; {advice}") from error


def location_is_file(file_location: Location) -> bool:
    """Whether there is a file.

    Raises:
        LoaderError: the store does not answer.
    """
    try:
        return file_location.is_file()
    except Exception as error:
        if isinstance(file_location, Path):
            raise
        raise LoaderError(f"{file_location} cannot be read: {error}") from error


def location_size_bytes(file_location: Location) -> int:
    """Size of a file in bytes. Raises OSError if there is none."""
    if isinstance(file_location, Path):
        return file_location.stat().st_size
    return int(file_location.size())


def read_text_file(file_location: Location) -> str:
    return file_location.read_bytes().decode()


def part_name(index: int, num_parts: int) -> str:
    """The folder's name of a part, which :data:`PART_NAME` matches."""
    return f"part-{index:05d}-of-{num_parts:05d}"


def part_folders(dataset_path: Location) -> list[Location]:
    """The data sets ``part-I-of-N`` of a folder in order; none if it has no such folder.

    Raises:
        RunConfigError: a part is missing, or something else is there.
    """
    if location_is_file(dataset_path) or location_is_file(dataset_path / ".nv-meta" / "split.yaml"):
        return []  # a data set, whose shards may be many
    if isinstance(dataset_path, Path):
        names = [entry.name for entry in dataset_path.iterdir()] if dataset_path.is_dir() else []
    else:
        names = [file.parent.parent.name for file in dataset_path.glob("part-*/.nv-meta/split.yaml")]
    if not (counts := {int(match[2]) for name in names if (match := PART_NAME.fullmatch(name))}):
        return []
    wanted_names = [part_name(i, count) for count in counts for i in range(count)]
    for name in sorted(set(wanted_names) ^ set(names)):
        problem = "is missing" if name in wanted_names else "is no part"
        raise RunConfigError(f"data.path {dataset_path} holds the parts of a data set, and {name} {problem}")
    return [dataset_path / name for name in sorted(names)]


def check_data_path(data_path: DataPath) -> None:
    """Raises RunConfigError unless ``data_path`` is a data set's folder, a metadataset or a list of them.

    Only the existence of files is checked, because importing Energon takes seconds.
    """
    remedy_text = (
        "give a folder written by `megatron-vl data convert`, or one file or folder of conversations to"
        " `megatron-vl train` without torchrun, which converts them"
    )
    if not data_path:
        raise RunConfigError(f"data.path is empty; {remedy_text}")
    if isinstance(data_path, list):
        for blend_part in data_path:
            has_path = isinstance(blend_part.get("path"), str) and not blend_part.keys() - {"path", "weight"}
            if not has_path or blend_part["path"].startswith("synthetic:"):
                raise RunConfigError(f"data.path: {blend_part} is not {{path: FOLDER, weight: NUMBER}}")
            check_data_path(blend_part["path"])
        return
    if is_in_object_store(data_path):
        resolve_location(data_path)
        return

    dataset_dir = Path(data_path)
    if data_path.startswith("[") and not dataset_dir.exists():  # a list of files
        raise RunConfigError(
            f"data.path {data_path} is not [{{path: FOLDER, weight: NUMBER}}]; {remedy_text}"
        )
    if not dataset_dir.exists():
        raise RunConfigError(f"data.path {data_path} does not exist; {remedy_text}")
    if dataset_dir.is_file():
        if dataset_dir.suffix == ".tar":
            raise RunConfigError(f"data.path {data_path} is a tar; {TARS_REMEDY}")
        if dataset_dir.suffix != ".yaml":
            raise RunConfigError(
                f"data.path {data_path} is neither a data set's folder nor a metadataset (.yaml);"
                f" {remedy_text}"
            )
    elif not (dataset_dir / ".nv-meta").is_dir() and not part_folders(dataset_dir):
        remedy_text = TARS_REMEDY if any(dataset_dir.glob("*.tar")) else remedy_text
        no_data_text = f"{data_path} is not a data set (it holds no .nv-meta); {remedy_text}"
        raise RunConfigError(f"data.path {folder_kind(dataset_dir) or no_data_text}")
