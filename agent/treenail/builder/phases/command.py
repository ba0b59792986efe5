"""Command line of ``python -m treenail.builder``: one phase of a build.

Each phase writes its result as JSON to ``--result``, which the kubelet reports as the container's
termination message. Exit codes: 0 done; 64 the user's text or files are wrong; 75 every other
failure.
"""

import argparse
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

from treenail import clocks, errors
from treenail.builder import build_spec, failures
from treenail.builder.buildah import sandbox
from treenail.builder.buildah.program import (
    TAIL_LINES,
    BindMount,
    Buildah,
    SandboxedProgram,
    choose_own_id_maps,
    make_environment,
)
from treenail.builder.phases import build
from treenail.image import build_result

log = logging.getLogger(__name__)


class PhaseParser(argparse.ArgumentParser):
    """Parser that exits with `EXIT_USER`: another attempt of the Job has the same arguments."""

    def error(self, message: str) -> NoReturn:
        self.exit(build_result.EXIT_USER, f"{self.prog}: {message}\n")


def main(argv: list[str] | None, set_report: Callable[[Callable[[], int]], None]) -> int:
    """Run one phase; return its exit code.

    ``set_report`` gets the function that a signal calls before it ends the process.
    """
    arguments = create_parser().parse_args(argv)
    # Not in a pod: there the kubelet ends all processes of the container.
    if arguments.die_with_parent:
        sandbox.die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    # Another user, the root of buildah's namespaces, reads what these directories have.
    os.umask(0o022)
    phase = build_result.BuildPhase(arguments.phase)
    if arguments.wait and not _wait(phase):
        return 75

    def report_termination() -> int:
        message = "the builder was terminated: its pod was deleted or evicted"
        result = build_result.BuildResult(
            phase, reason=build_result.BuildReason.EVICTED, message=message
        )
        return _report_result(result, arguments.result)

    set_report(report_termination)
    shown: deque[str] = deque(maxlen=TAIL_LINES)

    def show_line(line: str) -> None:
        shown.append(line)
        log.info("%s", line)

    return _report_result(_run_phase(phase, arguments, show_line), arguments.result, shown)


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of all phases."""
    parser = PhaseParser(prog="python -m treenail.builder", description=__doc__)
    phases = parser.add_subparsers(dest="phase", metavar="PHASE", required=True)
    fetch_parser = phases.add_parser(
        build_result.BuildPhase.FETCH.value, help="pull the images of the text"
    )
    build_parser = phases.add_parser(
        build_result.BuildPhase.BUILD.value, help="run the Containerfile"
    )
    push_parser = phases.add_parser(build_result.BuildPhase.PUSH.value, help="push the image")
    for phase_parser in (fetch_parser, build_parser, push_parser):
        phase_parser.add_argument("--inputs", metavar="DIR", type=Path, required=True)
        phase_parser.add_argument("--work", metavar="DIR", type=Path, required=True)
        phase_parser.add_argument(
            "--inputs-digest", metavar="HEX", default="", help="reject inputs with another digest"
        )
        phase_parser.add_argument("--result", metavar="FILE", type=Path, required=True)
        phase_parser.add_argument("--die-with-parent", action="store_true", help=argparse.SUPPRESS)
        phase_parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    fetch_parser.add_argument("--pull-secret", metavar="FILE", type=Path, dest="secret")
    push_parser.add_argument("--push-secret", metavar="FILE", type=Path, dest="secret")
    for client_parser in (fetch_parser, push_parser):
        client_parser.add_argument(
            "--ca", metavar="FILE", type=Path, help="CAs besides the system's"
        )
    build_parser.add_argument(
        "--mount",
        metavar="SOURCE:TARGET",
        action="append",
        default=[],
        type=_parse_mount,
        help="let instructions see the directory SOURCE, unless it is absent; repeatable",
    )
    build_parser.add_argument(
        "--driver", choices=build_spec.STORAGE_DRIVERS, default=build_spec.STORAGE_DRIVERS[0]
    )
    build_parser.add_argument("--timeout", metavar="SECONDS", type=float, default=3600.0)
    return parser


def _wait(phase: build_result.BuildPhase) -> bool:
    """Load the modules of the phase, and wait until it may run; False if it must not."""
    if phase is not build_result.BuildPhase.BUILD:
        from treenail.builder.phases import transfers  # noqa: F401  # loaded for `_run_phase`
    return sys.stdin.buffer.readline() == build_spec.GO


def _run_phase(
    phase: build_result.BuildPhase, arguments: argparse.Namespace, show_line: Callable[[str], None]
) -> build_result.BuildResult:
    directories = build_spec.BuildDirectories(
        arguments.inputs, arguments.work, arguments.inputs_digest
    )
    clock = clocks.SystemClock()
    try:
        if phase is build_result.BuildPhase.BUILD:
            settings = build.BuildSettings(
                mounts=tuple(mount for mount in arguments.mount if mount.source.is_dir()),
                timeout_s=arguments.timeout,
            )
            buildah = _create_buildah(arguments)
            return build.build_image(directories, buildah, settings, clock, show_line)
        # ssl and http.client take half of the time of all imports; the build needs neither.
        from treenail.builder.phases import transfers
        from treenail.builder.registries import RegistrySettings

        ca = arguments.ca
        if ca == directories.inputs / "ca.pem":
            ca = directories.read_inputs().files.get(ca.name)
        access = RegistrySettings.read(arguments.secret, ca, os.environ)
        if phase is build_result.BuildPhase.FETCH:
            return transfers.fetch_images(directories, access, clock)
        return transfers.push_image(directories, access, clock)
    except errors.TreenailError as error:
        return failures.make_failed_result(error, phase)


def _create_buildah(arguments: argparse.Namespace) -> Buildah:
    work = arguments.work.absolute()
    environ = make_environment(os.environ, work)
    program = SandboxedProgram(clocks.SystemClock(), choose_own_id_maps(), environ, directory=work)
    return Buildah(program, work, arguments.driver)


def _report_result(
    result: build_result.BuildResult, path: Path, shown: Collection[str] = ()
) -> int:
    """Log the result without output that was ``shown``, write it, and return the exit code."""
    if result.has_succeeded:
        log.info("%s done%s", result.phase, f": {result.digest}" if result.digest else "")
    else:
        head, *rest = result.message.split("\n")
        message = "\n".join([head, *(line for line in rest if line not in shown)])
        log.error("%s failed: %s: %s", result.phase, result.reason, message)
    try:
        # Not by rename: the kubelet mounts this one file.
        path.write_text(result.to_text())
    except OSError as error:
        log.error("cannot write %s: %s", path, error.strerror)  # noqa: TRY400 - for users
        return result.exit_code or 75
    return result.exit_code


def _parse_mount(text: str) -> BindMount:
    source, colon, target = text.partition(":")
    if not colon or not target.startswith("/") or ":" in target:
        raise argparse.ArgumentTypeError(f"expected SOURCE:TARGET, found {text!r}")
    return BindMount(Path(source), target)
