"""``treenail-controller install plan``: show what an installation in image mode does."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime

from treenail import clocks, errors
from treenail.api import machineconfigpool, node
from treenail.cli import output, output_format, terminal
from treenail.cli.controller.install import check_arguments
from treenail.cli.controller.install.arguments import add_directory_argument
from treenail.controllers.handover.image_mode import ImageMode
from treenail.encoding import json_text
from treenail.installer import install_plan
from treenail.installer.bootstrap.host_checks import HostChecker
from treenail.installer.directory import install_files, prepare

_SOURCES = {
    install_plan.InstallImageSource.NONE: "none: the pool boots the stock image",
    install_plan.InstallImageSource.PREBUILT: "pre-built, nothing is built",
    install_plan.InstallImageSource.LAYER: "the base image with one layer of files",
    install_plan.InstallImageSource.BUILD: "built from instructions",
}


def format_plan(
    checked: prepare.CheckedDirectory,
    plans: Sequence[install_plan.PoolInstallPlan],
    host: Sequence[str],
) -> Iterator[str]:
    """Format the plan for people; ``host`` are problems of this host."""
    for plan in plans:
        yield from _format_pool(plan)
        yield ""
    for note in checked.notes:
        yield f"note: {note}"
    if not checked.is_prepared:
        command = f"treenail-controller install prepare --dir {checked.root}"
        yield f"note: this is the plan after: {command}"
    reasons = [
        *map(str, checked.problems),
        *(f"pool {plan.name}: {problem}" for plan in plans for problem in plan.problems),
        *(f"this host: {problem}" for problem in host),
    ]
    if not reasons:
        yield "no reason found why the installation would fail"
        return
    yield f"the installation would fail, {len(reasons)} reason{'' if len(reasons) == 1 else 's'}:"
    for reason in reasons:
        yield f"  {reason}"


def convert_to_json(
    checked: prepare.CheckedDirectory,
    plans: Sequence[install_plan.PoolInstallPlan],
    host: Sequence[str],
) -> dict[str, object]:
    """Convert the plan to a document."""
    return {
        "pools": [_convert_pool(plan) for plan in plans],
        "problems": [
            {
                "file": problem.file,
                "line": problem.line or None,
                "text": problem.text,
                "remedy": problem.remedy,
            }
            for problem in checked.problems
        ],
        "hostProblems": list(host),
        "notes": list(checked.notes),
        "isPrepared": checked.is_prepared,
    }


def _convert_pool(plan: install_plan.PoolInstallPlan) -> dict[str, object]:
    return {
        "name": plan.name,
        "machineConfig": plan.rendered or None,
        "source": plan.source.value,
        "image": plan.image or None,
        "baseImage": plan.base_image or None,
        "contentKey": plan.content_key or None,
        "host": plan.host or None,
        "expectedSeconds": plan.estimate.seconds if plan.estimate else None,
        "firstBoot": list(plan.first_boot),
        "reboots": plan.reboots,
        "problems": list(plan.problems),
        "notes": list(plan.notes),
    }


def _format_pool(plan: install_plan.PoolInstallPlan) -> Iterator[str]:
    yield f"pool {plan.name}"
    yield f"  config:     {plan.rendered or 'unknown'}"
    where = f", on {plan.host}" if plan.host else ""
    yield f"  image:      {_SOURCES[plan.source]}{where}"
    if plan.image:
        yield f"  name:       {plan.image}"
    if plan.base_image:
        yield f"  base image: {plan.base_image}"
    if plan.content_key:
        yield f"  content:    {plan.content_key}"
    if plan.estimate:
        duration = terminal.format_duration(plan.estimate.seconds)
        yield f"  expected:   {duration} ({plan.estimate.why})"
    for number, line in enumerate(plan.first_boot, 1):
        yield f"  {'first boot: ' if number == 1 else '            '}{number}. {line}"
    if plan.source is not install_plan.InstallImageSource.NONE:
        yield f"  reboots:    {plan.reboots}"
    for note in plan.notes:
        yield f"  note:       {note}"


_BUILT = (install_plan.InstallImageSource.BUILD, install_plan.InstallImageSource.LAYER)


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "plan",
        help="show what the installation does, and why it would fail",
        description="Show for each pool of the install directory: the name of the rendered "
        "config, whether an image is built, where and in how many seconds, the first boot of a "
        "machine, and every reason why the installation would fail. Needs no cluster, and changes "
        "nothing. It asks registries for images and logins, unless --offline is given. The exit "
        "code is 1 when the installation would fail.",
        epilog=terminal.format_examples(
            ("show the plan", "treenail-controller install plan --dir cluster"),
            (
                "check the bootstrap host, too",
                "treenail-controller install plan --dir cluster --bootstrap-host",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    add_directory_argument(parser)
    check_arguments.add_check_arguments(parser)
    parser.add_argument(
        "--bootstrap-host",
        action="store_true",
        help="check this host as the bootstrap host: space, programs, ports, architecture, clock",
    )
    output_format.add_format_arguments(parser, output_format.TEXT_FORMATS)
    parser.set_defaults(run=print_plan)


def print_plan(arguments: argparse.Namespace) -> int:
    """Print the plan; return 1 if the installation would fail."""
    clock, files = clocks.SystemClock(), install_files.InstallFiles()
    options = check_arguments.read_options(arguments)
    online = check_arguments.create_online_checks(arguments)
    checked = prepare.check_directory(arguments.directory, options, online)
    directory = install_files.InstallDirectory(arguments.directory)
    facts = install_plan.PlanFacts(
        checked.architectures,
        online.base_sizes if online else {},
        read_measured_seconds(directory, files),
    )
    plans = install_plan.plan_install(checked.manifests, facts, clock)
    host = []
    if arguments.bootstrap_host:
        size = max(facts.base_sizes.values(), default=0)
        host = _check_host(directory, checked, plans, HostChecker(clock), size)
    has_failed = bool(checked.problems or host or any(plan.problems for plan in plans))
    output_format.print_output(
        arguments.output,
        kind="InstallPlan",
        content=lambda: convert_to_json(checked, plans, host),
        lines=lambda: format_plan(checked, plans, host),
    )
    sys.stdout.flush()
    return output.EXIT_FAILED if has_failed else 0


def read_measured_seconds(
    directory: install_files.InstallDirectory, files: install_files.InstallFiles
) -> dict[str, float]:
    """Return the seconds of finished builds by pool; none if the state cannot be read."""
    seconds: dict[str, float] = {}
    try:
        document = json_text.parse_json(files.read(directory.state) or b"{}")
        steps = document.get("steps") if isinstance(document, dict) else None
        for step in steps if isinstance(steps, list) else []:
            kind, _, pool = str(step["name"]).partition(":")
            if (kind, step["state"]) == ("build", "done"):
                began, ended = (datetime.fromisoformat(step[name]) for name in ("began", "ended"))
                seconds[pool] = (ended - began).total_seconds()
    except (errors.TreenailError, ValueError, LookupError, TypeError):
        return {}
    return seconds


def _check_host(
    directory: install_files.InstallDirectory,
    checked: prepare.CheckedDirectory,
    plans: list[install_plan.PoolInstallPlan],
    checker: HostChecker,
    base_size: int,
) -> list[str]:
    settings = checked.manifests.settings or ImageMode()
    own = [
        plan
        for plan in plans
        if plan.name in machineconfigpool.CONTROL_PLANE_POOLS and plan.source in _BUILT
    ]
    wanted = {
        plan.name: checked.architectures.get(plan.name, node.DEFAULT_ARCHITECTURE) for plan in own
    }
    problems = checker.check_architectures(wanted)
    return problems + (checker.find_problems(directory, settings, own, base_size) if own else [])
