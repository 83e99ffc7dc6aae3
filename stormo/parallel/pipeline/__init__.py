"""Layers in stages, one after the other: a model cut into stages, the orders in which they run, and the run itself.

`orders`, `bubble` and `picture` are pure arithmetic without torch; `pieces` and `split` cut a model; `engine` runs a
batch through the stages of this worker with torch.distributed.pipelining.
"""
