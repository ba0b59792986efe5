"""Kubelet configuration of a pool, from a KubeletConfig over the kubelet.conf of its base.

With a base, the files are those of the Machine Config Operator (MCO): kubelet.conf with all
fields, a drop-in with the log level, and the environment of the unit that reserves resources.

Without a base, kubeadm wrote ``/var/lib/kubelet/config.yaml`` on each node, and rewrites it with
each upgrade. The user's fields become a file of the kubelet's ``--config-dir`` (Kubernetes 1.30).
No directory is the default, so a drop-in of kubelet.service adds the option to
``KUBELET_CONFIG_ARGS`` of kubeadm's ``10-kubeadm.conf``. ``KUBELET_EXTRA_ARGS`` belongs to the
user: ``/etc/sysconfig/kubelet`` sets it, and replaces the value of any drop-in.
"""

import json
from collections.abc import Sequence
from functools import lru_cache

from treenail.api import decode
from treenail.api.documents import load_document
from treenail.config.generated import kubelet_fields, sources
from treenail.encoding import json_values, yaml11
from treenail.errors import ConfigError

KUBELET_CONF = "/etc/kubernetes/kubelet.conf"
SIZING_PATH = "/etc/node-sizing-enabled.env"
LOG_LEVEL_PATH = "/etc/systemd/system/kubelet.service.d/20-logging.conf"
CONFIG_DIR = "/etc/kubernetes/kubelet.conf.d"
DROP_IN_PATH = f"{CONFIG_DIR}/90-treenail.conf"
CONFIG_DIR_PATH = "/etc/systemd/system/kubelet.service.d/20-treenail-config-dir.conf"

_REFUSED = {
    "cgroupDriver": "it must be that of the container runtime",
    "clusterDNS": "it must be the DNS of the cluster",
    "clusterDomain": "it must be the domain of the cluster",
    "featureGates": "they are those of the FeatureGate cluster",
    "failSwapOn": "swap is not supported",
}
_RESERVED = {"memory": "1Gi", "cpu": "500m", "ephemeral-storage": "1Gi"}
"""What `SIZING_PATH` reserves for the system instead of kubelet.conf, with the defaults."""
_SYSTEM_KEYS = {"system-reserved", "system-reserved-compressible"}
_SUITES = {
    "AES128-GCM-SHA256": "AES_128_GCM_SHA256",
    "AES256-GCM-SHA384": "AES_256_GCM_SHA384",
    "CHACHA20-POLY1305": "CHACHA20_POLY1305_SHA256",
    "AES128-SHA256": "AES_128_CBC_SHA256",
    "AES128-SHA": "AES_128_CBC_SHA",
    "AES256-SHA": "AES_256_CBC_SHA",
    "DES-CBC3-SHA": "3DES_EDE_CBC_SHA",
}
_CIPHERS = {
    **{f"TLS_{name}": f"TLS_{name}" for name in [*_SUITES.values()][:3]},
    **{
        f"ECDHE-{key}-{suite}": f"TLS_ECDHE_{key}_WITH_{name}"
        for suite, name in [*_SUITES.items()][:6]
        for key in ("ECDSA", "RSA")
    },
    **{suite: f"TLS_RSA_WITH_{name}" for suite, name in _SUITES.items() if "CHACHA" not in suite},
    "ECDHE-RSA-DES-CBC3-SHA": "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
}
"""The IANA names of the ciphers of OpenSSL that Go has."""
_DROPPED = ("ECDHE-ECDSA-AES256-SHA384", "ECDHE-RSA-AES256-SHA384", "AES256-SHA256")
"""Ciphers without effect, because Go does not have them; also those with the prefix ``DHE-``."""
_VERSIONS = ["", *(f"VersionTLS1{minor}" for minor in range(4))]
_PROFILES = {"Old": ("10", 21), "Intermediate": ("12", 9), "Modern": ("13", 3)}
"""The lowest version of TLS, and how many of `_CIPHERS` a profile has."""
_KIND = {"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": kubelet_fields.CONFIGURATION}


def check_kubelet_config(source: sources.SourceObject, *, is_control_plane: bool) -> None:
    """Raise `ConfigError` with field, expected and found when no kubelet can use it."""
    path = _read_spec(source).get_object("kubeletConfig").get_text("staticPodPath")
    fields = source.get_spec().get_object("kubeletConfig")
    if path or (is_control_plane and "staticPodPath" in fields.values):
        expected = "no value" if is_control_plane else "an empty string"
        reason = "static pods run on control plane nodes, which have a path of their own"
        raise _make_error(fields.path_of("staticPodPath"), expected, path, reason)


def generate_kubelet_files(
    source: sources.SourceObject, base: str | None, facts: sources.ClusterFacts
) -> tuple[sources.GeneratedFile, ...]:
    """Return the files in the order of the MCO. ``base`` is kubelet.conf; None without one."""
    spec = _read_spec(source)
    changes = dict(spec.get_object("kubeletConfig").values)
    tls = _read_tls_profile(spec)
    if base is None:
        return _generate_drop_ins(spec, tls | changes, facts)
    reserved = spec.get_object("kubeletConfig").get_text_map("systemReserved")
    changes["systemReserved"] = {key: reserved[key] for key in reserved.keys() - _RESERVED}
    config = _read_base(base, KUBELET_CONF) | tls
    if changes.get("protectKernelDefaults") is False:
        config["protectKernelDefaults"] = False
    config = kubelet_fields.merge_struct(kubelet_fields.CONFIGURATION, config, changes)
    _adjust_reservation(config, changes)
    files = []
    is_automatic = spec.get_optional_bool("autoSizingReserved")
    if is_automatic is not None or reserved.keys() & _RESERVED:
        sizes = [reserved.get(key) or default for key, default in _RESERVED.items()]
        text = f"NODE_SIZING_ENABLED={str(bool(is_automatic)).lower()}\n"
        text += "SYSTEM_RESERVED_MEMORY={}\nSYSTEM_RESERVED_CPU={}\nSYSTEM_RESERVED_ES={}\n"
        files.append(sources.GeneratedFile(SIZING_PATH, text.format(*sizes)))
    level = spec.get_optional_integer("logLevel")
    if level is not None:
        text = f'[Service]\nEnvironment="KUBELET_LOG_LEVEL={level}"\n'
        files.append(sources.GeneratedFile(LOG_LEVEL_PATH, text))
    complete = kubelet_fields.complete_struct(kubelet_fields.CONFIGURATION, config) | _KIND
    # Go's encoder breaks lines at spaces after 80 characters.
    text = yaml11.dump_yaml(complete, line_width=80)
    return *files, sources.GeneratedFile(KUBELET_CONF, text)


def _generate_drop_ins(
    spec: decode.Fields, config: decode.Json, facts: sources.ClusterFacts
) -> tuple[sources.GeneratedFile, ...]:
    """Return the file with the fields of the user, and the option that names its directory."""
    if not facts.kubeadm_kubelet:
        raise ConfigError(
            f"cannot configure the kubelet: no MachineConfig of the pool has {KUBELET_CONF}, and"
            " kubeadm's ConfigMap kube-system/kubelet-config does not exist",
            remedy=f"add a MachineConfig with the {KUBELET_CONF} that the kubelet reads",
        )
    if spec.get_bool("autoSizingReserved"):
        reason = "nodes of kubeadm have no service that computes it; set systemReserved"
        raise _make_error(spec.path_of("autoSizingReserved"), "false", value=True, reason=reason)
    level = spec.get_optional_integer("logLevel")
    if level is not None:
        # kubelet.service of kubeadm has no variable for the log level.
        logging = spec.get_object("kubeletConfig").get_object("logging").values
        config = config | {"logging": {"verbosity": level} | logging}
    present = _read_base(facts.kubeadm_kubelet, "ConfigMap kube-system/kubelet-config")
    merged = decode.Fields(present | config, "spec.kubeletConfig")
    cgroup = merged.get_text("systemReservedCgroup") or merged.get_text("kubeReservedCgroup")
    if cgroup and (cpus := merged.get_text("reservedSystemCPUs")):
        reason = f"no kubelet starts with it and the cgroup {cgroup}"
        raise _make_error(merged.path_of("reservedSystemCPUs"), "no value", cpus, reason)
    argument = f"--config=/var/lib/kubelet/config.yaml --config-dir={CONFIG_DIR}"
    unit = f'[Service]\nEnvironment="KUBELET_CONFIG_ARGS={argument}"\n'
    return (
        sources.GeneratedFile(CONFIG_DIR_PATH, unit),
        sources.GeneratedFile(DROP_IN_PATH, yaml11.dump_yaml(config | _KIND)),
    )


def _read_spec(source: sources.SourceObject) -> decode.Fields:
    """Return the spec in canonical form, without a field that users must not set."""
    try:
        values = kubelet_fields.read_struct("Spec", source.spec)
    except json_values.Mismatch as problem:
        raise ConfigError(problem.format_message("spec"), remedy=problem.remedy) from problem
    spec = decode.Fields(values, "spec")
    kubelet = spec.get_object("kubeletConfig")
    swap = kubelet.get_object("memorySwap")
    refused = [(kubelet, *item) for item in _REFUSED.items()]
    for fields, name, reason in (*refused, (swap, "swapBehavior", "swap is not supported")):
        if (value := fields.values.get(name)) not in (None, "", [], {}):
            raise _make_error(fields.path_of(name), "no value", value, reason)
    reserved = kubelet.values.get("systemReserved")
    if spec.get_bool("autoSizingReserved") and reserved:
        reason = "autoSizingReserved computes it"
        raise _make_error(kubelet.path_of("systemReserved"), "no value", reserved, reason)
    _check_cgroups(kubelet)
    _read_tls_profile(spec)
    return spec


def _check_cgroups(kubelet: decode.Fields) -> None:
    reserved, system = map(kubelet.get_text, ("systemReservedCgroup", "systemCgroups"))
    if reserved and system and reserved != system:
        path = kubelet.path_of("systemReservedCgroup")
        raise _make_error(
            path, json.dumps(system), reserved, "systemCgroups must have the same value"
        )


def _adjust_reservation(config: decode.Json, changes: decode.Json) -> None:
    """Remove what no kubelet starts with, as the MCO does; raise `ConfigError`."""
    fields = decode.Fields(config, "spec.kubeletConfig")
    chosen = decode.Fields(changes, "").get_text_list("enforceNodeAllocatable")
    if chosen and _SYSTEM_KEYS.isdisjoint(chosen) and not changes.get("systemReservedCgroup"):
        config["systemReservedCgroup"] = ""
    if config.get("reservedSystemCPUs"):
        config["systemReservedCgroup"] = ""
        present = fields.get_text_list("enforceNodeAllocatable")
        keys = [key for key in present if key not in _SYSTEM_KEYS]
        config["enforceNodeAllocatable"] = keys if "pods" in keys else ["pods", *keys]
    _check_cgroups(fields)


def _read_tls_profile(spec: decode.Fields) -> decode.Json:
    """Return the fields of the kubelet for the TLS profile; none without one."""
    if "tlsSecurityProfile" not in spec.values:
        return {}
    profile = spec.get_object("tlsSecurityProfile")
    name = profile.get_text("type")
    _check_choice(profile, "type", name, (*_PROFILES, "Custom", ""))
    version, count = _PROFILES.get(name, _PROFILES["Intermediate"])
    version, ciphers = f"VersionTLS{version}", [*_CIPHERS][:count]
    if name == "Custom" and "custom" in profile.values:
        custom = profile.get_object("custom")
        version, ciphers = custom.get_text("minTLSVersion"), [*custom.get_text_list("ciphers")]
        _check_choice(custom, "minTLSVersion", version, _VERSIONS)
        for cipher in ciphers:
            if not cipher.startswith("DHE-"):
                _check_choice(custom, "ciphers", cipher, (*_CIPHERS, *_DROPPED))
    suites = [_CIPHERS[cipher] for cipher in ciphers if cipher in _CIPHERS]
    return {"tlsMinVersion": version, "tlsCipherSuites": suites}


def _check_choice(fields: decode.Fields, name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        problem = f"{fields.path_of(name)}: unknown value {value!r:.60}"
        raise ConfigError(problem, remedy=f"use one of: {', '.join(filter(None, known))}")


def _make_error(path: str, expected: str, value: object, reason: str) -> ConfigError:
    problem = f"{path}: expected {expected}, found {json.dumps(value):.60}: {reason}"
    return ConfigError(problem, remedy=f"remove {path}")


@lru_cache(maxsize=32)
def _read_base(text: str, where: str) -> decode.Json:
    document = load_document(text, where=where)
    try:
        return kubelet_fields.read_struct(
            kubelet_fields.CONFIGURATION, document, can_have_unknown=True
        )
    except json_values.Mismatch as problem:
        raise ConfigError(problem.format_message(where), remedy="correct the file") from problem
