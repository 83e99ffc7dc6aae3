"""Data near the node: a copy on local storage, made once, verified, shared by all who need it, and removed."""
