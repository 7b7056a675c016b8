"""``python -m megatron_vl`` and the ``megatron-vl`` program: find the tools and start ``toolkit.cli``.

In a checkout, the tools (``toolkit``, ``converters``, ``data_tools``) lie beside this package. In a wheel
they lie in its folder ``_tools``, so that such common names do not appear in site-packages. The library
imports none of them; this program starts them.
"""

import importlib
import os
import sys

from megatron_vl.system.processes import python_path_with_tools, tools_dir


def main() -> int:
    """Runs the command line. Processes that it starts find the tools too."""
    folder = str(tools_dir())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = python_path_with_tools()
    return importlib.import_module("toolkit.cli").main()


if __name__ == "__main__":
    sys.exit(main())
