"""The verbs `submit`, `status` and `cancel`: a training as a Slurm job that lives with its time limit."""
