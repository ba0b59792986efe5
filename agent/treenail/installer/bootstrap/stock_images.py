"""An installation without images of its own: all machines keep the stock system."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from treenail.api.ignition_model import IgnitionFile
from treenail.controllers.handover.handover_objects import Handover
from treenail.installer.steps.image_step import PoolImage, PoolImageProvider
from treenail.installer.steps.render_step import RenderedPool


class StockImages:
    """A `treenail.installer.bootstrap.bootstrap.ImageStore` without images."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Do nothing."""

    def find_provider(self, pool: RenderedPool) -> PoolImageProvider | None:  # noqa: ARG002  # interface
        """Return None."""
        return None

    def list_node_files(self, images: Sequence[PoolImage]) -> tuple[IgnitionFile, ...]:  # noqa: ARG002  # interface
        """Return no files."""
        return ()

    def make_handover(self, images: Sequence[PoolImage]) -> Handover:  # noqa: ARG002  # interface
        """Return an empty hand-over."""
        return Handover(())

    def export_images(self) -> str:
        """Return an empty text."""
        return ""
