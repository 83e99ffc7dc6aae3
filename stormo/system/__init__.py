"""What this machine is: files, processes, hardware; nothing of training."""
