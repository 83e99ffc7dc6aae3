"""`python -m stormo` is the command `stormo`."""

import sys

from stormo.cli import main

if __name__ == "__main__":  # loader processes import this module again
    sys.exit(main())
