"""One module for each verb: parse, call, print."""
