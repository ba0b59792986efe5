"""``treenail-controller plan``: show what a change does to each pool and node."""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from itertools import repeat

from treenail import clocks, errors, memory
from treenail.api import component_names, decode, machineconfigpool, pullspec
from treenail.cli import files, output, output_format, terminal
from treenail.cli.controller import connect
from treenail.controllers.pools import pool_membership
from treenail.controllers.render import render
from treenail.controllers.status import rollout_plan, snapshot
from treenail.kube import api_client

_REGISTRIES_S, _REQUEST_S, _PARALLEL = 20.0, 5.0, 8
"""Time for the sizes of all pinned images, and for one request."""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "plan",
        help="show what a change does to each pool and node",
        description="Show what a change does to each pool and node: what is restarted, drained or "
        "rebooted, which MachineConfig requires it, the order, the estimated duration, and the "
        "PodDisruptionBudgets that never allow a drain to finish. Changes nothing.",
        epilog=terminal.format_examples(
            ("plan a change", "treenail-controller plan -f pool.yaml"),
            ("plan what the cluster requests already", "treenail-controller plan --live"),
            ("plan a change of NodePools", "treenail-controller plan --hosted -f nodepool.yaml"),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument(
        "-f",
        "--filename",
        metavar="FILE",
        action="append",
        help="plan the MachineConfigs, MachineConfigPools, KubeletConfigs and other objects in "
        "this file, this directory, or - for the standard input; repeatable",
    )
    parser.add_argument(
        "--live", action="store_true", help="plan the changes that the cluster requests already"
    )
    parser.add_argument(
        "--hosted",
        action="store_true",
        help="plan which machines HyperShift replaces, drains or reboots for the NodePools, "
        "HostedClusters and ConfigMaps in the files",
    )
    parser.add_argument("--pool", metavar="NAME", help="plan this pool only (default: all pools)")
    connect.add_connection_arguments(parser)
    output_format.add_format_arguments(parser, output_format.TEXT_FORMATS)
    parser.set_defaults(run=print_plan)


def print_plan(arguments: argparse.Namespace) -> int:
    """Print the plan; return 1 if a pool cannot be planned, or an object cannot be applied."""
    if bool(arguments.filename) == arguments.live:
        raise errors.UsageError("cannot plan: name the change with -f, or use --live")
    if arguments.hosted:
        if arguments.live or arguments.pool:
            raise errors.UsageError("cannot plan: --hosted needs -f, and neither --live nor --pool")
        return _print_hosted_plan(arguments)
    documents = render.read_manifests(files.read_documents(arguments.filename or ()))
    for warning in (shown := tuple(documents.warnings)):
        print(f"{arguments.program}: warning: {warning}", file=sys.stderr)
    if arguments.filename:
        documents.require_objects("plan")
    with connect.connect_cluster(arguments) as client:
        before = snapshot.read_snapshot(client)
        if documents.locations:
            before = snapshot.add_generator_objects(client, before)
        after = rollout_plan.apply_manifests(before, documents)
        pinned_sets = dict(_plan_pinned_sets(client, after, documents.pinned_sets))
    for warning in documents.warnings[len(shown) :]:
        print(f"{arguments.program}: warning: {warning}", file=sys.stderr)
    if arguments.pool is not None and arguments.pool not in after.pools:
        known = ", ".join(sorted(after.pools)) or "none"
        raise errors.UsageError(
            f"cannot plan: MachineConfigPool {arguments.pool} does not exist, found: {known}"
        )
    for name, image_config in sorted(documents.image_configs.items()):
        if image_config.pool not in after.pools:
            known = ", ".join(sorted(after.pools)) or "none"
            raise errors.UsageError(
                f"cannot plan: MachineOSConfig {name} names MachineConfigPool "
                f"{image_config.pool!r:.260}, which does not exist, found: {known}",
                remedy="correct spec.machineConfigPool.name, or name the pool with -f, too",
            )
    plans = rollout_plan.plan_pools(after, now=clocks.SystemClock().now(), only=arguments.pool)
    output_format.print_output(
        arguments.output,
        kind="RolloutPlan",
        content=lambda: (
            rollout_plan.convert_to_json(plans) | {"pinnedImageSets": [*pinned_sets.values()]}
        ),
        lines=lambda: (
            [*rollout_plan.format_plans(plans), *pinned_sets] or ["no MachineConfigPools found"]
        ),
    )
    sys.stdout.flush()
    is_wrong = documents.mistakes or any(pool_plan.problems for pool_plan in plans)
    return output.EXIT_FAILED if is_wrong else 0


def _print_hosted_plan(arguments: argparse.Namespace) -> int:
    # Imported late: most plans are of another cluster.
    from treenail.controllers.hosted.plan import cluster_reader, hosted_plan

    changes = hosted_plan.read_objects(files.read_documents(arguments.filename))
    with connect.connect_cluster(arguments) as client:
        before, machines = cluster_reader.read_objects(client, changes)
    for text in hosted_plan.list_unused(hosted_plan.apply_objects(before, changes), changes):
        print(f"{arguments.program}: warning: {text}", file=sys.stderr)
    plans = hosted_plan.plan_pools(before, changes, machines, now=clocks.SystemClock().now())
    output_format.print_output(
        arguments.output,
        kind="HostedPlan",
        content=lambda: {"nodePools": [rollout_plan.convert_fields(asdict(one)) for one in plans]},
        lines=lambda: [line for one in plans for line in hosted_plan.format_plan(one)],
    )
    sys.stdout.flush()
    return output.EXIT_FAILED if any(one.problems for one in plans) else 0


def _plan_pinned_sets(
    client: api_client.Client,
    after: rollout_plan.RolloutPlanInput,
    pinned_sets: Mapping[str, machineconfigpool.PinnedImageSet],
) -> Iterator[tuple[str, decode.Json]]:
    """Yield a line and its facts for each set; a node may have some of the layers already."""
    # Imported late: few plans have pinned images.
    from treenail.builder.registries import RegistrySettings
    from treenail.controllers.image_build.cluster_reader import ClusterReader
    from treenail.registry import images, names, transport

    clock, namespace = clocks.SystemClock(), component_names.NAMESPACE
    reader = ClusterReader(client, clock, namespace=namespace, environ=os.environ)
    until = clock.monotonic() + _REGISTRIES_S

    @cache
    def read_settings(registry: str) -> RegistrySettings:
        """Read login, CAs and proxy from the cluster once, not for each image."""
        return RegistrySettings(
            reader.read_base_login(""),
            transport.TlsSettings(ca_pem=reader.read_ca(registry)),
            reader.read_proxy_settings(),
            transport.RegistryLimits(1, _REQUEST_S, _REQUEST_S, _REQUEST_S),
        )

    def read_layers(image: str, architecture: str) -> Iterable[names.Descriptor]:
        spec = pullspec.parse_pull_spec(image, where="a pinned image")
        if clock.monotonic() > until:
            raise errors.OverdueError(f"the registries took more than {_REGISTRIES_S:g} s")
        settings = read_settings(spec.registry)
        with settings.open_client(spec.registry, spec.repository, clock) as registry:
            return images.resolve_image(registry, spec.repository, spec.digest, architecture).layers

    members = pool_membership.group_nodes(after.pools, after.nodes).members
    for name, pinned in sorted(pinned_sets.items()):
        labels, count = pinned.metadata.labels, len(pinned.images)
        pools = [pool for pool, seen in sorted(after.pools.items()) if seen.pool.selects(labels)]
        nodes = [node for pool in pools for node in members.get(pool, ())]
        sizes, reason = [0], ""
        try:
            for architecture in {node.architecture for node in nodes}:
                with ThreadPoolExecutor(_PARALLEL) as threads:
                    found = [*threads.map(read_layers, pinned.images, repeat(architecture))]
                sizes.append(
                    sum({one.digest: one.size for layers in found for one in layers}.values())
                )
        except errors.TreenailError as error:
            reason = str(error)
        size = None if reason else max(sizes)
        shown = f"unknown: {reason}" if size is None else f"at most {memory.format_bytes(size)}"
        where = f"{len(nodes)} nodes of {rollout_plan.format_names(pools) or 'no pool'}"
        text = f"PinnedImageSet {name}: {count} images to {where}; to pull on each: {shown}"
        facts = {"name": name, "pools": pools, "nodeCount": len(nodes), "imageCount": count}
        yield text, {**facts, "bytesPerNode": size, "unknownReason": reason}
