"""Results of validation, so that a changed MachineConfig does not validate all others again."""

from treenail.api.machineconfig import MachineConfig
from treenail.config.validation import ValidConfig, validate_config

_LIMIT = 5_000


class ValidatedConfigs:
    """Validates each object once. A watch replaces the object of a changed MachineConfig.

    Only valid ones are remembered, at most 5,000.
    """

    def __init__(self) -> None:
        self._results: dict[str, tuple[MachineConfig, ValidConfig]] = {}

    def validate(self, config: MachineConfig) -> ValidConfig:
        """Return and raise what `validate_config` does."""
        known = self._results.get(config.name)
        if known is not None and known[0] is config:
            return known[1]
        valid = validate_config(config)
        if len(self._results) >= _LIMIT:
            self._results.clear()
        self._results[config.name] = config, valid
        return valid
