"""The operations of the layers: one interface, one table of kernels for each device, selected once per rank."""
