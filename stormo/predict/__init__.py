"""The verb `predict`: will a training fit on GPUs that are not here, with which strategy and batch?

`candidates` lists the strategies, `model` counts parameters and optimizer state, `tracing` what a forward and
backward pass holds, both on `fake_tensors`; `forecast` is the arithmetic on these counts, `advice` chooses.
"""
