"""Models whose experts do not fit in memory: they lie in a file, and are read when tokens need them.

`budget` decides how many experts of each layer are in memory at a time, `file` is the file with all of them, and
`loading` fills or opens it. csrc/host/expert_store.h reads experts while the model runs.
"""
