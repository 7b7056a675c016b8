"""``python -m toolkit``: the ``megatron-vl`` command of this very Python, whether or not its environment is
activated."""

import sys

from toolkit.cli import main

sys.exit(main())
