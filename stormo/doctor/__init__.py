"""The verb `doctor`: what of this machine, or of a whole job, would cost a training hours, and how to mend it."""
