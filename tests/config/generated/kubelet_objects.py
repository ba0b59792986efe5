"""KubeletConfigs of tests: a base file, and random objects over all fields."""

import random
from typing import Any

from treenail.api import kinds
from treenail.config.generated import kubelet_fields, sources

Json = dict[str, Any]

BASE = """\
kind: KubeletConfiguration
apiVersion: kubelet.config.k8s.io/v1beta1
authentication:
  x509:
    clientCAFile: /etc/kubernetes/kubelet-ca.crt
  anonymous:
    enabled: false
cgroupDriver: systemd
cgroupRoot: /
clusterDNS:
  - 10.0.0.10
clusterDomain: cluster.local
containerLogMaxSize: 50Mi
failSwapOn: false
maxPods: 250
memorySwap:
  swapBehavior: NoSwap
nodeStatusUpdateFrequency: 10s
podPidsLimit: 4096
protectKernelDefaults: true
serializeImagePulls: false
systemCgroups: /system.slice
systemReservedCgroup: /system.slice
enforceNodeAllocatable:
  - pods
  - system-reserved-compressible
"""
"""What a MachineConfig of a cluster has at /etc/kubernetes/kubelet.conf."""

TEXTS = (
    "a", "yes", "off", "y", "null", "~", "0x1F", "017", "1e3", ".5", "1:20", "20:30:40", "-1:0",
    "2026-01-31", "2026-02-30", "2026-1-2T3:4:5Z", "=", "<<a", "a: b", "a #b", "# a", "- a", "-",
    " a", "a ", "a\tb", "a\nb", "a\n", "\na", "a\n\n", "é µ 漢", "it's", '"', "\\", "<&>", "%",
    "@a", "`a", "!a", "*a", "{a", "[a", "|", ">", ",", "a,b", "/system.slice",
    "words that are so many that the line of the file is longer than eighty characters " * 2,
)  # fmt: skip
_DURATIONS = ("0", "0s", "10s", "90s", "1.5h", "100ms", "1500us", "1.5µs", "7ns", "-1m", "25h0m1ms")
_QUANTITIES = ("0", "1", "1000", "1500", "1k", "1024", "1Ki", "2048Ki", "1024Mi", "1.5Gi", "3G",
               "12345Mi", "0.5Ki", "64Ki")  # fmt: skip
_SIZES = (*_QUANTITIES, "500m", "0.5", "1e3", "+1Gi", "5.")
_VALUES: dict[str, tuple[Any, ...]] = {
    "text": (*TEXTS, ""),
    "bool": (True, False),
    "level": (0, 1, 10),
    "int32": (0, 1, -1, 50, 2**31 - 1, -(2**31)),
    "int64": (0, 1, -1, 4096, 2**63 - 1),
    "uint32": (0, 3, 2**32 - 1),
    "float": (0, 1, 0.9, 0.25, 1.0, 0.00001, 0.0001),
    "duration": _DURATIONS,
    "period": _DURATIONS,
    "flush": (0, 5_000_000_000, *_DURATIONS),
    "size": _SIZES,
    "buffer": _SIZES,
    "threshold": (*_SIZES, "10%", "7.5%"),
    "quantity": (*_QUANTITIES, 1000, 7),
    "time": ("2026-01-31T12:00:00Z",),
}
_NAMES = ("memory", "cpu", "ephemeral-storage", "pid", "memory.available", "hugepages-2Mi",
          "hugepages-16Gi", "a_b", "aZ", "y", "1", "10", "2")  # fmt: skip
_ENFORCED = ("pods", "system-reserved", "system-reserved-compressible", "kube-reserved")
# The MCO refuses them, or a test has them as a case of its own.
_ABSENT = frozenset({"cgroupDriver", "clusterDNS", "clusterDomain", "featureGates", "failSwapOn",
                     "swapBehavior", "staticPodPath", "kind", "apiVersion"})  # fmt: skip


def build_source(**spec: Any) -> sources.SourceObject:
    """Build a KubeletConfig with a spec."""
    return sources.SourceObject.from_json(build_object("slow-pods", spec))


def build_object(name: str, spec: Json) -> Json:
    """Build a KubeletConfig as the API server has it."""
    return {
        "apiVersion": kinds.GENERATOR_KINDS["KubeletConfig"],
        "kind": "KubeletConfig",
        "metadata": {"name": name},
        "spec": spec,
    }


def make_spec(seed: int) -> Json:
    """Make a random spec that is valid by the types of its fields."""
    draw = random.Random(seed)
    spec: Json = {"kubeletConfig": make_struct(draw, kubelet_fields.CONFIGURATION)}
    if draw.random() < 0.3:
        spec["logLevel"] = draw.randint(0, 10)
    if draw.random() < 0.3:
        spec["autoSizingReserved"] = draw.random() < 0.5
    if draw.random() < 0.3:
        spec["tlsSecurityProfile"] = _make_profile(draw)
    return spec


def make_base(seed: int) -> Json:
    """Make a random kubelet.conf of a base."""
    document = make_struct(random.Random(f"base {seed}"), kubelet_fields.CONFIGURATION)
    # No template sets them; mergo treats their types as no other (see docs/machine-configs.md).
    for name in ("options", "flushFrequency"):
        document.get("logging", {}).pop(name, None)
    return {**document, "kind": "KubeletConfiguration",
            "apiVersion": "kubelet.config.k8s.io/v1beta1"}  # fmt: skip


def make_struct(draw: random.Random, struct: str) -> Json:
    """Make a random object with a part of its fields."""
    fields = kubelet_fields.FIELDS[struct]
    share = draw.choice((0.05, 0.3, 0.8)) if struct == kubelet_fields.CONFIGURATION else 0.7
    return {
        name: _make_value(draw, name, kind.strip("*!"))
        for name, kind in fields.items()
        if name not in _ABSENT and draw.random() < share
    }


def _make_value(draw: random.Random, name: str, kind: str) -> Any:
    if name == "enforceNodeAllocatable":
        return draw.sample(_ENFORCED, draw.randint(0, 3))
    if name in {"systemReservedCgroup", "systemCgroups", "reservedSystemCPUs"}:
        return draw.choice(("", "", "/system.slice", "0-1", "/other.slice"))
    if kind in kubelet_fields.FIELDS:
        return make_struct(draw, kind)
    if kind.startswith("[]"):
        return [_make_value(draw, "", kind[2:]) for _ in range(draw.randint(0, 3))]
    if kind.startswith("{}"):
        names = draw.sample(_NAMES, draw.randint(0, 4))
        return {key: _make_value(draw, "", kind[2:]) for key in names}
    return draw.choice(_VALUES[kind])


def _make_profile(draw: random.Random) -> Json:
    kind = draw.choice(("Old", "Intermediate", "Modern", "Custom"))
    ciphers = ("TLS_AES_128_GCM_SHA256", "ECDHE-RSA-AES128-GCM-SHA256", "AES128-SHA",
               "ECDHE-RSA-DES-CBC3-SHA", "DHE-RSA-AES128-GCM-SHA256", "AES256-SHA256",
               "ECDHE-ECDSA-CHACHA20-POLY1305", "DES-CBC3-SHA")  # fmt: skip
    custom = {
        "ciphers": draw.sample(ciphers, draw.randint(0, 4)),
        "minTLSVersion": draw.choice(("VersionTLS10", "VersionTLS12", "VersionTLS13")),
    }
    return {"type": kind, **({"custom": custom} if kind == "Custom" else {})}
