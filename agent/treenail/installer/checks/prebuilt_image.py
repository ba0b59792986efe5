"""Pre-built images: the Machine Config Operator's annotation on a MachineOSConfig. Pure.

The Machine Config Operator accepts ``NAME:TAG@DIGEST`` at the bootstrap, and fails on it when the
cluster runs: the API accepts no tag beside a digest.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from treenail.api import annotations as key
from treenail.api.image_labels import BOOTABLE_LABELS
from treenail.api.pullspec import PullSpec, parse_pull_spec
from treenail.image.labels import BASE_IMAGE


@dataclass(frozen=True, slots=True)
class PrebuiltImage:
    """The image of the annotation, by digest."""

    spec: PullSpec
    text: str
    """The value of the annotation."""

    @property
    def has_tag(self) -> bool:
        """True when the annotation has a tag beside the digest."""
        return str(self.spec) != self.text


def parse_prebuilt_image(text: str) -> PrebuiltImage:
    """Parse the annotation without its tag; raise `ConfigError` that names it."""
    name, at, digest = text.partition("@")
    head, slash, last = name.rpartition("/")
    if at and slash and ":" in last:
        name = f"{head}/{last.partition(':')[0]}"
    return PrebuiltImage(
        parse_pull_spec(f"{name}{at}{digest}", where=f"annotation {key.PRE_BUILT_IMAGE}"), text
    )


@dataclass(frozen=True, slots=True)
class PrebuiltFinding:
    """Why a pre-built image is unfit, or may be; ``is_certain`` says which."""

    text: str
    remedy: str
    is_certain: bool = True


def find_prebuilt_findings(
    image: PullSpec, labels: Mapping[str, str], *, base_image: str
) -> list[PrebuiltFinding]:
    """Compare the labels of an image with what nodes need.

    ``base_image`` is the OS image of the release; empty if that is unknown.
    """
    found = []
    if not any(labels.get(each) for each in BOOTABLE_LABELS):
        found.append(
            PrebuiltFinding(
                f"{image} is no bootable image: it has none of the labels "
                f"{' and '.join(BOOTABLE_LABELS)}",
                "build it FROM the OS image of the release",
            )
        )
    base = labels.get(BASE_IMAGE, "")
    if not base:
        found.append(
            PrebuiltFinding(
                f"{image} does not say which base it was built from: it has no label {BASE_IMAGE}",
                f"add LABEL {BASE_IMAGE}=IMAGE@DIGEST to its Containerfile",
                is_certain=False,
            )
        )
    elif not base_image:
        found.append(
            PrebuiltFinding(
                f"cannot compare the base of {image} with the release: the manifests have no "
                "ControllerConfig",
                "name the OS image of the release: --base-image IMAGE@DIGEST",
                is_certain=False,
            )
        )
    elif _get_digest(base) != _get_digest(base_image):
        found.append(
            PrebuiltFinding(
                f"{image} was built from {base:.300}, and the release has {base_image}",
                f"build it again FROM {base_image}",
            )
        )
    return found


def _get_digest(image: str) -> str:
    """Return the digest: mirrors have other names for an image."""
    return image.rpartition("@")[2]
