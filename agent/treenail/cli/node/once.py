"""``treenail once``: apply a config to a machine or a directory, atomically.

The command stores a copy of the config, with which ``treenail drift`` compares later.
"""

import argparse
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treenail import errors
from treenail.api import machineconfig
from treenail.api.ignition import schema
from treenail.cli import files, output, output_format, terminal
from treenail.cli.node import local_machine
from treenail.config import image_content, reconcilable, wanted_state
from treenail.daemon.configuration import config_cache
from treenail.daemon.configuration.node_configuration import RecoveryOutcome
from treenail.host.machine import Machine
from treenail.update.steps.step_types import ConfigStep, StoreConfig

if TYPE_CHECKING:
    from treenail.update.impact.impact import ConfigDisruption

Json = dict[str, object]

# Ignition applies these sections at the first boot only.
_FIRST_BOOT_SECTIONS = (
    *(("ignition", name) for name in schema.FETCH_SECTIONS),
    *(("storage", name) for name in ("disks", "filesystems", "raid", "luks")),
    ("passwd", "groups"),
    *(("kernelArguments", name) for name in ("shouldExist", "shouldNotExist")),
)
_APPLIED_USER_KEYS = frozenset({"name", "sshAuthorizedKeys", "passwordHash"})


@dataclass(frozen=True, slots=True)
class OnceResult:
    """Result of a run; a directory has no disruption."""

    steps: tuple[ConfigStep, ...] = ()
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    disruption: "ConfigDisruption | None" = None
    recovery: RecoveryOutcome | None = None

    @property
    def needs_reboot(self) -> bool:
        return self.disruption is not None and self.disruption.needs_reboot


def main(arguments: argparse.Namespace) -> int:
    """Apply the config; return 3 if it needs a reboot."""
    # A config has many values and no cycles; the collector would cost a tenth of the time.
    gc.disable()
    try:
        return _apply_file(arguments)
    finally:
        gc.enable()


def _apply_file(arguments: argparse.Namespace) -> int:
    machine = local_machine.open_machine(arguments.root)
    config = files.read_machine_config(arguments.file)
    is_running = machine.root.prefix == Path("/") and not arguments.no_services
    result = apply_once(config, machine, is_running=is_running)
    try:
        _print_result(result, is_json=arguments.json)
    except OSError:
        if result.steps:
            due = "; to activate it, run: systemctl reboot" if result.needs_reboot else ""
            print(f"treenail: applied the config{due}", file=sys.stderr)
        raise
    return output.EXIT_ATTENTION if result.needs_reboot else 0


def _print_result(result: OnceResult, *, is_json: bool) -> None:
    if is_json:
        output_format.print_document(
            output_format.OutputFormat.JSON, "AppliedConfig", _build_document(result)
        )
    else:
        terminal.print_lines(_format_result(result))
    output.flush_output()


def apply_once(
    config: machineconfig.MachineConfig, machine: Machine, *, is_running: bool
) -> OnceResult:
    """Apply the config below the root; reload and restart services if ``is_running``.

    Raises `ConfigError` before any change, and `StepError` after an undo of all changes.
    """
    parsed = wanted_state.ParsedConfig(config)
    if file := next((file for file in parsed.ignition.files if file.append), None):
        raise errors.IgnitionError(
            f"{file.location}.append: cannot append to a file of a running node",
            remedy="write the whole file as contents",
        )
    # A directory has no image: any name may stand there.
    wanted = reconcilable.read_appliable_state(parsed, image="none")
    skipped = tuple(_find_skipped_parts(config, wanted))
    with machine.ledger.hold_lock():
        configuration = local_machine.create_configuration(machine, is_running=is_running)
        recovery = configuration.undo_interrupted()
        if machine.pending_change.find_owner():
            raise errors.LedgerError(
                f"cannot apply the config: the agent updates {machine.root.prefix}",
                remedy="wait for it, or run: treenail cancel",
            )
        planned = configuration.plan_steps(wanted, config.name)
        steps, disruption = (
            _add_service_steps(wanted, planned.steps) if is_running else (planned.steps, None)
        )
        # Without a step the stored config is the same, and writing a large one takes seconds.
        needs_copy = steps or not config_cache.has_once_config(machine.files)
        copy = StoreConfig(
            config_cache.ONCE_CONFIG_PATH, lambda: config_cache.encode_once_config(config)
        )
        try:
            configuration.apply_steps(
                (copy, *steps) if needs_copy else (), image_content.ImageSplit(wanted), config.name
            )
        except KeyboardInterrupt:
            configuration.undo_interrupted()
            raise
    return OnceResult(steps, planned.notes, skipped, disruption, recovery)


def _add_service_steps(
    wanted: wanted_state.WantedState, steps: tuple[ConfigStep, ...]
) -> "tuple[tuple[ConfigStep, ...], ConfigDisruption]":
    """Add the reloads and restarts of services; also return the disruption."""
    # Imported late: a directory has no services.
    from treenail.api.disruptionpolicy import DEFAULT_POLICY
    from treenail.update.impact.impact import (
        compute_disruption,
        convert_steps_to_diff,
        plan_service_steps,
    )

    disruption = compute_disruption(convert_steps_to_diff(wanted, steps), DEFAULT_POLICY)
    if not disruption.needs_reboot:
        steps += plan_service_steps(steps, [cost.action for cost in disruption.costs])
    return steps, disruption


def _find_skipped_parts(
    config: machineconfig.MachineConfig, wanted: wanted_state.WantedState
) -> Iterator[str]:
    """Find the parts of the config that are no files, units or users."""
    for name, value in (
        ("osImageURL", _redact_text(wanted.os.image)),
        ("baseOSExtensionsContainerImage", _redact_text(wanted.os.extensions_image)),
        ("kernelArguments", " ".join(map(_redact_text, wanted.os.kernel_arguments))),
        (
            "kernelType",
            "" if wanted.os.kernel_type == machineconfig.DEFAULT_KERNEL else wanted.os.kernel_type,
        ),
        ("extensions", ", ".join(sorted(wanted.os.extensions))),
        ("fips", "true" if wanted.os.fips else ""),
    ):
        if value:
            yield f"{name} ({value}): belongs to the operating system, not to files"
    document = config.config or {}
    for section, name in _FIRST_BOOT_SECTIONS:
        part = document.get(section)
        if isinstance(part, dict) and schema.has_values(part.get(name)):
            yield f"{section}.{name}: applies at the first boot only"
    for index, user in enumerate(_get_users(document)):
        others = ", ".join(
            key for key in user if key not in _APPLIED_USER_KEYS and schema.has_values(user[key])
        )
        if others:
            yield f"passwd.users[{index}] ({others}): only SSH keys and password hashes are applied"


def _get_users(document: Json) -> list[Json]:
    section = document.get("passwd")
    return (section.get("users") if isinstance(section, dict) else None) or []


def _redact_text(text: str) -> str:
    # Imported late: compiling the patterns takes long, and most configs have none of these fields.
    if not text:
        return ""
    from treenail.config.redact import redact_line

    return redact_line(text)


def _format_result(result: OnceResult) -> Iterator[str]:
    if result.recovery is RecoveryOutcome.UNDONE:
        yield "undid an earlier change that was interrupted"
    yield from (f"{step}" for step in result.steps)
    yield from (f"note: {note}" for note in result.notes)
    yield from (f"skipped: {text}" for text in result.skipped)
    count = len(result.steps)
    yield f"done: {count} step{'s' * (count != 1)}" if count else "nothing to do"
    if result.disruption is None:
        return
    if result.disruption.needs_drain and not result.needs_reboot:
        yield "note: this change requires a drain, which treenail once does not request"
    if result.needs_reboot:
        yield "to activate the config, run: systemctl reboot"
        yield from (f"  {reason}" for reason in _list_reasons(result.disruption))


def _build_document(result: OnceResult) -> Json:
    return {
        "changed": bool(result.steps),
        "steps": [str(step) for step in result.steps],
        "notes": list(result.notes),
        "skipped": list(result.skipped),
        "rebootNeeded": result.needs_reboot,
        "reasons": [] if result.disruption is None else _list_reasons(result.disruption),
        "recovery": result.recovery,
    }


def _list_reasons(disruption: "ConfigDisruption") -> list[str]:
    return [str(reason) for cost in disruption.costs for reason in cost.reasons]
