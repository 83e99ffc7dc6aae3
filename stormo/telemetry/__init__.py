"""What happens in a run (`record`), the sinks that write it, and the folder of a run."""
