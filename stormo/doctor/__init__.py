"""The verb `doctor` and `--preflight`: what is wrong with a machine or a job, and how to fix it."""
