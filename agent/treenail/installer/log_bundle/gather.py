"""Log bundle of an installation, from the bootstrap host, the cluster and then nodes.

Its first page says what the installation did, where it failed and why. With the units of
`build_gather_hook`, ``openshift-install gather bootstrap`` includes the log bundle.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from treenail import clocks, errors, log_bundle, process
from treenail.api import decode
from treenail.installer.directory.install_files import InstallDirectory
from treenail.installer.log_bundle import bootstrap_parts, cluster_parts, object_secrets

INDEX_NAME = f"{bootstrap_parts.PREFIX}/index.json"


@dataclass(frozen=True, slots=True)
class GatherSettings:
    """Nodes to read, the time limit of each, and the cluster."""

    nodes: Sequence[cluster_parts.NodeAddress]
    node_timeout_s: float
    open_cluster: cluster_parts.OpenCluster | None = None
    """None without a kubeconfig."""


def gather_bundle(
    bundle: log_bundle.LogBundle,
    directory: InstallDirectory,
    settings: GatherSettings,
    programs: process.ProgramRunner,
    clock: clocks.Clock,
) -> tuple[cluster_parts.NodeAddress, ...]:
    """Add all parts and the summary, and close the bundle; return the nodes that sent nothing.

    A part that cannot be read is recorded as missing. Raises `OSError` if the bundle cannot be
    written.
    """
    bootstrap_parts.add_bootstrap_parts(bundle, directory, programs, clock)
    pools: tuple[str, ...] = ()
    if settings.open_cluster is not None:
        pools = cluster_parts.add_cluster_parts(bundle, settings.open_cluster)
    silent = cluster_parts.add_node_parts(bundle, settings.nodes, programs, settings.node_timeout_s)
    state, status = _read_document(directory.state), _read_document(directory.status)
    format_text = partial(format_summary, state, status, pools, bundle.part_names, bundle.missing)
    bundle.add_text(f"{bootstrap_parts.PREFIX}/{SUMMARY_NAME}", format_text)
    bundle.close()
    return silent


def _read_document(path: Path) -> object:
    """Return a document without secrets; None if it cannot be read."""
    try:
        return object_secrets.withhold_document(
            bootstrap_parts.read_document(path), where=path.name
        )
    except errors.TreenailError:
        return None


BOOTSTRAP_HOST_DIRECTORY = "/opt/openshift"
"""Install directory on a bootstrap host of the OpenShift installer."""
_IGNITION_VERSION = "3.2.0"
# installer-gather.sh of the installer makes _ARTIFACTS first, and packs all of it at its end.
_TEMPORARY = "/tmp"  # noqa: S108  the installer's directory
_ARTIFACTS = f"{_TEMPORARY}/artifacts-*"
_PATH_UNIT = f"""\
[Unit]
Description=Watch for openshift-install gather
Documentation=man:treenail-install(7)

[Path]
PathChanged={_TEMPORARY}
Unit=treenail-gather.service

[Install]
WantedBy=multi-user.target
"""
# The installer packs as the user who made the directory, so the files must belong to that user.
# The last command moves everything at once: the installer never packs a half-written part.
# systemd passes $$ as one dollar sign to the shell (systemd.service(5)).
_SERVICE_UNIT = f"""\
[Unit]
Description=Add treenail to the log bundle of openshift-install gather
Documentation=man:treenail-install(7)
ConditionPathExistsGlob={_ARTIFACTS}
StartLimitIntervalSec=0

[Service]
Type=oneshot
ExecStart=/bin/sh -c 'for each in {_ARTIFACTS}; do \\
  [ -d "$$each" ] && [ ! -L "$$each" ] && [ ! -e "$$each/bootstrap/treenail" ] || continue; \\
  rm -rf "$$each/.treenail"; mkdir -p "$$each/.treenail" "$$each/bootstrap"; \\
  treenail-controller install gather --dir {BOOTSTRAP_HOST_DIRECTORY} --output - | \\
    tar -xz --strip-components=1 -C "$$each/.treenail"; \\
  chown -R --reference="$$each" "$$each/.treenail" "$$each/bootstrap"; \\
  mv -T "$$each/.treenail/bootstrap/treenail" "$$each/bootstrap/treenail"; \\
  rm -rf "$$each/.treenail"; done'
"""


def build_gather_hook() -> decode.Json:
    """Build an Ignition config with the units, for the config of the bootstrap host."""
    units = [
        {"name": "treenail-gather.path", "enabled": True, "contents": _PATH_UNIT},
        {"name": "treenail-gather.service", "contents": _SERVICE_UNIT},
    ]
    return {"ignition": {"version": _IGNITION_VERSION}, "systemd": {"units": units}}


SUMMARY_NAME = "summary.txt"
_LATEST_LOGS = 5


def format_summary(
    state: object,
    status: object,
    pools: tuple[str, ...],
    part_names: tuple[str, ...],
    missing: dict[str, str],
) -> str:
    """Format the summary.

    ``state`` and ``status`` are the documents of `install.json` and `status.json`, None without.
    ``pools`` has a sentence for each pool of the cluster without its image.
    """
    lines = [*_format_steps(state), *_format_status(status)]
    if pools:
        lines += ["", "Pools of the cluster:", *(f"  {sentence}" for sentence in pools)]
    lines += ["", *_format_places(part_names)]
    if missing:
        lines += ["", "Missing parts:", *(f"  {name}: {why}" for name, why in missing.items())]
    return "\n".join(lines) + "\n"


def _format_steps(state: object) -> Iterator[str]:
    if state is None:
        yield "No installation has begun in this directory, or its state cannot be read."
        return
    try:
        fields = decode.Fields.from_json(state, "install.json")
        yield f"Installation {fields.get_text('id')}, begun {fields.get_text('began')}"
        steps = list(fields.iter_objects("steps"))
    except errors.ConfigError as error:
        yield f"The state of the installation is damaged: {error}"
        return
    for step in steps:
        try:
            yield f"  {_format_step(step)}"
        except errors.ConfigError as error:
            yield f"  damaged: {error}"


def _format_status(status: object) -> Iterator[str]:
    """Yield the failure, or what the installation does; a step that never began has no record."""
    if status is None:
        return
    yield ""
    try:
        fields = decode.Fields.from_json(status, "status.json")
        failure = fields.get_object("failure")
        reason, remedy = failure.get_text("reason"), failure.get_text("remedy")
        if reason:
            yield f"Step {failure.get_text('step')} failed: {reason}"
            if remedy:
                yield f"  remedy: {remedy}"
            return
        texts = (fields.get_text(name) for name in ("phase", "title", "activity"))
        yield f"State: {', '.join(filter(None, texts))}"
    except errors.ConfigError as error:
        yield f"The status of the installation is damaged: {error}"


def _format_step(step: decode.Fields) -> str:
    name, state = step.get_text("name"), step.get_text("state")
    attempts = step.get_optional_integer("attempts") or 1
    times = " to ".join(filter(None, (step.get_text("began"), step.get_text("ended"))))
    reason = step.get_text("reason")
    because = f": {reason}" if reason else ""
    return f"{state:<8} {name} ({times}; attempt {attempts}){because}"


def _format_places(part_names: tuple[str, ...]) -> Iterator[str]:
    """Name the parts to read first, the last attempts of builds before others."""
    logs = [name for name in part_names if "/logs/" in name]
    if logs:
        yield "Newest logs:"
        yield from (f"  {PurePosixPath(name)}" for name in logs[:_LATEST_LOGS])
    nodes = sorted({name.split("/")[1] for name in part_names if name.startswith("control-plane/")})
    if nodes:
        yield f"Nodes: {', '.join(nodes)}"
