"""A job as one profile runs it: names of containers become images, mounts, variables and the time limit are merged.

A container that the profile does not know is an error that lists the known ones; a literal image has its own key.
"""

from __future__ import annotations

from seatrial.model.errors import UserError
from seatrial.model.job import Component, Job
from seatrial.model.profile import Profile


def resolve(job: Job, profile: Profile) -> Job:
    """The job with everything of the profile in it; a component's own values win."""
    minutes = job.minutes if job.minutes is not None else time_minutes(profile.time)
    if job.warn_s is not None and job.warn_s >= 60 * minutes:
        raise UserError(
            f"job {job.name}: warn_s = {job.warn_s} leaves nothing of the profile's time {profile.time}", "lower it, or give minutes"
        )
    components = tuple(_component(item, profile) for item in job.components)
    return job.model_copy(update={"components": components, "minutes": minutes, "exclusive": job.exclusive or profile.exclusive})


def _component(item: Component, profile: Profile) -> Component:
    image = image_of(item.container, item.image, profile, f"component {item.name}")
    if item.mounts and image is None:
        raise UserError(f"component {item.name}: mounts without a container", "name a container or an image, or leave out mounts")
    return item.model_copy(
        update={
            "container": None,
            "image": image,
            "mounts": tuple(dict.fromkeys((*profile.mounts, *item.mounts))) if image else (),
            "environment": {**profile.environment, **item.environment},
        }
    )


def image_of(name: str | None, literal: str | None, profile: Profile, what: str) -> str | None:
    """The image that a name or a literal stands for."""
    if name is None:
        return literal
    if name not in profile.containers:
        known = ", ".join(sorted(profile.containers)) or "none"
        fix = f'add {name} = "IMAGE" to the containers of the profile in seatrial.toml, or give a literal image with the key image'
        raise UserError(f"{what}: the profile knows no container {name!r}; known: {known}", fix)
    return profile.containers[name]


def time_minutes(text: str) -> int:
    """`[days-]hours:minutes:seconds` in minutes, rounded up: Slurm counts in minutes."""
    days, _, clock = text.rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return max(1, (int(days or 0) * 24 + hours) * 60 + minutes + (seconds > 0))
