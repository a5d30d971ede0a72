"""Profiles: what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from seatrial.core.jobs import Profile


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"container": "vlm", "containers": {"vllm": "i"}}, "no image is called 'vlm'; known: vllm"),
        ({"container": "a", "image": "b", "containers": {"a": "i"}}, "exclude each other"),
        ({"sbatch": ["--array=1-3"]}, "--array=1-3 is set by Seatrial"),
        ({"sbatch": ["--arr=1-3"]}, "set by Seatrial (--array)"),
        ({"sbatch": ["--job-name x"]}, "set by Seatrial (--job-name)"),
        ({"sbatch": ["-Jx"]}, "set by Seatrial (-J)"),
        ({"sbatch": ["--output=x"]}, "set by Seatrial (--output)"),
        ({"sbatch": ["--dependency=singleton"]}, "set by Seatrial"),
        ({"srun": ["--overlap"]}, "set by Seatrial (--overlap)"),
        ({"srun": ["-n2"]}, "set by Seatrial (-n)"),
        ({"sbatch": ["reservation=x"]}, "sbatch"),
        ({"sbatch": ["--x\n#SBATCH --y"]}, "sbatch"),
        ({"partition": "a b"}, "partition"),
        ({"partition": "$(id)"}, "partition"),
        ({"time": "90"}, "time"),
        ({"environment": {"HF_TOKEN": "x"}}, "HF_TOKEN looks like a secret"),
        ({"mounts": ["/a"]}, "mounts"),
        ({"gpu": 1}, "gpu"),
    ],
)
def test_what_cannot_be_used_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        Profile.model_validate(values)
    assert words in str(error.value)


def test_options_of_the_site_are_taken() -> None:
    profile = Profile(sbatch=("--reservation=week", "--constraint=h100", "-M", "-Cfast"), srun=("--mpi=pmix", "--no-container-mount-home"))
    assert len(profile.sbatch) == 4
