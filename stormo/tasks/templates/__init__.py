"""What `stormo new` writes: one whole task a file, trained as it is in seconds."""
