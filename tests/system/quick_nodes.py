"""`stormo`, with elastic nodes that wait less for more of them and for one that is silent."""

from __future__ import annotations

import sys

from stormo import elastic
from stormo.cli import main

if __name__ == "__main__":
    elastic._LAST_CALL_S, elastic._HEARTBEAT_S = 1, 1
    sys.exit(main())
