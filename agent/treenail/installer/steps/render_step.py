"""The step ``render``: all pools under the names that the cluster's render controller will give.

Files and directories are those of the Machine Config Operator's bootstrap (bootstrap.go). One field
differs: ``spec.configuration.source`` of a pool lists the MachineConfigs of this pool, as in a
cluster. The operator lists those of all pools, so that its first sync in the cluster rewrites the
pool and starts a second build of an equal image.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from treenail import __version__
from treenail.api import documents, machineconfigpool
from treenail.api.decode import Fields, Json
from treenail.api.machineconfig import KIND as MACHINE_CONFIG_KIND
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.render import render
from treenail.controllers.render.render import CONTROLLER_CONFIG_KIND, RenderedConfig
from treenail.errors import ConfigError
from treenail.installer.inputs.install_directory import InstallDirectory
from treenail.installer.inputs.install_files import InstallFiles
from treenail.installer.inputs.install_manifests import InstallManifests
from treenail.installer.steps.steps import StepContext, StepInputs, StepResult

_RENDERED_KINDS = (MACHINE_CONFIG_KIND, machineconfigpool.KIND, CONTROLLER_CONFIG_KIND)
_READABLE, _SECRET = 0o644, 0o600
"""MachineConfigs may contain passwords, and a ControllerConfig has a pull secret."""


@dataclass(frozen=True, slots=True)
class RenderedPool:
    """A pool of the manifests with its rendered config."""

    pool: MachineConfigPool
    """The pool as the render controller leaves it; its status names the rendered config too."""
    document: Json = field(repr=False)
    rendered: RenderedConfig


def render_install_pools(manifests: InstallManifests) -> tuple[RenderedPool, ...]:
    """Render all pools by name; raise `ConfigError` with the errors of all pools. Pure."""
    found, errors = render.render_pools(manifests.to_input())
    if errors:
        remedies = dict.fromkeys(error.remedy for error in errors if error.remedy)
        raise ConfigError("; ".join(map(str, errors)), remedy="; ".join(remedies))
    return tuple(
        _set_rendered(manifests, name, rendered)
        for name, rendered in zip(sorted(manifests.pools), found, strict=True)
    )


def list_rendered_files(
    pools: tuple[RenderedPool, ...], manifests: InstallManifests, directory: InstallDirectory
) -> dict[Path, tuple[bytes, int]]:
    """Return content and mode of all files in the order of writing: pools last. Pure."""
    files = {
        directory.machine_configs / f"{each.rendered.name}.yaml": (
            _dump(each.rendered.config.to_json()),
            _SECRET,
        )
        for each in pools
    }
    for each in manifests.list_kind(CONTROLLER_CONFIG_KIND):
        path = directory.controller_config / f"{each.name}.yaml"
        files[path] = _dump(each.document), _SECRET
    for pool in pools:
        path = directory.machine_pools / f"{pool.pool.name}.yaml"
        files[path] = _dump(pool.document), _READABLE
    return files


class RenderStep:
    """A `treenail.installer.steps.steps.Step`."""

    name = "render"
    title = "render the pools"
    limit = None

    def __init__(
        self,
        directory: InstallDirectory,
        manifests: InstallManifests,
        files: InstallFiles,
        use_pools: Callable[[tuple[RenderedPool, ...]], None],
    ) -> None:
        """``use_pools`` receives the pools, also those of an earlier process."""
        self._directory = directory
        self._manifests = manifests
        self._files = files
        self._use_pools = use_pools

    def compute_inputs(self) -> StepInputs:
        """Compute the digest of each object that a rendered config depends on."""
        found = {
            f"{each.title} in {each.file}": compute_digest(each.document)
            for each in self._manifests.objects.values()
            if each.kind in _RENDERED_KINDS
        }
        return {**found, "treenail": __version__}

    def resume(self, result: StepResult) -> bool:
        """Render in memory; return whether the files of the earlier process are equal."""
        pools = render_install_pools(self._manifests)
        if _list_names(pools) != result:
            return False
        expected = list_rendered_files(pools, self._manifests, self._directory)
        if any(self._files.read(path) != content for path, (content, _) in expected.items()):
            return False
        self._use_pools(pools)
        return True

    def run(self, context: StepContext) -> StepResult:
        """Render, and write all files; remove those of earlier inputs."""
        pools = render_install_pools(self._manifests)
        expected = list_rendered_files(pools, self._manifests, self._directory)
        for path, (content, mode) in expected.items():
            self._files.write(path, content, mode=mode)
        for directory, prefix in (
            (self._directory.machine_pools, ""),
            (self._directory.machine_configs, "rendered-"),
        ):
            for name in self._files.list_names(directory):
                path = directory / name
                if name.startswith(prefix) and name.endswith(".yaml") and path not in expected:
                    self._files.remove(path)
        self._use_pools(pools)
        names = _list_names(pools)
        context.report(f"rendered {', '.join(names.values())}")
        return names


def compute_digest(document: object) -> str:
    """Return the digest of a JSON value; the order of keys does not matter."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _list_names(pools: tuple[RenderedPool, ...]) -> Mapping[str, str]:
    return {each.pool.name: each.rendered.name for each in pools}


def _set_rendered(manifests: InstallManifests, name: str, rendered: RenderedConfig) -> RenderedPool:
    """Return the pool with the rendered config in spec and status, as the MCO's bootstrap does."""
    manifest = manifests.find(machineconfigpool.KIND, name)
    if manifest is None:
        raise KeyError(name)
    configuration = rendered.to_pool_configuration()
    fields = Fields.from_json(manifest.document, "")
    document = {
        **manifest.document,
        "spec": {**fields.get_object("spec").values, "configuration": configuration},
        "status": {**fields.get_object("status").values, "configuration": configuration},
    }
    return RenderedPool(MachineConfigPool.from_json(document), document, rendered)


def _dump(document: Json) -> bytes:
    return documents.dump_document(document).encode()
