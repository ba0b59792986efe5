"""Results of validation, so that a changed MachineConfig does not validate all others again."""

from treenail.api.ignition_schema import IgnoredField
from treenail.api.machineconfig import MachineConfig
from treenail.config.validation import validate_config

_LIMIT = 5_000


class ValidatedConfigs:
    """Validates each object once. A watch replaces the object of a changed MachineConfig.

    Only valid ones are remembered, at most 5,000.
    """

    def __init__(self) -> None:
        self._results: dict[str, tuple[MachineConfig, tuple[IgnoredField, ...]]] = {}

    def validate(self, config: MachineConfig) -> tuple[IgnoredField, ...]:
        """Return and raise what `validate_config` does."""
        known = self._results.get(config.name)
        if known is not None and known[0] is config:
            return known[1]
        ignored = validate_config(config)
        if len(self._results) >= _LIMIT:
            self._results.clear()
        self._results[config.name] = config, ignored
        return ignored
