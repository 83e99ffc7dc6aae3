"""Every figure that stormo claims, each with the command that prints it."""
