"""The state that the config of this node wants of its machine."""

import logging
from collections.abc import Callable

from treenail.config.image_content import ImageContent, ImageSplit, compare_with_image
from treenail.config.wanted import WantedState, read_wanted_state
from treenail.daemon.configuration.config_cache import ConfigCache
from treenail.daemon.configuration.drift import ExpectedState
from treenail.errors import ClusterError
from treenail.update.impact.os_packages import list_required_packages
from treenail.update.state.record import Target

log = logging.getLogger(__name__)


class NodeConfigs:
    """The state that the current target's config wants of this machine."""

    def __init__(
        self, configs: ConfigCache, read_image: Callable[[WantedState], ImageContent]
    ) -> None:
        """``read_image`` returns the content of the booted image, for image mode."""
        self._configs = configs
        self._read_image = read_image

    def load_split(self, current: Target) -> ImageSplit | None:
        """Load the wanted state; None when the config is unavailable.

        In image mode too, the machine is compared with the whole config. Raises `HostError` and
        `ConfigError`.
        """
        try:
            config = self._configs.find_config(current.config)
        except ClusterError as error:
            log.info("cannot read %s, no drift check until then: %s", current, error)
            return None
        if config is None:
            return None
        wanted = read_wanted_state(config)
        if not current.image:
            return ImageSplit(wanted)
        return compare_with_image(wanted, self._read_image(wanted))

    def load_expected(self, current: Target) -> ExpectedState | None:
        """Load the wanted state as digests, without the contents of files."""
        split = self.load_split(current)
        if split is None:
            return None
        os, image = split.wanted.os, current.image or split.wanted.os.image
        return ExpectedState.from_wanted(
            split.wanted,
            frozenset() if current.image else list_required_packages(os),
            digest=image.partition("@")[2],
            image_gaps=frozenset(each.subject for each in split.missing),
        )
