"""``machine-config-controller bootstrap``: it renders pools from files, without a cluster.

It needs templates; ours have one file each. It writes the rendered configs alone, so that the
contents of a generated config are those of the rendered one, and its name is in the pool's list.
"""

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from tests.mco import operator, programs
from treenail.api.ignition.parser import parse_ignition

Json = dict[str, Any]

_LIMIT_S = 300.0
# ReleaseVersion of a build without linker flags, and that of a build for `make test-mco`.
_VERSIONS = ("0.0.1-snapshot", operator.VERSION)

_TEMPLATES = {
    "/etc/containers/storage.conf": '[storage]\ndriver = "overlay"\n',
    "/etc/containers/registries.conf": 'unqualified-search-registries = ["docker.io"]\n',
    "/etc/containers/policy.json": '{"default": [{"type": "insecureAcceptAnything"}]}\n',
    "/etc/kubernetes/kubelet.conf": "apiVersion: kubelet.config.k8s.io/v1beta1\n"
    "kind: KubeletConfiguration\n",
}
"""Files that the program does not start without."""


class BootstrapError(Exception):
    """The program refused the files; the text is the end of its log."""


@dataclass(frozen=True, slots=True)
class RenderedPool:
    """Files and config names of one pool, as the program wrote them."""

    files: dict[str, str]
    """Contents by path."""
    sources: frozenset[str]
    """Names of the configs of all pools: bootstrap does not select."""


def run_bootstrap(
    directory: Path,
    templates: Mapping[str, str],
    objects: Iterable[Json],
    *,
    features: Iterable[str] = (),
    **settings: Any,
) -> dict[str, RenderedPool]:
    """Render the pools among the objects. ``templates`` are texts of files by path.

    ``features`` are the enabled feature gates, ``settings`` are fields of the ControllerConfig.
    Raises `BootstrapError`.
    """
    version = _find_version(directory.with_name(f"{directory.name}-version"))
    cluster = _build_cluster(version, features, settings)
    return _run(directory, templates, [*cluster, *objects])


_found_versions: list[str] = []


def _find_version(directory: Path) -> str:
    """Return the version that the ControllerConfig must name; only the refusal says it."""
    if not _found_versions:
        try:
            _run(directory, {}, [*_build_cluster(""), operator.build_pool("any")])
        except BootstrapError as error:
            found = re.search(r"\(my version: (\S+)\)", str(error))
            if not found:
                raise
            _found_versions.append(found[1])
    return _found_versions[0]


def _run(
    directory: Path, templates: Mapping[str, str], objects: Iterable[Json]
) -> dict[str, RenderedPool]:
    manifests, output = directory / "manifests", directory / "output"
    manifests.mkdir(parents=True)
    write_templates(directory / "templates", templates)
    for index, document in enumerate(objects):
        # The API server stores JSON without spaces, and the program compares a part of this text.
        text = json.dumps(document, separators=(",", ":"))
        (manifests / f"{index:04}.json").write_text(text, "utf-8")
    (directory / "pull-secret").write_text(json.dumps(_PULL_SECRET), "utf-8")
    done = subprocess.run(
        [
            programs.CONTROLLER.read(),
            "bootstrap",
            f"--manifest-dir={manifests}",
            f"--dest-dir={output}",
            f"--pull-secret={directory / 'pull-secret'}",
            f"--templates={directory / 'templates'}",
        ],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        env={"HOME": str(directory)},
    )
    if done.returncode:
        raise BootstrapError(done.stderr[-2000:])
    pools = map(_load, sorted((output / "machine-pools").glob("*.yaml")))
    return {pool["metadata"]["name"]: _read_pool(pool, output) for pool in pools}


def write_templates(directory: Path, templates: Mapping[str, str]) -> None:
    """Write the templates of ``01-ROLE-kubelet``; ``templates`` are texts of files by path."""
    for role in ("worker", "master"):
        place = directory / role / f"01-{role}-kubelet" / "_base" / "files"
        place.mkdir(parents=True)
        for index, (path, text) in enumerate({**_TEMPLATES, **templates}.items()):
            (place / f"{index}.yaml").write_text(_build_template(path, text), "utf-8")


def _build_template(path: str, text: str) -> str:
    assert "{{" not in text, "Go's templates expand braces"
    body = "".join(f"    {line}\n" for line in text.split("\n"))
    return f"mode: 0644\npath: {json.dumps(path)}\ncontents:\n  inline: |\n{body}"


def _build_cluster(
    version: str, features: Iterable[str] = (), settings: Mapping[str, Any] = MappingProxyType({})
) -> Iterable[Json]:
    enabled = [{"name": feature} for feature in features]
    gates = [{"version": version, "enabled": enabled, "disabled": [{"name": "OSStreams"}]}
             for version in _VERSIONS]  # fmt: skip
    yield {
        "apiVersion": "config.openshift.io/v1",
        "kind": "FeatureGate",
        "metadata": {"name": "cluster"},
        "status": {"featureGates": gates},
    }
    yield {
        "apiVersion": f"{operator.GROUP}/v1",
        "kind": "ControllerConfig",
        "metadata": {
            "name": "machine-config-controller",
            "annotations": {f"{operator.GROUP}/generated-by-version": version},
        },
        "spec": operator.build_controller_config(b"", **settings),
    }


_PULL_SECRET = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "pull-secret", "namespace": "openshift-config"},
    "type": "kubernetes.io/dockerconfigjson",
    "data": {".dockerconfigjson": "eyJhdXRocyI6IHt9fQ=="},
}


def _read_pool(pool: Json, output: Path) -> RenderedPool:
    target = pool["spec"]["configuration"]
    rendered = _load(output / "machine-configs" / f"{target['name']}.yaml")
    files = parse_ignition(rendered["spec"]["config"]).files
    contents = {file.path: file.contents.decode_bytes().decode() for file in files}
    return RenderedPool(contents, frozenset(source["name"] for source in target["source"]))


def _load(path: Path) -> Json:
    document: Json = yaml.load(path.read_text("utf-8"), Loader=yaml.CSafeLoader)
    return document
