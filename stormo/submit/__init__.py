"""The verb `submit`: a training as a Slurm job that resumes after each time limit."""
