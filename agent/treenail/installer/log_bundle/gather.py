"""Gathers a log bundle of an installation: the bootstrap host, the cluster, then nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from treenail.clock import Clock
from treenail.errors import TreenailError
from treenail.installer.inputs.install_directory import InstallDirectory
from treenail.installer.log_bundle.archive import LogBundle
from treenail.installer.log_bundle.bootstrap_parts import PREFIX, add_bootstrap_parts
from treenail.installer.log_bundle.cluster_parts import OpenCluster, add_cluster_parts
from treenail.installer.log_bundle.folder import read_document
from treenail.installer.log_bundle.node_parts import NodeAddress, add_node_parts
from treenail.installer.log_bundle.summary import SUMMARY_NAME, format_summary
from treenail.installer.log_bundle.withhold import withhold_document
from treenail.process import ProgramRunner


@dataclass(frozen=True, slots=True)
class GatherSettings:
    """Nodes to read, the time limit of each, and the cluster."""

    nodes: Sequence[NodeAddress]
    node_timeout_s: float
    open_cluster: OpenCluster | None = None
    """None without a kubeconfig."""


def gather_bundle(
    bundle: LogBundle,
    directory: InstallDirectory,
    settings: GatherSettings,
    programs: ProgramRunner,
    clock: Clock,
) -> tuple[NodeAddress, ...]:
    """Add all parts and the summary, and close the bundle; return the nodes that sent nothing.

    A part that cannot be read is recorded as missing. Raises `OSError` if the bundle cannot be
    written.
    """
    add_bootstrap_parts(bundle, directory, programs, clock)
    pools: tuple[str, ...] = ()
    if settings.open_cluster is not None:
        pools = add_cluster_parts(bundle, settings.open_cluster)
    silent = add_node_parts(bundle, settings.nodes, programs, settings.node_timeout_s)
    state, status = _read_document(directory.state), _read_document(directory.status)
    format_text = partial(format_summary, state, status, pools, bundle.part_names, bundle.missing)
    bundle.add_text(f"{PREFIX}/{SUMMARY_NAME}", format_text)
    bundle.close()
    return silent


def _read_document(path: Path) -> object:
    """Return a document without secrets; None if it cannot be read."""
    try:
        return withhold_document(read_document(path), where=path.name)
    except TreenailError:
        return None
