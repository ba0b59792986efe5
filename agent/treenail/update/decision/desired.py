"""What the Node's annotations ask of this machine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from treenail.api import annotations as key
from treenail.api import pullspec
from treenail.errors import ConfigError
from treenail.update.state.record import Target

_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


@dataclass(frozen=True, slots=True)
class DesiredTarget:
    """The target asked for, and the keys that named its image."""

    target: Target
    image_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InvalidTarget:
    """The annotations can't be obeyed, and why."""

    error: ConfigError


@dataclass(frozen=True, slots=True)
class NoTarget:
    """No config is asked of this node."""


def read_prestage_target(annotations: Mapping[str, str]) -> Target | None:
    """What is to be staged ahead; None without a config's name and an image by digest."""
    config, image = (
        annotations.get(key.PRESTAGE_CONFIG, ""),
        annotations.get(key.PRESTAGE_IMAGE, ""),
    )
    try:
        pullspec.parse_pull_spec(image, where=key.PRESTAGE_IMAGE)
    except ConfigError:
        return None
    return Target(config, image) if _NAME.fullmatch(config) else None


def read_desired_target(annotations: Mapping[str, str]) -> DesiredTarget | InvalidTarget | NoTarget:
    """The wish in a Node's annotations.

    The image may be asked for in any of three spellings; two that disagree are unusable, because
    obeying either would be a guess.
    """
    asked = {name: annotations[name] for name in key.IMAGE_SPELLINGS if name in annotations}
    config = annotations.get(key.DESIRED_CONFIG, "")
    if not config:
        if not asked:
            return NoTarget()
        name = next(iter(asked))
        return InvalidTarget(
            ConfigError(
                f"{name} is set, but {key.DESIRED_CONFIG} is not",
                remedy=f"set {key.DESIRED_CONFIG} to the name of the rendered MachineConfig that "
                "the image was built from",
            )
        )
    if not _NAME.fullmatch(config):
        return InvalidTarget(
            ConfigError(
                f"{key.DESIRED_CONFIG} is {config!r:.300}, which is no name of a MachineConfig",
                remedy="set it to the name of a rendered MachineConfig",
            )
        )
    try:
        for name, text in asked.items():
            pullspec.parse_pull_spec(text, where=name)
    except ConfigError as error:
        return InvalidTarget(error)
    if len(set(asked.values())) > 1:
        listed = " and ".join(f"{name} ({text})" for name, text in sorted(asked.items()))
        return InvalidTarget(
            ConfigError(
                f"the node is asked for two images at once: {listed}",
                remedy="remove one of the annotations, or set both to the same image",
            )
        )
    return DesiredTarget(Target(config, next(iter(asked.values()), "")), tuple(asked))
