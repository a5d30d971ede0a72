"""A stand-in with the class and the signatures of NeMo-RL's worker extension for vLLM."""

from __future__ import annotations

from typing import Any

import wire  # type: ignore[import-not-found]


class VllmInternalWorkerExtension:
    """Loads what is on the wire."""

    model_runner: Any

    def _load_weights(self, weights: Any) -> None:
        self.model_runner.model.load_weights(weights=weights)

    def update_weights_via_ipc_zmq(self) -> bool:
        """Receive and load; a failure is an answer, as upstream has it."""
        try:
            for weights in wire.batches():
                self._load_weights(weights)
        except KeyError:
            return False
        return True

    def update_weights_from_collective(self) -> bool:
        """The same over another transport."""
        return self.update_weights_via_ipc_zmq()

    def nccl_reshard_refit(self) -> bool:
        """Writes weights past the loader."""
        return self.update_weights_via_ipc_zmq()

    def finish_sparse_delta_refit(self) -> dict[str, Any]:
        """The end of a sparse refit."""
        return {}


class VllmInternalWorkerExtensionWithCheckpointEngine(VllmInternalWorkerExtension):
    """The class that NeMo-RL names when a checkpoint engine is used."""
