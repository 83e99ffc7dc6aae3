"""What happened in a run (`record`), and where it is written (one sink a file)."""
