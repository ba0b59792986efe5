"""``treenail once``: a machine or a directory brought to a config, all of it or nothing."""

import argparse
import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from treenail.api.disruptionpolicy import DEFAULTS
from treenail.api.machineconfig import DEFAULT_KERNEL, MachineConfig
from treenail.cli.files import machine_config
from treenail.cli.machine import survey_and_runner
from treenail.cli.main import REBOOT_NEEDED
from treenail.config.wanted import Wanted, wanted
from treenail.daemon.apply import Recovery, apply, recover
from treenail.errors import LedgerError, UsageError
from treenail.host.ledger import Ledger
from treenail.host.root import Root
from treenail.update.disruption import Disruption, Level, disruption
from treenail.update.plan import as_diff, plan, serving
from treenail.update.steps import Step

Json = dict[str, object]
_FIRST_BOOT = (
    *(("storage", name) for name in ("disks", "filesystems", "raid", "luks")),
    ("passwd", "groups"),
    *(("kernelArguments", name) for name in ("shouldExist", "shouldNotExist")),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was done, and what was not."""

    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    cost: Disruption = field(default_factory=Disruption)
    recovered: Recovery | None = None


def main(arguments: argparse.Namespace) -> int:
    """Apply the config; 3 when it takes effect with a reboot."""
    # A config is many values and no cycles: looking for those would cost a tenth of the time.
    gc.disable()
    try:
        return _main(arguments)
    finally:
        gc.enable()


def _main(arguments: argparse.Namespace) -> int:
    root = Root(arguments.root or "/")
    if not root.prefix.is_dir():
        raise UsageError(f"--root: there is no directory {root.prefix}")
    config = machine_config(arguments.file)
    running = root.prefix == Path("/") and not arguments.no_services
    outcome = once(config, root, running=running)
    if arguments.json:
        print(json.dumps(_document(outcome), indent=1))
    else:
        for line in _lines(outcome):
            print(line)
    return REBOOT_NEEDED if outcome.cost.reboots else 0


def once(config: MachineConfig, root: Root, *, running: bool) -> Outcome:
    """Have the config below the root; ``running`` is a machine whose services take notice.

    Raises `ConfigError` before anything is touched, `StepError` when all is as it was.
    """
    wish = wanted(config)
    left_out = tuple(_left_out(config, wish))
    with Ledger(root).lock():
        survey, runner = survey_and_runner(root, running=running)
        recovered = recover(runner)
        if runner.held.owner():
            raise LedgerError(
                f"the agent has an update of {root.prefix} under way",
                remedy="let it finish, or call it off: treenail cancel",
            )
        old = survey.managed()
        found = plan(old, wish, survey.see(old, wish), config=config.name)
        cost = disruption(as_diff(wish, found.steps), DEFAULTS) if running else Disruption()
        steps = found.steps
        if running and not cost.reboots:
            steps += serving(steps, [each.action for each in cost.costs])
        try:
            apply(steps, runner)
        except KeyboardInterrupt:
            recover(runner)
            raise
    return Outcome(steps, found.notes, left_out, cost, recovered)


def _left_out(config: MachineConfig, wish: Wanted) -> Iterator[str]:
    """What the config has and files do not do."""
    for name, value in (
        ("osImageURL", wish.os.image),
        ("baseOSExtensionsContainerImage", wish.os.extensions_image),
        ("kernelArguments", " ".join(wish.os.kernel_arguments)),
        ("kernelType", "" if wish.os.kernel_type == DEFAULT_KERNEL else wish.os.kernel_type),
        ("extensions", ", ".join(sorted(wish.os.extensions))),
        ("fips", "true" if wish.os.fips else ""),
    ):
        if value:
            yield f"{name} ({value}): it is for the operating system, not for its files"
    document = config.config or {}
    for section, name in _FIRST_BOOT:
        part = document.get(section)
        if isinstance(part, dict) and part.get(name):
            yield f"{section}.{name}: it is for a machine's first boot"


def _lines(outcome: Outcome) -> Iterator[str]:
    if outcome.recovered is Recovery.UNDONE:
        yield "undid an earlier change that was cut short"
    yield from (f"{step}" for step in outcome.steps)
    yield from (f"note: {note}" for note in outcome.notes)
    yield from (f"left out: {text}" for text in outcome.left_out)
    yield f"done: {len(outcome.steps)} steps" if outcome.steps else "nothing to do"
    if outcome.cost.level is Level.DRAIN:
        yield "note: the node should have been drained for this; nothing here does that"
    if outcome.cost.reboots:
        yield "reboot the machine for it to take effect:"
        yield from (f"  {reason}" for cost in outcome.cost.costs for reason in cost.reasons)


def _document(outcome: Outcome) -> Json:
    return {
        "changed": bool(outcome.steps),
        "steps": [str(step) for step in outcome.steps],
        "notes": list(outcome.notes),
        "leftOut": list(outcome.left_out),
        "rebootNeeded": outcome.cost.reboots,
        "reasons": [str(reason) for cost in outcome.cost.costs for reason in cost.reasons],
        "recovered": outcome.recovered,
    }
