"""`python -m stormo` is the command `stormo`."""

import sys

from stormo.cli import main

sys.exit(main())
