"""ContainerRuntimeConfigs, mirror sets and image configs: builders, and random ones."""

from random import Random
from typing import Any
from urllib.parse import quote

from treenail.api import machineconfig
from treenail.config.generated import sources

Json = dict[str, Any]

MACHINES, CLUSTER = "machineconfiguration.openshift.io/v1", "config.openshift.io/v1"
STORAGE_BASE = """\
# Settings of the nodes.
[storage]
driver = "overlay"
runroot = "/run/containers/storage"
graphroot = "/var/lib/containers/storage"
[storage.options]
additionalimagestores = [
]
remap-user = "storage"
[storage.options.pull_options]
use_hard_links = "false"
enable_partial_images = "false"
ostree_repos = ""
[storage.options.overlay]
skip_mount_home = "true"
size = ""
"""
REGISTRIES_BASE = "unqualified-search-registries = ['a.example', 'docker.io']\n"
BASE = {
    "/etc/containers/storage.conf": STORAGE_BASE,
    "/etc/containers/registries.conf": REGISTRIES_BASE,
}
_LOG_LEVELS = ("", "fatal", "panic", "error", "warn", "info", "debug", "trace")
_SUFFIXES = (
    "", "", "k", "M", "G", "T", "m", "u", "n", "Ki", "Mi", "Gi", "Ti", "Pi", "e3", "E6", "e-1",
)  # fmt: skip
_HOSTS = (
    "a.example", "b.example", "c.a.example", "d.c.a.example", "a.example:5000", "localhost",
    "registry.lab.example", "A.example",
)  # fmt: skip
_PATHS = ("", "", "", "/ns", "/ns/img", "/ns/img/deep", "/n_s/a--b", "/release", "/ns2")
_WILDCARDS = ("*.example", "*.a.example", "*.c.a.example", "*.lab.example")
_MIRROR_LISTS = {
    "ImageDigestMirrorSet": "imageDigestMirrors",
    "ImageTagMirrorSet": "imageTagMirrors",
    "ImageContentSourcePolicy": "repositoryDigestMirrors",
}


def build_base(files: dict[str, str] = BASE) -> sources.BaseFiles:
    """Build the files of the base MachineConfigs."""
    entries = [
        {"path": path, "contents": {"source": f"data:,{quote(text)}"}}
        for path, text in files.items()
    ]
    config = {"ignition": {"version": "3.5.0"}, "storage": {"files": entries}}
    document = {"metadata": {"name": "01-base"}, "spec": {"config": config}}
    return sources.BaseFiles([machineconfig.MachineConfig.from_json(document)])


def build_runtime(name: str = "small", pool: str = "worker", **config: Any) -> Json:
    """Build a ContainerRuntimeConfig."""
    return {
        "apiVersion": MACHINES,
        "kind": "ContainerRuntimeConfig",
        "metadata": {"name": name},
        "spec": {
            "machineConfigPoolSelector": {"matchLabels": {"test": pool}},
            "containerRuntimeConfig": config,
        },
    }


def build_mirrors(name: str, *entries: Json, kind: str = "ImageDigestMirrorSet") -> Json:
    """Build a mirror set."""
    version = "operator.openshift.io/v1alpha1" if "Policy" in kind else CLUSTER
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name},
        "spec": {_MIRROR_LISTS[kind]: list(entries)},
    }


def build_entry(source: str, *mirrors: str, never: bool = False) -> Json:
    """Build the mirrors of one source."""
    policy = {"mirrorSourcePolicy": "NeverContactSource"} if never else {}
    return {"source": source, "mirrors": list(mirrors), **policy}


def build_image_config(name: str = "cluster", **lists: Any) -> Json:
    """Build the image config of the cluster."""
    return {
        "apiVersion": CLUSTER,
        "kind": "Image",
        "metadata": {"name": name},
        "spec": {"registrySources": lists},
    }


def read(*documents: Json) -> list[sources.SourceObject]:
    return [sources.SourceObject.from_json(document) for document in documents]


def make_quantity(random: Random) -> Any:
    """Make a quantity, often one that Go writes in another way."""
    digits = random.choice(
        [str(random.randrange(1, 10 ** random.randrange(1, 8))), "1000", "1024", "8192", "010"]
    )
    decimals = random.choice(["", "", "", ".5", ".25", ".1", ".", ".000"])
    text = f"{random.choice(['', '', '', '+'])}{digits}{decimals}{random.choice(_SUFFIXES)}"
    return int(digits) if random.random() < 0.1 else text


def make_runtime(random: Random, name: str, pool: str, *, stores: bool) -> Json:
    """Make a ContainerRuntimeConfig over all fields; a tenth is one that no runtime accepts."""
    values = {
        "pidsLimit": random.choice([0, 20, 4096, 2**40, random.randrange(20, 9999)]),
        "logLevel": random.choice(_LOG_LEVELS),
        "logSizeMax": random.choice([-1, "-1", "-5Gi", 0, "16384", make_quantity(random)]),
        "overlaySize": random.choice(["10Gi", "0", make_quantity(random), make_quantity(random)]),
        "defaultRuntime": random.choice(["", "crun", "runc"]),
    }
    if stores:
        for field in ("additionalLayerStores", "additionalImageStores", "additionalArtifactStores"):
            count = random.randrange(1, 4)
            values[field] = [{"path": f"/var/lib/{field[:12]}-{each}"} for each in range(count)]
    names = random.sample(sorted(values), random.randrange(len(values) + 1))
    config = {field: values[field] for field in names}
    if random.random() < 0.1:
        field, value = random.choice([
            ("pidsLimit", -1), ("pidsLimit", 19), ("logLevel", "loud"), ("logSizeMax", "8192"),
            ("logSizeMax", "8191.5"), ("overlaySize", "-1"), ("defaultRuntime", "runsc"),
        ])  # fmt: skip
        config[field] = value
    return build_runtime(name, pool, **config)


def make_scope(random: Random, *, wildcards: bool = False) -> str:
    if wildcards and random.random() < 0.2:
        return random.choice(_WILDCARDS)
    return random.choice(_HOSTS) + random.choice(_PATHS)


def make_mirrors(random: Random, name: str) -> Json:
    """Make a mirror set whose sources, mirrors and orders often meet those of others."""
    kind = random.choice(sorted(_MIRROR_LISTS))
    entries = []
    for _ in range(random.randrange(1, 4)):
        source = make_scope(random, wildcards=random.random() < 0.3)
        mirrors = list({make_scope(random): None for _ in range(random.randrange(5))})
        if random.random() < 0.1:
            mirrors.append(source)
        # Mostly one policy for a source, as two are refused.
        never = kind != "ImageContentSourcePolicy" and sum(source.encode()) % 5 == 0
        entries.append(build_entry(source, *mirrors, never=never))
    return build_mirrors(name, *entries, kind=kind)


def make_image_config(random: Random) -> Json:
    lists: Json = {}
    for field in ("insecureRegistries", "blockedRegistries", "allowedRegistries"):
        if random.random() < (0.2 if field == "allowedRegistries" else 0.7):
            scopes = {make_scope(random, wildcards=True): None for _ in range(random.randrange(4))}
            lists[field] = list(scopes)
    if random.random() < 0.3:
        lists["containerRuntimeSearchRegistries"] = random.sample(["a.example", "b.c:5000"], 1)
    return build_image_config(**lists)


def make_cluster(seed: int) -> list[Json]:
    """Make three mirror sets, and mostly an image config."""
    random = Random(seed)
    documents = [make_mirrors(random, f"set-{number}") for number in range(3)]
    return [*documents, *([make_image_config(random)] if random.random() < 0.9 else [])]
