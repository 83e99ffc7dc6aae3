"""The page of one or several runs: `stormo report` writes it, `stormo watch` serves it while a run is running."""
