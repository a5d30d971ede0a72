"""The worker extension for vLLM: `--worker-extension-cls seatrial.probes.engines.vllm_extension.Extension`.

Its methods are called in every worker: `POST /collective_rpc` of a server in development mode, or `LLM.collective_rpc(name, kwargs=…)`.
All names begin with `seatrial_`; all answers are plain JSON objects. In a vLLM process this module also registers the weight-transfer
backend `seatrial` (see vllm_transfer). Nothing is served while a method runs: a worker does one thing at a time.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import Any

from seatrial.probes import executed, fingerprint, provenance
from seatrial.probes.engines import vllm_reader, vllm_transfer
from seatrial.probes.engines.serve import FAULTS_ALLOWED
from seatrial.probes.engines.vllm_proof import Proof, proof_of, reference_of

FAULTS = ("flip-bit", "swap-tensors")


class Extension:
    """Mixed into vLLM's worker class."""

    def seatrial_version(self) -> dict[str, Any]:
        """The version that was loaded last through the backend, which life of the worker this is, and why the last payload was refused."""
        proof = _proof(self)
        held = {"version": proof.version, "incarnation": proof.incarnation, "refused": proof.refused}
        return {**held, "rank": int(getattr(self, "rank", 0))}

    def seatrial_state(self) -> dict[str, Any]:
        """Every runtime parameter and buffer, tied and non-persistent ones included, as it lies in memory."""
        model = _proof(self).model
        hashes = fingerprint.model(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        rows = {}
        for name, value in fingerprint.named_state(model):
            rows[name] = {
                "hash": hashes[name],
                "dtype": str(value.dtype),
                "shape": list(value.shape),
                "storage": value.untyped_storage().data_ptr(),
                "parameter": name in parameters,
            }
        return {"tensors": rows, "root": fingerprint.digest(hashes)}

    def seatrial_map(self, reference: str, through: str = "") -> dict[str, Any]:
        """Learn the coordinate map with the names, shapes and dtypes of a reference; by a twin where vLLM packs weights, else live."""
        return _proof(self).learn(reference_of(reference), through or ("twin" if vllm_reader.packs() else "live"))

    def seatrial_read(self, reference: str = "") -> dict[str, Any]:
        """The fingerprint of the live weights under each exported name that is wholly on this rank, and by which method it was read."""
        proof = _proof(self)
        seen = proof.see()
        hashes = proof.hashes(seen, reference_of(reference) if reference else None)
        methods = {name: method for name, method in proof.methods(seen).items() if name in hashes}
        absent = [name for name in proof.learned().ids.names if name not in hashes]
        return {"hashes": hashes, "root": fingerprint.tree(hashes).root, "methods": methods, "absent": absent, "version": proof.version}

    def seatrial_verify(self, reference: str) -> dict[str, Any]:
        """Compare the live weights with a reference, element for element; also the parts that a sharded rank holds."""
        proof = _proof(self)
        seen = proof.see()
        wrong, methods = proof.wrong(seen, reference_of(reference)), proof.methods(seen)
        learned = proof.learned()
        sizes = zip(learned.ids.names, learned.ids.sizes.tolist(), strict=True)
        here = sum(not size or learned.unconsumed.get(name) != size for name, size in sizes)  # the others are on other ranks, or lost
        return {"wrong": wrong, "names": here, "methods": dict(Counter(methods.values())), "version": proof.version}

    def seatrial_coverage(self) -> dict[str, Any]:
        """What became of every runtime tensor and every exported name."""
        return _proof(self).coverage()

    def seatrial_imports(self, path: str, process: str, packages: list[str], expected: dict[str, str]) -> list[str]:
        """Append to `path` where this worker's packages come from, and where others under test would; what is wrong with it."""
        others = [name for name in expected if name not in packages]
        rows = [*provenance.report(path, process, packages, expected), *provenance.locate(path, process, others, expected)]
        return provenance.verify(rows)

    def seatrial_loaded(self, path: str, process: str, roots: list[str]) -> None:
        """Append to `path` which files below each root this worker has loaded so far; and what ran of changed ones, beside it."""
        provenance.loaded(path, process, roots)
        executed.flush()

    def seatrial_break(self, fault: str) -> dict[str, Any]:
        """Damage live weights on purpose: one of FAULTS. For showing that the probe sees it, in a server that was started for it."""
        if os.environ.get(FAULTS_ALLOWED) != "1":
            raise PermissionError(f"seatrial_break: this server was not started for it: {FAULTS_ALLOWED}=1 is not in its environment")
        import torch

        named = dict(_proof(self).model.named_parameters())
        one, two = [name for name, value in named.items() if value.dim() == 1 and value.numel() and "layers" in name][:2]
        first, second = named[one].data, named[two].data
        if fault not in FAULTS or first.shape != second.shape:
            raise ValueError(f"seatrial_break: {fault!r} cannot be done with {one} and {two}; known: {', '.join(FAULTS)}")
        if fault == "flip-bit":
            first.view(torch.uint8)[0] ^= 1
        else:
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)
        return {"broken": [one] if fault == "flip-bit" else [one, two]}


def _proof(worker: Any) -> Proof:
    """The proof of a worker's model."""
    return proof_of(worker.model_runner.get_model(), worker.vllm_config)


if "vllm" in sys.modules:
    vllm_transfer.register()
