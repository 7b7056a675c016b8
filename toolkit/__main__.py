"""``python -m toolkit``: runs the ``megatron-vl`` command in this Python.

The environment need not be activated.
"""

import sys

from toolkit.cli import main

sys.exit(main())
