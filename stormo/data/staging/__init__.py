"""Data near the node: a copy on local storage, made once, shared by all who need it, and removed."""
