"""A name that TRL imports for its server mode, which needs GPUs."""

from vllm.distributed.weight_transfer.nccl_common import trainer_init as packed_nccl_broadcast_producer

__all__ = ["packed_nccl_broadcast_producer"]
