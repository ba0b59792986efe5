"""Objects that become MachineConfigs, and the results of the generators.

The kinds are those of the Machine Config Operator beside MachineConfig: KubeletConfig,
ContainerRuntimeConfig, mirror sets, the image config of the cluster and image policies.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from treenail.api import decode, machineconfig, object_meta
from treenail.api.ignition.parser import parse_ignition
from treenail.errors import ConfigError

KUBEADM_CONFIG = "kubelet-config"
"""ConfigMap in the namespace ``kube-system``."""


@dataclass(frozen=True, slots=True)
class SourceObject:
    """One object of a kind in `kinds.GENERATOR_KINDS`; its spec is the JSON of the user."""

    kind: str
    metadata: object_meta.ObjectMeta
    spec: decode.Json = field(repr=False)
    status: decode.Json = field(default_factory=dict, repr=False)

    @classmethod
    def from_json(cls, document: object) -> "SourceObject":
        """Read an API object or a file; raise `ConfigError`."""
        fields = decode.Fields.from_json(document, "")
        return cls(
            fields.get_text("kind"),
            object_meta.read_metadata(document),
            fields.get_object("spec").values,
            fields.get_object("status").values,
        )

    @property
    def key(self) -> tuple[str, str, str]:
        """Kind, namespace (empty for most kinds) and name."""
        return self.kind, self.metadata.namespace, self.metadata.name

    @property
    def title(self) -> str:
        """Kind and name for messages."""
        _, namespace, name = self.key
        return f"{self.kind} {namespace}/{name}" if namespace else f"{self.kind} {name}"

    def get_spec(self) -> decode.Fields:
        """Return the spec for reading; its errors begin with ``spec.``."""
        return decode.Fields(self.spec, "spec")


@dataclass(frozen=True, slots=True)
class GeneratedFile:
    """A file that a generator writes; owned by root, overwrites an existing one."""

    path: str
    contents: str = field(repr=False)
    mode: int = 0o644


class BaseFiles:
    """Files that the base MachineConfigs of a pool write, before any generated config.

    The MCO generates over its templates. treenail has none: it reads the same files from the
    MachineConfigs that the templates became. Of several, the first in the order of names counts,
    because the templates' names begin with 00 and 01.
    """

    def __init__(self, configs: Iterable[machineconfig.MachineConfig]) -> None:
        self._configs = sorted(configs, key=lambda config: config.name)

    def find_text(self, path: str) -> str | None:
        """Return the text of the file; None when no config writes it. Raises `ConfigError`."""
        for config in self._configs:
            # Parsing all is slow, and one bad config would be an error of every object.
            if not _has_path(config, path):
                continue
            for file in parse_ignition(config.config).files:
                if file.path == path:
                    return _decode_text(file.contents.decode_bytes(), config.name, path)
        return None


@dataclass(frozen=True, slots=True)
class ObjectResult:
    """Result of one source object; the controller writes it as conditions."""

    source: SourceObject
    problems: list[ConfigError] = field(default_factory=list)
    """Why the object has no effect, or only a part of it. Empty: accepted."""
    warnings: list[str] = field(default_factory=list)
    """Facts that the user should know of an object that has an effect."""
    suffix: str | None = None
    """Value of the annotation with the suffix of the generated names; None for other kinds."""
    config_names: list[str] = field(default_factory=list)
    """The generated MachineConfigs that hold a part of the object."""

    @property
    def messages(self) -> list[str]:
        """The problems, each with its remedy."""
        remedy = "correct the field, or remove it"
        return [f"{problem}; {problem.remedy or remedy}" for problem in self.problems]


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Facts about the cluster beside the objects and the pools."""

    release_image: str = ""
    """Image of the release (ControllerConfig ``spec.releaseImage``); empty without releases."""
    node_images: tuple[str, ...] = ()
    """Pull specs of the OS images that the nodes boot."""
    kubeadm_kubelet: str = ""
    """The value ``kubelet`` of kubeadm's ConfigMap ``kubelet-config``; empty when none exists."""


def _has_path(config: machineconfig.MachineConfig, path: str) -> bool:
    storage = config.config.get("storage") if config.config else None
    files = storage.get("files") if isinstance(storage, dict) else None
    return isinstance(files, list) and any(
        isinstance(file, dict) and file.get("path") == path for file in files
    )


def _decode_text(contents: bytes, name: str, path: str) -> str:
    try:
        return contents.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"MachineConfig {name}: {path}: expected UTF-8 text") from error


EMPTY_FACTS = ClusterFacts()
Sources = Mapping[tuple[str, str, str], SourceObject]
"""All source objects of the cluster or of the input files, by `SourceObject.key`."""
