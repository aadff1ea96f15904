"""`WeightSender`: sends a trainer's tensors to an engine or to a server."""

from __future__ import annotations

import functools
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

from torch import Tensor

from moeserve.addresses import address_towards
from moeserve.errors import SettingsError, WeightUpdateError, shown
from moeserve.rl.transports import Offer, offer_in_shared_memory, offer_on_disk, offer_over_tcp

CHUNK_BYTES = 256 * 2**20


class Receiver(Protocol):
    """The receiver of an update: an `LLM`, or the routes of a server."""

    def init_weight_transfer_engine(self, request: Any) -> None: ...
    def start_weight_update(self, shapes: Mapping[str, Any] | None = None) -> None: ...
    def update_weights(self, request: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class WeightSender:
    """Sends the tensors of a model in training to the engine that serves the model.

    sender = WeightSender("http://127.0.0.1:8000", api_key="the administrator's key")
    sender.send(model.state_dict(), "step-17")
    """

    def __init__(
        self,
        receiver: str | Receiver,
        transport: Literal["shm", "disk", "tcp"] = "shm",
        *,
        api_key: str | None = None,
        folder: str | None = None,
        host: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        timeout_s: float = 600.0,
    ) -> None:
        """
        Args:
            receiver: URL of a server with `--rl`, or an `LLM`.
            transport: "shm": chunks in shared memory of the same host; "disk": chunks in temporary folders; "tcp":
                ranks on any host connect to the trainer, and read their parts of each chunk.
            api_key: an administrator's key of the server.
            folder: folder in which temporary folders are created, which all ranks must be able to read; None: the
                system's.
            host: for "tcp", the address of this host to which ranks connect; None: the address from which this host
                reaches the server.
            chunk_bytes: maximum bytes of a chunk; a larger tensor is a chunk of its own.
            timeout_s: seconds to wait for a response of the server.

        Raises:
            RequestError, WeightUpdateError: the receiver cannot be updated.
            SettingsError: there is no such transport, or no route to the server.
        """
        self._receiver = _Routes(receiver, api_key, timeout_s) if isinstance(receiver, str) else receiver
        self._chunk_bytes = chunk_bytes
        self._offer: Offer
        match transport:
            case "shm":
                self._offer = offer_in_shared_memory
            case "disk":
                self._offer = functools.partial(offer_on_disk, folder=folder)
            case "tcp":
                self._offer = functools.partial(offer_over_tcp, host=host or _own_address(receiver))
            case _:
                raise SettingsError(f"transport={shown(transport)} is unknown; known are 'shm', 'disk' and 'tcp'")
        self._receiver.init_weight_transfer_engine({"init_info": {"transport": transport}})

    def send(self, tensors: Mapping[str, Tensor], weight_version: str | None = None) -> None:
        """Update all weights. No request is computed meanwhile.

        Args:
            tensors: tensors by the names in the checkpoint or in transformers' model, such as its `state_dict()`.
            weight_version: the version that outputs will report; None: the engine chooses a version.

        Raises:
            WeightUpdateError: the receiver has refused tensors or has failed.
        """
        receiver = self._receiver
        receiver.start_weight_update({name: list(tensor.shape) for name, tensor in tensors.items()})
        for chunk in self._chunks(tensors):
            with self._offer(_separate(chunk)) as update_info:
                receiver.update_weights({"update_info": update_info})
        receiver.finish_weight_update(weight_version)

    def _chunks(self, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        chunk: dict[str, Tensor] = {}
        num_bytes = 0
        for name, tensor in tensors.items():
            if chunk and num_bytes + tensor.nbytes > self._chunk_bytes:
                yield chunk
                chunk, num_bytes = {}, 0
            chunk[name] = tensor
            num_bytes += tensor.nbytes
        if chunk:
            yield chunk


def _own_address(receiver: str | Receiver) -> str:
    """Return the address from which this host reaches a server. For an `LLM`, return the loopback address."""
    if not isinstance(receiver, str):
        return "127.0.0.1"
    name = urllib.parse.urlsplit(receiver).hostname or ""
    try:
        return address_towards(name)
    except OSError as error:
        raise SettingsError(f"receiver={receiver!r} cannot be reached: {error}") from None


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors on the CPU that share no memory, as safetensors needs them."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        storage = own.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != own.nbytes:
            own = own.clone()
        seen.add(storage.data_ptr())
        separate[name] = own
    return separate


class _Routes:
    """A `Receiver` over HTTP."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def init_weight_transfer_engine(self, request: Any) -> None:
        self._post("init_weight_transfer_engine", request)

    def start_weight_update(self, shapes: Mapping[str, Any] | None = None) -> None:
        self._post("start_weight_update", {"shapes": shapes})

    def update_weights(self, request: Any) -> None:
        self._post("update_weights", request)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", {"weight_version": weight_version})

    def _post(self, path: str, body: Any) -> None:
        request = urllib.request.Request(f"{self._url}/{path}", json.dumps(body).encode(), self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                response.read()
        except urllib.error.HTTPError as error:
            raise WeightUpdateError(
                f"/{path} has status {error.code}: {error.read().decode(errors='replace')}"
            ) from None
        except OSError as error:
            raise WeightUpdateError(f"{self._url}/{path} cannot be reached: {error}") from None
