"""Counter of the changes of followed tags."""

from treenail.controllers.image_tags.record import TagChange
from treenail.controllers.runtime.metrics import ControllerMetrics


class TagMetrics:
    """Counts changes by the pool that gets the image, or an image built on it."""

    def __init__(self, metrics: ControllerMetrics, use: str) -> None:
        """``use`` begins the name of the metric: ``base_image`` or ``pool_image``."""
        self._changes = metrics.add_counter(
            f"{use}_tag_changes_total",
            "Tags that moved or are not followed, by the reason in the Event.",
            ("pool", "reason"),
        )

    def record_change(self, change: TagChange, pool: str) -> None:
        """Count a change that was recorded in the cluster."""
        self._changes.increment(pool, change.reason)
