"""``treenail drift``: show what differs from the current config, and repair it.

Without an agent it compares with the copy of the config that ``treenail once`` stored.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from treenail import errors
from treenail.api.ignition.model import Contents
from treenail.api.machineconfig import MachineConfig
from treenail.cli import output, output_format, terminal
from treenail.cli.node import local_machine
from treenail.config import drift_comparison, wanted_state
from treenail.config.image_content import ImageSplit
from treenail.daemon.configuration import config_cache
from treenail.daemon.configuration.drift import BootedState, DriftCheck, ExpectedState
from treenail.daemon.configuration.image_content import read_image_content
from treenail.host.filesystem.root_directory import open_booted_tree
from treenail.host.machine import Machine
from treenail.update.drift import drift_policy
from treenail.update.state import ledger_record
from treenail.update.state import ledger_record as records

if TYPE_CHECKING:
    from treenail.config.redact import FileDiff


Json = dict[str, object]

_REACTION_TEXTS = {
    drift_policy.DriftReaction.REPORT: "reported",
    drift_policy.DriftReaction.REPAIR: "repaired by the agent",
    drift_policy.DriftReaction.BLOCK: "blocks updates",
}
_MAX_FILE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ReportedDrift:
    """A drift, the configured reaction, and the diff from expected to actual contents."""

    drift: drift_comparison.Drift
    reaction: drift_policy.DriftReaction
    diff: "FileDiff | None" = None


def main(arguments: argparse.Namespace) -> int:
    """Print drift, or repair it; return 3 if something has drifted."""
    inspector = _DriftInspector(local_machine.open_machine(arguments.root), arguments.config)
    drifts = inspector.find_drifts()
    if arguments.repair:
        inspector.repair_drifts(_choose_drifts(drifts, arguments.repair))
        drifts = inspector.find_drifts()
        remaining = [reported for reported in drifts if reported.drift.subject in arguments.repair]
        if remaining:
            raise errors.HostError(
                f"cannot repair drift: {'; '.join(str(reported.drift) for reported in remaining)}",
                remedy="read the cause in: journalctl -u treenail",
            )
    paint = terminal.create_painter(sys.stdout, os.environ)
    output_format.print_output(
        arguments.output,
        kind="Drift",
        content=lambda: {
            "config": inspector.current.config,
            "drifts": [*map(_build_document, drifts)],
        },
        lines=lambda: format_drifts(drifts, inspector.current, paint),
    )
    return output.EXIT_ATTENTION if drifts else 0


def build_drift_documents(machine: Machine, config: str | None) -> list[Json]:
    """Build the JSON documents of all drift."""
    return [*map(_build_document, _DriftInspector(machine, config).find_drifts())]


def format_drifts(
    drifts: Sequence[ReportedDrift], current: ledger_record.Target, paint: terminal.Painter
) -> Iterator[str]:
    """Format drift for users."""
    if not drifts:
        yield f"no drift: the machine matches {current.config}"
    for reported in drifts:
        drift = reported.drift
        yield f"{paint(str(drift), '~')} ({_REACTION_TEXTS[reported.reaction]})"
        if reported.diff is None:
            continue
        for line in reported.diff.lines:
            yield terminal.VerbatimLine(f"    {paint(line, line[:1])}")
        if reported.diff.note:
            yield f"    ({reported.diff.note})"


def _refuse_fetch(name: str) -> MachineConfig:
    """Raise: drift needs only configs that this machine stores."""
    raise errors.UnreachableError(f"this machine stores no copy of {name}")


class _DriftInspector:
    """Compare this machine with its config, and repair it."""

    def __init__(self, machine: Machine, config: str | None) -> None:
        self._machine = machine
        self._files = machine.files
        self._is_running = machine.root.prefix == Path("/")
        self._policy = local_machine.load_node_settings(machine.root, config).drift
        self.current = records.from_json(machine.ledger.read_document()).current
        if self.current.config:
            self._split, self._expected = self._read_node_config()
        else:
            self._split, self._expected = self._read_once_config()

    def _read_node_config(self) -> tuple[ImageSplit, ExpectedState]:
        image = open_booted_tree(self._machine.root)
        configs = config_cache.NodeConfigs(
            config_cache.ConfigCache(self._files, _refuse_fetch),
            lambda wanted: read_image_content(image, wanted),
        )
        split = configs.load_split(self.current)
        expected = configs.load_expected(self.current)
        if split is None or expected is None:
            raise errors.HostError(
                f"cannot check drift: this machine stores no copy of {self.current.config}",
                remedy="start the agent, which fetches it: systemctl start treenail",
            )
        return split, expected

    def _read_once_config(self) -> tuple[ImageSplit, ExpectedState]:
        """Read the config of the last ``treenail once``, without the OS part, which it skipped."""
        config = config_cache.read_once_config(self._files)
        if config is None:
            raise errors.HostError(
                "cannot check drift: no config of this machine is recorded",
                remedy="start the agent, or apply a config: treenail once FILE",
            )
        self.current = ledger_record.Target(config.name or "the config of treenail once")
        desired = replace(wanted_state.read_wanted_state(config), os=wanted_state.WantedOS())
        return ImageSplit(desired), ExpectedState.from_wanted(desired)

    def find_drifts(self) -> list[ReportedDrift]:
        """Find all drift, sorted by path."""
        machine = self._machine
        check = DriftCheck(machine, machine.systemd if self._is_running else machine.unit_files)
        by_subject = check.check_everything(self._expected, self._read_booted_state())
        return [
            ReportedDrift(drift, self._policy.choose_reaction(drift), self._diff_contents(drift))
            for subject in sorted(by_subject)
            for drift in by_subject[subject]
        ]

    def repair_drifts(self, drifts: Sequence[drift_comparison.Drift]) -> None:
        """Repair drift through the agent, or directly if no agent runs."""
        # Imported late: comparing needs no steps.
        from treenail.cli.node.cancel import request_from_agent
        from treenail.update.decision.user_requests import RequestKind, UserRequest
        from treenail.update.drift.drift_repair import plan_repair

        paths = tuple(dict.fromkeys(drift.subject for drift in drifts))
        if request_from_agent(self._machine, UserRequest(RequestKind.REPAIR, paths=paths)):
            return
        with self._machine.ledger.hold_lock():
            configuration = local_machine.create_configuration(
                self._machine, is_running=self._is_running
            )
            wanted, provided = self._split.wanted, self._split.provided
            plan = configuration.plan_steps(wanted, self.current.config, provided)
            configuration.apply_repair(plan_repair(plan.steps, drifts))

    def _read_booted_state(self) -> BootedState:
        try:
            arguments = self._machine.kernel.read_command_line()
        except errors.FileError:
            if self._is_running:
                raise
            # A directory tree was never booted: the deployments on the bus are those of this host.
            return BootedState(self._split.wanted.os.kernel_arguments)
        # Imported late: a directory tree needs no bus.
        from treenail.cli.node.backend import read_deployments

        try:
            booted = read_deployments(self._machine).booted
        except errors.HostError:
            return BootedState(arguments)
        if booted is None:
            return BootedState(arguments)
        digests = frozenset((booted.digest, booted.list_digest))
        return BootedState(arguments, frozenset(booted.requested_packages), digests)

    def _diff_contents(self, drift: drift_comparison.Drift) -> "FileDiff | None":
        if drift.attribute is not drift_comparison.DriftAttribute.CONTENTS:
            return None
        # Imported late: compiling the patterns of secrets takes 5 ms.
        from treenail.config.redact import compute_redacted_diff

        entry = drift_comparison.compute_expected_entries(self._split.wanted)[drift.subject]
        contents = entry.contents or ""
        old = contents.decode_bytes() if isinstance(contents, Contents) else contents.encode()
        new = self._files.read_file(drift.subject, limit=_MAX_FILE_BYTES)
        mode = self._machine.root.resolve_path(drift.subject).stat().st_mode & (entry.mode or 0)
        return compute_redacted_diff(old, new, path=drift.subject, mode=mode)


def _choose_drifts(
    drifts: Sequence[ReportedDrift], paths: Sequence[str]
) -> list[drift_comparison.Drift]:
    known = {reported.drift.subject for reported in drifts}
    for path in paths:
        if path not in known:
            raise errors.UsageError(
                f"cannot repair {path}: it has not drifted", remedy="see: treenail drift"
            )
    chosen = [reported.drift for reported in drifts if reported.drift.subject in paths]
    for drift in chosen:
        if drift.attribute in drift_policy.BOOT_ATTRIBUTES:
            raise errors.UsageError(
                f"cannot repair {drift.subject}: only a reboot changes it",
                remedy=drift_policy.format_drift_remedy([drift]),
            )
    return chosen


def _build_document(reported: ReportedDrift) -> Json:
    drift = reported.drift
    return {
        "subject": drift.subject,
        "attribute": drift.attribute,
        "expected": drift.expected,
        "actual": drift.actual,
        "reaction": reported.reaction,
        "diff": {
            "lines": list(reported.diff.lines) if reported.diff else [],
            "note": reported.diff.note if reported.diff else "",
        },
    }
