"""The GPUs of this machine, as nvidia-smi lists them."""

from __future__ import annotations

import shutil
import subprocess

from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary

NVIDIA_SMI_SECONDS = 30


def gpus_here(wanted: int, without: str) -> Finding:
    """Whether there are as many as wanted; `without` says what to do where there is none."""
    smi = shutil.which("nvidia-smi")
    listed = ""
    if smi:
        try:
            listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            listed = f"({error})"
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    if count == 0:
        why = "no GPU was found here" + ("" if smi else ": there is no nvidia-smi")
        return Finding(name="GPUs", ok=False, boundary=Boundary.CLUSTER, message=why, fix=without)
    ok = count >= wanted
    fix = "" if ok else f"--set options.gpus={count}"
    return Finding(name="GPUs", ok=ok, boundary=Boundary.CLUSTER, message=f"{count} GPUs here, {wanted} wanted", fix=fix)
