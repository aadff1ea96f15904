"""Facts about a checkpoint and a machine, by which settings are resolved to the parts of `EngineConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from moeserve.config.devices import DeviceDefaults
from moeserve.config.expert_layout import ExpertShape
from moeserve.config.needs import Needs
from moeserve.config.routes import RouteShape
from moeserve.config.settings import DtypeName

Part = TypeVar("Part")  # a dataclass

WITHOUT_NCCL = (  # text that follows the name of a torch installation in messages
    "was built without NCCL, which ranks on GPUs need; install one for CUDA (https://pytorch.org/get-started), "
    "or use one rank, or device='cpu'"
)
INSTALL_COMPILER = (  # what to do without the C++ kernels, as messages end
    "install a C++17 compiler, such as g++ (on Debian and Ubuntu: apt install g++; on ARM also clang++), and then "
    "moeserve again"
)


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """Properties of a checkpoint that are known before it is loaded."""

    path: str
    dtype: DtypeName
    vocab_size: int
    max_position_embeddings: int
    tensor_parallel_sizes: tuple[int, ...]  # sizes that divide its attention heads
    tensor_parallel_sizes_alike: tuple[int, ...] = (1,)  # sizes whose results have the same bytes as one rank's
    num_layers: int
    num_sparse_layers: int  # layers with experts
    num_experts: int  # number of experts in each layer with experts
    expert_shape: ExpertShape | None = None  # shape of a layer's experts; None: experts are never sliced
    route_shape: RouteShape | None = None  # None: the experts of tokens are not known to moeserve's code
    quantization: str | None = None  # the format of the weights, as config.json names it; None: not quantised
    has_mxfp4: bool = False  # experts are stored in MXFP4
    has_blocks: bool = False  # weights are in blocks of 4 to 6 bits, the formats of int4
    needs: Needs = Needs()
    first_sparse_layer: int = 0  # the first layer with experts
    num_draft_layers: int = 0  # layers of multi-token prediction (MTP) modules, which are the last ones
    first_layers: frozenset[int] | None = None  # layers that may start a pipeline stage; None: all


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Properties of this host and its installation, or of the hosts that run the ranks."""

    num_cores: int  # cores that this process may use
    max_threads: int | None = None  # of a rank on this host by default; None: its share of the cores
    has_cuda: bool = False
    num_gpus: int | None = None  # GPUs that torch sees; None: not counted
    has_nccl: bool = True  # torch was built with NCCL
    has_kernels: bool = True  # the C++ kernels were built
    has_triton: bool = True
    has_bfloat16: bool = True  # the GPU can multiply bfloat16
    has_float8: bool = True  # the GPU and the installation can multiply 8-bit floats
    cores_of_nodes: Sequence[int] | None = None  # cores of each of several hosts; None: ranks run on this host


def from_settings(part: type[Part], settings: object, **resolved: Any) -> Part:
    """Return a part of `EngineConfig`. Fields that are not in `resolved` get the settings of the same name."""
    assert dataclasses.is_dataclass(part)
    names = {field.name for field in dataclasses.fields(part)} - {*resolved}
    return part(**resolved, **{name: getattr(settings, name) for name in names})


@dataclass(frozen=True)
class Facts:
    """The facts by which settings are resolved."""

    checkpoint: CheckpointFacts
    machine: MachineFacts
    device: DeviceDefaults

    @property
    def on_gpu(self) -> bool:
        return self.device.name == "cuda"
