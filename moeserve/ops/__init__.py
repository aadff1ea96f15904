"""One signature per operation; the implementation is chosen once. The only importer of the kernels' folders."""
