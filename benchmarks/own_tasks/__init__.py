"""Tasks and scripts as users write them, on 1, 2 and 3 workers: equal, rightly refused, or silently wrong."""
