"""Refuses versions of Megatron-core for which the fixes in ``register.toml`` were not written.

The register lists all code of this project that replaces or uses internals of its dependencies. A new version
of Megatron-core may silently break any of these fixes, so unknown versions are refused at the start.
``make test-next`` runs the tests with the newest released version.
"""

import os
from importlib.metadata import PackageNotFoundError, version

from megatron_vl.system.errors import UserError

CORE_PACKAGE = "megatron-core"
TESTED_CORE_VERSIONS = ("0.19.2",)
"""The versions of Megatron-core with which the whole test suite and the GPU runs have passed."""

UNTESTED_CORE_VARIABLE = "MEGATRON_VL_UNTESTED_CORE"


class CoreVersionError(UserError):
    """This version of Megatron-core was never tested with this toolkit."""


def check_core_version() -> None:
    """Raises CoreVersionError for a version of Megatron-core for which the fixes were not written.

    ``MEGATRON_VL_UNTESTED_CORE=1`` lets it through.
    """
    try:
        installed_version = version(CORE_PACKAGE)
    except PackageNotFoundError:
        raise CoreVersionError(
            f"{CORE_PACKAGE} is not installed; pip install {CORE_PACKAGE}=={TESTED_CORE_VERSIONS[-1]}"
        ) from None

    if installed_version in TESTED_CORE_VERSIONS or os.environ.get(UNTESTED_CORE_VARIABLE) == "1":
        return
    raise CoreVersionError(
        f"{CORE_PACKAGE} {installed_version} was never tested with this toolkit, which replaces parts of it; "
        f"pip install {CORE_PACKAGE}=={TESTED_CORE_VERSIONS[-1]}, or set {UNTESTED_CORE_VARIABLE}=1 to"
        " continue at your own risk"
    )
