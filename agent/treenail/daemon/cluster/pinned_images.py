"""Pulls and pins the images of the PinnedImageSets of this node, and reports on each set.

It runs in a process of its own, so that no update waits for it. It reads everything again: the
process may end at any point, and another one begins at the start.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode, machineconfignode, object_meta, pullspec
from treenail.api.machineconfigpool import PinnedImageSet
from treenail.api.object_meta import Condition
from treenail.config import node_paths, pullsecret
from treenail.daemon.cluster.pull_secrets import AUTH_FILE
from treenail.host.container.registry import SkopeoClient
from treenail.host.cri.images import ImageRuntime
from treenail.host.machine import Machine
from treenail.kube import api_client, resources
from treenail.update import pinned_images, status

log = logging.getLogger(__name__)

_PULL_S, _INSPECT_S = 3600.0, 30.0
_PARALLEL = 2
_PROGRESSING, _DEGRADED = "PinnedImageSetsProgressing", "PinnedImageSetsDegraded"
_COMPLETE = (
    Condition(_PROGRESSING, "False", "AsExpected", "All pinned image sets complete"),
    Condition(_DEGRADED, "False", "AsExpected", "All is good"),
)


class PinnedImagesJob:
    """One pass over all sets of the node. Raises `ClusterError`."""

    def __init__(self, machine: Machine, client: api_client.Client, node: str) -> None:
        self._machine, self._client, self._node = machine, client, node
        self._sets: Sequence[PinnedImageSet] = ()
        self._present, self._failures = set[str](), dict[str, str]()
        """Images of the runtime, and the errors of pulls by image."""

    def run(self) -> bool:
        """Pull, pin and report; return whether every set is complete."""
        node = object_meta.read_metadata(self._client.get(resources.NODES, self._node))
        entries = node.annotations.get(key.PINNED_IMAGE_SETS, "").split(",")
        names = filter(None, (entry.rpartition("@")[0] for entry in entries))
        # A deleted set is none.
        found = [self._client.find(resources.PINNEDIMAGESETS, name) for name in names]
        self._sets = [PinnedImageSet.from_json(document) for document in found if document]
        try:
            problems = self._complete_sets()
        except (errors.ConfigError, errors.HostError) as error:
            if not self._sets:
                raise
            reason = status.format_reason(error)
            problems = {pinned.metadata.name: reason for pinned in self._sets}
        text = "; ".join(f"PinnedImageSet {name}: {problem}" for name, problem in problems.items())
        failed = Condition(_DEGRADED, "True", "PrefetchFailed", text[: key.REASON_LIMIT])
        self._report(problems, *((failed,) if problems else _COMPLETE))
        log.info("PinnedImageSets: %s", text or "complete")
        return not problems

    def _complete_sets(self) -> Mapping[str, str]:
        """Pull and pin; return the problem of each set that is not complete, by its name."""
        files, runtime = self._machine.files, ImageRuntime(self._machine)
        self._present.update(runtime.list_images())
        sets = [(pinned, self._pull_set(runtime, pinned)) for pinned in self._sets]
        present = runtime.list_images() if self._failures else self._present
        before = frozenset((files.read_file(node_paths.PINNED_IMAGES) or b"").decode().split())
        pins, problems = pinned_images.choose_pins(sets, present, before, self._failures)
        if pins or before:
            # Another process must find all that this one may leave pinned.
            files.write_file(node_paths.PINNED_IMAGES, "\n".join(before.union(pins)).encode())
            runtime.pin_images(pins, present & before.difference(pins))
            files.write_file(node_paths.PINNED_IMAGES, "\n".join(pins).encode())
        if not pins and not self._sets:
            files.remove_file(node_paths.PINNED_IMAGES)
        return problems

    def _pull_set(self, runtime: ImageRuntime, pinned: PinnedImageSet) -> str:
        """Pull the missing images of a set until the disk is full, or return why none is pulled."""
        machine = self._machine
        missing = [image for image in pinned.images if image not in self._present]
        if not missing:
            return ""
        if invalid := pinned_images.find_invalid(pinned):
            return invalid
        message = f"node is prefetching images: {self._node}"
        self._report(None, Condition(_PROGRESSING, "True", "ImagePrefetch", message))
        content = machine.files.read_file(AUTH_FILE)
        secret = pullsecret.parse_pull_secret(content or b'{"auths": {}}', where=AUTH_FILE)
        auth_file = "" if content is None else str(machine.root.resolve_path(AUTH_FILE))
        skopeo = SkopeoClient(machine.programs, machine.clock, timeout_s=_INSPECT_S)

        def pull(image: str) -> str:
            spec = pullspec.parse_pull_spec(image, where="a pinned image")
            login = pullsecret.find_credential(secret, spec.registry, spec.repository)
            if runtime.read_usable_bytes() < 0:
                return "the disk is full"
            try:
                runtime.pull_image(image, login.auth if login else "", timeout_s=_PULL_S)
            except errors.CommandError as error:
                # crictl prints warnings before the cause.
                return error.stderr.rpartition("desc = ")[2] or str(error)
            return ""

        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="pinned-images") as threads:
            found = threads.map(partial(skopeo.inspect_image, auth_file=auth_file), missing)
            sizes = dict(zip(missing, found, strict=True))
            if obstacle := pinned_images.find_obstacle(pinned, sizes, runtime.read_usable_bytes()):
                return obstacle
            self._failures.update(zip(missing, threads.map(pull, missing), strict=True))
        self._present.update(image for image in missing if not self._failures[image])
        return ""

    def _report(self, problems: Mapping[str, str] | None, *news: Condition) -> None:
        """Report on the MachineConfigNode if there is one; ``problems`` is None until the end."""
        shown: list[decode.Json] = []
        for meta in (pinned.metadata for pinned in self._sets):
            shown.append({"name": meta.name, "desiredGeneration": meta.generation})
            if problems and meta.name in problems:
                shown[-1]["lastFailedGeneration"] = meta.generation
                shown[-1]["lastFailedGenerationError"] = problems[meta.name]
            elif problems is not None:
                shown[-1]["currentGeneration"] = meta.generation
        resource = resources.MACHINECONFIGNODES
        patch = partial(self._client.patch, resource, self._node, subresource="status")
        # An apply of no set would set the list to null, which the API server rejects.
        cleared: decode.Json = {} if shown else {"status": {"pinnedImageSets": None}}
        try:
            # The answer, also to an empty patch, is the object, which a node may not get.
            present = machineconfignode.MachineConfigNode.from_json(patch(cleared)).conditions
        except errors.NotFoundError:
            return
        own = [condition for condition in present if condition.type in (_PROGRESSING, _DEGRADED)]
        now = clocks.format_rfc3339(self._machine.clock.now())
        conditions = [one.to_json() for one in object_meta.merge_conditions(own, news, now=now)]
        content = {"conditions": conditions, **({"pinnedImageSets": shown} if shown else {})}
        body: decode.Json = {"apiVersion": resource.api_version, "kind": resource.kind}
        patch({**body, "status": content}, api_client.PatchType.APPLY)
