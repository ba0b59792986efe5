"""Tags of a registry in memory, as `image_build.tag_resolver` resolves them."""

from dataclasses import dataclass, field

from treenail.controllers.pools.image_tags import ImageAnswer
from treenail.errors import TreenailError
from treenail.image.build_result import AttemptFailure, BuildReason


@dataclass
class FakeTagSource:
    """A registry with one image per tag; each image has all of these architectures."""

    images: dict[str, str] = field(default_factory=dict)
    """Pull specs by digest, by tag."""
    architectures: frozenset[str] = frozenset({"amd64"})
    failure: BuildReason | None = None
    """Why the registry answers nothing."""
    version: str = "1"
    """Of login and CAs."""
    access_error: TreenailError | None = None
    """Why login and CAs cannot be read."""
    now: float = 0.0
    asked: list[tuple[str, frozenset[str], str]] = field(default_factory=list)

    def resolve_tag(self, image: str, architectures: frozenset[str], secret: str) -> ImageAnswer:
        self.asked.append((image, architectures, secret))
        if self.failure is not None:
            return ImageAnswer(self.now, AttemptFailure(self.failure, "the registry failed"))
        found = self.images.get(image)
        if found is None or not architectures <= self.architectures:
            failure = AttemptFailure(BuildReason.BASE_NOT_FOUND, f"{image} does not exist")
            return ImageAnswer(self.now, failure)
        return ImageAnswer(self.now, pull_spec=found)

    def compute_access_version(self, secret: str) -> str:
        if self.access_error is not None:
            raise self.access_error
        return f"{secret}-{self.version}"
