"""Tensors over a local connection, in the place of an NCCL broadcast: bytes in the order in which they were announced, and no names.

The trainer listens, the worker of the engine connects. Each tensor is framed by its length, so that a sender that leaves one out, or
adds one, is an error and not a shift of all that follow. A sender that fails closes the connection: nobody waits for what never comes.
Standard library and, lazily, torch.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

SECONDS = 120.0
_LENGTH = struct.Struct("!Q")
_END = (1 << 64) - 1


class StreamError(RuntimeError):
    """The stream is not what was announced, or ended too early."""


class Sender:
    """The side of the trainer."""

    def __init__(self, address: str, port: int, seconds: float = SECONDS) -> None:
        with socket.create_server((address, port)) as listener:
            listener.settimeout(seconds)
            try:
                self._socket, _ = listener.accept()
            except TimeoutError:
                raise StreamError(f"no worker connected to {address}:{port} within {seconds:.0f} s") from None
        self._socket.settimeout(seconds)
        self.group = SimpleNamespace(store=None, socket=None)
        """What TRL lets go of at its end."""
        self.bytes = 0

    def send(self, tensors: Iterable[Any]) -> None:
        """All tensors of one update."""
        import torch

        self.bytes = 0
        try:
            for tensor in tensors:
                data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
                self.bytes += len(data)
            self._socket.sendall(_LENGTH.pack(_END))
        except BaseException:
            self._socket.close()
            raise


class Receiver:
    """The side of the engine's worker."""

    def __init__(self, address: str, port: int, seconds: float = SECONDS) -> None:
        ends = time.monotonic() + seconds
        while True:
            try:
                self._socket = socket.create_connection((address, port), timeout=seconds)
                return
            except OSError as error:  # the trainer may not listen yet
                if time.monotonic() > ends:
                    raise StreamError(f"no trainer listens at {address}:{port}: {error}") from error
                time.sleep(0.05)

    def receive(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> Iterator[tuple[str, Any]]:
        """What was announced, and nothing else."""
        import torch

        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            length = self._length()
            if length == _END:
                raise StreamError(f"the stream ended before {name}")
            made = torch.empty(tuple(shape), dtype=getattr(torch, dtype))
            if made.numel() * made.element_size() != length:
                raise StreamError(f"{name}: {length} bytes arrived for {dtype} of shape {list(shape)}")
            made.view(-1).view(torch.uint8).numpy()[:] = memoryview(self._read(length))
            yield name, made
        if self._length() != _END:
            raise StreamError(f"the stream goes on after {names[-1] if names else 'nothing'}")

    def _length(self) -> int:
        return int(_LENGTH.unpack(self._read(_LENGTH.size))[0])

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = self._socket.recv_into(view[done:])
            if not count:
                raise StreamError("the trainer closed the stream")
            done += count
        return data

    def close(self) -> None:
        """Let go of the connection."""
        self._socket.close()
