"""The steps ``build:POOL``: the image of a control-plane pool exists before it is served."""

from dataclasses import dataclass
from typing import Protocol

from treenail.installer.steps.render_step import RenderedPool
from treenail.installer.steps.steps import StepContext, StepInputs, StepLimit, StepResult

_FIELDS = ("image", "push_spec", "build_name")


@dataclass(frozen=True, slots=True)
class PoolImage:
    """The image of a pool."""

    pool: str
    image: str
    """Pull spec by digest, with the final name."""
    push_spec: str = ""
    """Final name with its tag; empty for an image that was built before the installation."""
    build_name: str = ""
    """Name of the MachineOSBuild; empty likewise."""

    @property
    def digest(self) -> str:
        """Digest of the manifest."""
        return self.image.rpartition("@")[2]


class PoolImageProvider(Protocol):
    """Provides the image of a pool: builds it, or finds one that exists."""

    def compute_inputs(self, pool: RenderedPool) -> StepInputs:
        """Compute the digests of everything that the image depends on; raise `TreenailError`."""

    def has_image(self, image: PoolImage) -> bool:
        """Return whether the image of an earlier process can still be pulled."""

    def provide_image(self, pool: RenderedPool, context: StepContext) -> PoolImage:
        """Return the image; raise `TreenailError`. Finds what an earlier process has built."""


class ImageStep:
    """A `treenail.installer.steps.steps.Step` for one pool."""

    def __init__(
        self, pool: RenderedPool, provider: PoolImageProvider, limit: StepLimit | None
    ) -> None:
        self._pool = pool
        self._provider = provider
        self._image: PoolImage | None = None
        self.name = f"build:{pool.pool.name}"
        self.title = f"provide the image of pool {pool.pool.name}"
        self.limit = limit

    @property
    def image(self) -> PoolImage:
        """The image of a step that is done."""
        if self._image is None:
            raise RuntimeError(f"step {self.name} is not done")
        return self._image

    def compute_inputs(self) -> StepInputs:
        """Compute the digests of the rendered config and of the inputs of the image."""
        rendered = {f"rendered config of pool {self._pool.pool.name}": self._pool.rendered.name}
        return {**self._provider.compute_inputs(self._pool), **rendered}

    def resume(self, result: StepResult) -> bool:
        """Take over the image of an earlier process if it still exists."""
        if set(result) != set(_FIELDS):
            return False
        image = PoolImage(self._pool.pool.name, *(result[name] for name in _FIELDS))
        if not self._provider.has_image(image):
            return False
        self._image = image
        return True

    def run(self, context: StepContext) -> StepResult:
        """Build or find the image."""
        self._image = image = self._provider.provide_image(self._pool, context)
        return {"image": image.image, "push_spec": image.push_spec, "build_name": image.build_name}
