"""One file for each launcher: what its variables say about this rank."""
