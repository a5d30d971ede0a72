"""Everything a probe may disturb in a live module, kept aside and put back bit for bit. Runs inside a loop's interpreter.

- Whole storages are copied (to host memory), so tied parameters, views into one buffer and non-persistent buffers are covered.
- Loaders may replace a parameter, resize its storage or register new ones; `restore` undoes that as well, and plain tensor
  attributes of modules (packed or derived copies) are kept too.
- `restore` proves itself by fingerprint and raises `NotRestored` with the names that differ.
"""

from __future__ import annotations

from typing import Any

from seatrial.probes import fingerprint


class NotRestored(RuntimeError):
    """The module does not hold the bits it held before."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"the state could not be restored: {', '.join(names[:5])} ({len(names)} names); load the weights again")
        self.names = names


class Saved:
    """The state of a module at the time this was made."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.hashes = fingerprint.model(module)
        self._tables = [table for part in module.modules() for table in (part._parameters, part._buffers, vars(part))]
        self._entries = [(table, key, value, value.detach()) for table in self._tables for key, value in table.items() if _strided(value)]
        self._storages: dict[int, tuple[Any, Any]] = {}
        for _, _, _, alias in self._entries:
            storage = alias.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._storages:
                self._storages[storage.data_ptr()] = (alias, _bytes(alias).to("cpu", copy=True))

    def restore(self) -> None:
        """Put every tensor and every bit back, and prove it."""
        kept = {(id(table), key) for table, key, _, _ in self._entries}
        for table in self._tables:
            for key in [key for key, value in table.items() if _strided(value) and (id(table), key) not in kept]:
                del table[key]
        for alias, data in self._storages.values():
            storage = alias.untyped_storage()
            if storage.nbytes() != len(data):
                storage.resize_(len(data))
            _bytes(alias).copy_(data)
        for table, key, value, alias in self._entries:
            if (value.data_ptr(), value.shape, value.stride()) != (alias.data_ptr(), alias.shape, alias.stride()):
                value.data = alias
            table[key] = value
        wrong = fingerprint.differing(self.hashes, fingerprint.model(self.module))
        if wrong:
            raise NotRestored(wrong)


def _strided(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta


def _bytes(tensor: Any) -> Any:
    """All bytes of the storage behind a tensor."""
    import torch

    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
