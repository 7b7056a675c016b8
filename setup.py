"""Where the packages go in a wheel; everything else about the project is in pyproject.toml. See
docs/architecture.md."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

TOOLS = ("converters", "data_tools", "toolkit")
"""Top-level folders of the repository whose names are too common for everybody's site-packages."""
FOLDER = Path("megatron_vl", "_tools")
"""Where a wheel has them; megatron_vl/__main__.py looks there."""


class BuildPy(build_py):
    """Moves the tools below ``megatron_vl``. An editable installation is the checkout, where they stay."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in TOOLS:
            target = Path(self.build_lib, FOLDER, name)
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(Path(self.build_lib, name), target)


class EggInfo(egg_info):
    """Names the one package that a wheel puts into site-packages."""

    def run(self) -> None:
        super().run()
        Path(self.egg_info, "top_level.txt").write_text("megatron_vl\n", encoding="utf-8")


setup(cmdclass={"build_py": BuildPy, "egg_info": EggInfo})
