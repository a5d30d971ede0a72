"""A stand-in with the class and the signatures of verl's worker extension for vLLM."""

from __future__ import annotations

from typing import Any

import wire  # type: ignore[import-not-found]


class vLLMColocateWorkerExtension:
    """Loads what is on the wire."""

    model_runner: Any

    def update_weights_from_ipc(self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False) -> str:
        """Receive and load."""
        if use_shm:
            raise OSError("no shared memory")
        for weights in wire.batches():
            self._update_weights(weights, peft_config=peft_config, base_sync_done=base_sync_done)
        return "loaded"

    def _update_weights(self, weights: list[tuple[str, Any]], peft_config: Any, base_sync_done: bool) -> None:
        self.model_runner.model.load_weights(weights)
