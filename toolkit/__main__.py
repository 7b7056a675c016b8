"""``python -m toolkit``: the ``megatron-vl`` command in this Python, even if its environment
is not activated."""

import sys

from toolkit.cli import main

sys.exit(main())
