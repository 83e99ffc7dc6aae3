"""The verb `predict`: whether a training will fit on GPUs that are not here, by which strategy and at which batch.

`model` counts parameters and the optimizer's state, `passes` what a pass holds from operation to operation; both on
tensors without memory. `ways` lists how the model could be spread, `forecast` is the arithmetic on what `terms` names,
`advice` the sentence.
"""
