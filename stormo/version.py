"""The version of the package, which nothing needs torch to read."""

__version__ = "0.1.0"
