"""Images that builds pushed: the only ones that pruning may delete.

A MachineOSConfig names them in an annotation as soon as they are pushed, so that the images of a
build that a user deletes are known afterwards.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from treenail.api import annotations as key
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.api.pullspec import PullSpec, parse_pull_spec
from treenail.controllers.image_build.systems import read_systems
from treenail.errors import ConfigError
from treenail.image.build_reason import PRE_BUILT_SEEDED
from treenail.image.push_spec import parse_push_spec

MAX_PUSHED = 64
"""The newest images of a MachineOSConfig. Older ones stay in the registry."""
_TAG = re.compile(r"system-[0-9a-f]{16}|[a-z0-9][a-z0-9.-]*-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class PushedImage:
    """An image that a build pushed."""

    image: str
    """Pull spec by digest."""
    tag: str
    """The tag that the build gave it. An image with another tag stays."""

    @property
    def spec(self) -> PullSpec:
        return parse_pull_spec(self.image, where="pushed image")

    @property
    def is_complete(self) -> bool:
        """True unless it is the system part alone."""
        return not self.tag.startswith("system-")


def make_system_tag(content_key: str) -> str:
    """Return the tag of the system part of builds with this key."""
    return f"system-{content_key}"


def find_pushed_images(build: MachineOSBuild) -> tuple[PushedImage, ...]:
    """Return the images that a build pushed, the system parts first."""
    systems = (
        (each.image, make_system_tag(each.content_key)) for each in read_systems(build).values()
    )
    # A user pushed a pre-built image, and only a user deletes it.
    is_own = build.condition is None or build.condition.reason != PRE_BUILT_SEEDED
    tagged = (*systems, (build.pull_spec, build.name)) if is_own else tuple(systems)
    try:
        target = parse_push_spec(build.push_spec, where="push spec")
    except ConfigError:
        return ()
    repository = f"{target.registry}/{target.repository}"
    found = (_parse_image(image, tag) for image, tag in tagged if image)
    # A build may use a system part of another repository, which is not its own.
    return tuple(each for each in found if each and each.image.startswith(f"{repository}@"))


def add_pushed_images(
    known: tuple[PushedImage, ...], found: Iterable[PushedImage]
) -> tuple[PushedImage, ...]:
    """Return the images with more of them, the newest last."""
    new = tuple(found)
    return (*(each for each in known if each not in new), *new)[-MAX_PUSHED:]


def find_unrecorded_images(
    config: MachineOSConfig, builds: Iterable[MachineOSBuild]
) -> tuple[PushedImage, ...]:
    """Return the images of the config's builds that its annotation does not name, oldest first."""
    known = {each.image for each in read_pushed_images(config)}
    own = sorted(
        _filter_builds(config, builds), key=lambda each: (each.metadata.created, each.name)
    )
    found = (image for build in own for image in find_pushed_images(build))
    return tuple(image for image in found if image.image not in known)


def find_prune_candidates(
    config: MachineOSConfig, builds: Iterable[MachineOSBuild]
) -> tuple[PushedImage, ...]:
    """Return the images that no build of the config names any longer."""
    own = _filter_builds(config, builds)
    named = {image.image for build in own for image in find_pushed_images(build)}
    return tuple(each for each in read_pushed_images(config) if each.image not in named)


def _filter_builds(
    config: MachineOSConfig, builds: Iterable[MachineOSBuild]
) -> list[MachineOSBuild]:
    return [each for each in builds if each.image_config == config.name]


def read_pushed_images(config: MachineOSConfig) -> tuple[PushedImage, ...]:
    """Return the images of the annotation. Invalid entries count as none: they stay."""
    text = config.metadata.annotations.get(key.PUSHED_IMAGES, "")
    try:
        entries = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return ()
    if not isinstance(entries, dict):
        return ()
    found = (_parse_image(image, tag) for image, tag in entries.items())
    return tuple(each for each in found if each is not None)[-MAX_PUSHED:]


def encode_pushed_images(images: Iterable[PushedImage]) -> str:
    """Return the annotation."""
    return json.dumps({each.image: each.tag for each in images}, separators=(",", ":"))


def _parse_image(image: str, tag: object) -> PushedImage | None:
    if not isinstance(tag, str) or not _TAG.fullmatch(tag):
        return None
    try:
        parse_pull_spec(image, where="pushed image")
    except ConfigError:
        return None
    return PushedImage(image, tag)
