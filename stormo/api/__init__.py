"""stormo from Python and in notebooks: `stormo.train`, `stormo.run`, `stormo.open_run`."""
