"""Dispatch through DeepEP, a library for NVLink and RDMA (https://github.com/deepseek-ai/DeepEP)."""
