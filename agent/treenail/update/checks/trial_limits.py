"""Time limits of boot trials."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """The time limits of a boot trial, in seconds."""

    deadline_s: float = 600.0
    """The time on the trial's clock before which no check rolls back."""
    settle_s: float = 10.0
    """How long all checks must pass without a break."""
    failing_s: float = 120.0
    """How long a check must fail without a break before it can cause a rollback."""
    ready_s: float = 300.0
    """How long the API server must answer before NodeReady can cause a rollback."""
    outage_s: float = 10_800.0
    """The longest time for which the clock of the trial stands still."""

    @property
    def last_s(self) -> float:
        """The time on the trial's clock at which the trial ends in any case.

        Not before the checks have run for `observed_s`.
        """
        return 2 * self.deadline_s + self.failing_s + self.ready_s

    @property
    def observed_s(self) -> float:
        """How long the checks must run so that each failure can last long enough to count."""
        return max(self.failing_s, self.ready_s)
