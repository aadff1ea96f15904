"""Models whose experts do not fit in memory. The experts are in a file, and are read when tokens need them.

`budget` decides how many experts of each layer are in memory at a time. `file` is the file with all experts, and
`loading` writes or opens this file. csrc/host/expert_store.h reads experts while the model runs. Between steps,
`served` reports errors, and gives memory back when it becomes scarce.
"""
