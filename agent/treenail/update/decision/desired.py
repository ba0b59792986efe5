"""The desired target: what the Node's annotations request of this machine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api import pullspec
from treenail.errors import ConfigError
from treenail.update.state.record import Target

_SHOWN_CHARS = 500

# A DNS subdomain of RFC 1123, which is what the API server accepts as a name.
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


@dataclass(frozen=True, slots=True)
class DesiredTarget:
    """The desired target, and the annotations that named its image."""

    target: Target
    image_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InvalidTarget:
    """Annotations that cannot be obeyed."""

    error: ConfigError
    target: Target = field(default_factory=Target)
    """What they request, as far as it can be read; only to be shown."""
    candidates: tuple[Target, ...] = ()
    """The targets that the valid ones among them request."""


@dataclass(frozen=True, slots=True)
class NoTarget:
    """Annotations that request no config."""


def read_prestage_target(annotations: Mapping[str, str]) -> Target | None:
    """Return the target to pre-stage; None without a config and an image by digest."""
    config = annotations.get(key.PRESTAGE_CONFIG, "")
    image = annotations.get(key.PRESTAGE_IMAGE, "")
    try:
        pullspec.parse_pull_spec(image, where=key.PRESTAGE_IMAGE)
    except ConfigError:
        return None
    return Target(config, image) if _NAME.fullmatch(config) else None


def read_desired_target(annotations: Mapping[str, str]) -> DesiredTarget | InvalidTarget | NoTarget:
    """Return the desired target in a Node's annotations.

    Three annotations may name the image; an empty one names none. Two that name different images
    are invalid, because obeying either would be a guess.
    """
    images = {name: annotations[name] for name in key.IMAGE_SPELLINGS if annotations.get(name)}
    config = annotations.get(key.DESIRED_CONFIG, "")
    shown = Target(config[:_SHOWN_CHARS], next(iter(images.values()), "")[:_SHOWN_CHARS])
    if not config:
        if not images:
            return NoTarget()
        name = next(iter(images))
        return InvalidTarget(
            ConfigError(
                f"cannot use {name}: {key.DESIRED_CONFIG} is not set",
                remedy=f"set {key.DESIRED_CONFIG} to the name of the rendered MachineConfig that "
                "the image was built from",
            ),
            shown,
        )
    if not _NAME.fullmatch(config):
        return InvalidTarget(
            ConfigError(
                f"cannot use {key.DESIRED_CONFIG}: {config!r:.300} is not the name of a "
                "MachineConfig",
                remedy="set it to the name of a rendered MachineConfig",
            ),
            shown,
        )
    errors = [error for name, image in images.items() if (error := _check_image(name, image))]
    if errors:
        valid = [image for name, image in images.items() if _check_image(name, image) is None]
        return InvalidTarget(errors[0], shown, tuple(Target(config, image) for image in valid))
    if len(set(images.values())) > 1:
        listed = " and ".join(f"{name} ({image})" for name, image in sorted(images.items()))
        return InvalidTarget(
            ConfigError(
                f"cannot choose an image: the annotations name different ones: {listed}",
                remedy="remove one of the annotations, or set both to the same image",
            ),
            shown,
            tuple(Target(config, image) for image in images.values()),
        )
    return DesiredTarget(Target(config, next(iter(images.values()), "")), tuple(images))


def _check_image(name: str, image: str) -> ConfigError | None:
    try:
        pullspec.parse_pull_spec(image, where=name)
    except ConfigError as error:
        return error
    return None
