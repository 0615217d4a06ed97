"""`python -m dtorchjax`."""

import sys

from .cli import main

sys.exit(main())
