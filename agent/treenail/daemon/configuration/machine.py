"""Plans and applies the files, units and users of this machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from treenail.config.image_content import ImageSplit
from treenail.config.wanted import WantedState
from treenail.daemon.configuration.apply import apply_steps, recover_interrupted, restore_pending
from treenail.daemon.configuration.inspect import MachineInspector
from treenail.daemon.configuration.step_runner import StepRunner, decode_service_notes
from treenail.errors import FileError
from treenail.update.steps.ownership import Ownership, compute_ownership
from treenail.update.steps.plan import StepPlan, plan_steps
from treenail.update.steps.steps import (
    ConfigStep,
    EnablementStep,
    RecordOwnership,
    ServiceStep,
)

_MAX_SHOWN_STEPS = 3


@dataclass(frozen=True, slots=True)
class UnfinishedChanges:
    """Changes that an earlier process or action did not finish."""

    is_interrupted: bool = False
    """A change must be undone or cleaned up before anything else is done."""
    has_undo: bool = False
    """The owner has a pending change, which it may still undo."""


class NodeConfiguration:
    """Plans and applies steps. Raises `HostError`, and `ConfigError` for a damaged record."""

    def __init__(self, inspector: MachineInspector, runner: StepRunner) -> None:
        self._inspector = inspector
        self._runner = runner

    def find_unfinished(self, owner: str) -> UnfinishedChanges:
        """Find unfinished changes. A pending change of another owner counts as interrupted."""
        pending_owner = self._runner.pending.find_owner()
        return UnfinishedChanges(
            is_interrupted=self._runner.undo.find_interrupted() is not None
            or self._runner.pending.needs_cleanup
            or pending_owner not in {"", owner},
            has_undo=bool(pending_owner) and pending_owner == owner,
        )

    def recover_interrupted(self, owner: str) -> None:
        """Undo an interrupted change, and confirm a pending change of another owner."""
        recover_interrupted(self._runner)
        if self._runner.pending.find_owner() not in {"", owner}:
            self._runner.pending.confirm_change()

    def plan_steps(
        self, new: WantedState, config: str, provided: frozenset[str] = frozenset()
    ) -> StepPlan:
        """Plan the steps from the machine as it is to the wanted state of the named config.

        ``provided`` are the paths and units that an image provides.
        """
        return plan_machine_steps(self._inspector, new, config, provided)

    def check_steps(self, steps: Sequence[ConfigStep]) -> None:
        """Raise `FileError` for steps that this machine cannot make."""
        self._runner.check_owners(steps)
        self._runner.check_path_kinds(steps)

    def apply_steps(
        self, steps: Sequence[ConfigStep], split: ImageSplit, config: str, *, owner: str = ""
    ) -> None:
        """Apply the steps, all or none, and verify that the new plan is empty.

        With an ``owner`` the change stays pending until `confirm_pending` or `restore_pending`.
        """

        def verify() -> None:
            left = self.plan_steps(split.wanted, config, split.provided).steps
            if left:
                shown = "; ".join(str(step) for step in left[:_MAX_SHOWN_STEPS])
                more = (
                    f" and {len(left) - _MAX_SHOWN_STEPS} more"
                    if len(left) > _MAX_SHOWN_STEPS
                    else ""
                )
                raise FileError(f"steps are left after applying all: {shown}{more}")

        apply_steps(steps, self._runner, verify=verify, owner=owner)

    def record_ownership(self, new: WantedState, config: str) -> None:
        """Record what the config owns, unless the machine already has a record."""
        if self._inspector.read_ownership() == Ownership():
            apply_steps((RecordOwnership(compute_ownership(config, new)),), self._runner)

    def complete_steps(self, steps: Sequence[ConfigStep], split: ImageSplit, config: str) -> None:
        """Apply the steps that are left after a boot, and start the units that they enable."""
        self.apply_steps(_add_reload(steps), split, config)
        if any(isinstance(step, EnablementStep) for step in steps):
            self._runner.start_default_target()

    def apply_repair(self, steps: Sequence[ConfigStep]) -> None:
        """Apply the steps, all or none, without verifying that no others are left."""
        apply_steps(steps, self._runner)

    def complete_early_steps(self, steps: Sequence[ConfigStep]) -> None:
        """Apply the steps that the boot needs before it is verified."""
        apply_steps(_add_reload(steps), self._runner)
        if any(isinstance(step, EnablementStep) for step in steps):
            self._runner.start_default_target()

    def list_pending_services(self) -> tuple[ServiceStep, ...]:
        """Return the reloads and restarts that were part of the pending change."""
        pending = self._runner.pending.find_interrupted()
        return decode_service_notes(pending.notes) if pending else ()

    def confirm_pending(self) -> None:
        """Confirm the pending change, so that it can no longer be undone."""
        self._runner.pending.confirm_change()

    def restore_pending(self, *, is_booted: bool = False) -> None:
        """Undo the pending change; ``is_booted``: the machine booted with it."""
        restore_pending(self._runner, is_booted=is_booted)


def _add_reload(steps: Sequence[ConfigStep]) -> tuple[ConfigStep, ...]:
    """Add the reload of systemd if a unit changes."""
    # Imported late: 10 ms for policies, which no command needs.
    from treenail.update.impact.impact import plan_service_steps  # noqa: PLC0415

    return (*steps, *plan_service_steps(steps, ()))


def plan_machine_steps(
    inspector: MachineInspector,
    new: WantedState,
    config: str,
    provided: frozenset[str] = frozenset(),
) -> StepPlan:
    """Plan the steps from the machine as it is; see `NodeConfiguration.plan_steps`."""
    old = inspector.read_ownership()
    inventory = inspector.inspect_machine(old, new, provided)
    return plan_steps(old, new, inventory, config=config, provided=provided)
