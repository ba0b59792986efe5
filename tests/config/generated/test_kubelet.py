"""The kubelet's files of a pool, and what is wrong with a KubeletConfig."""

from typing import Any

import pytest

from tests.config.generated.kubelet_objects import BASE, build_source, make_base, make_spec
from treenail.api.documents import load_document
from treenail.config.generated import kubelet, kubelet_fields, sources
from treenail.encoding import yaml11
from treenail.errors import ConfigError

Json = dict[str, Any]

ABSENT = object()
KUBEADM = sources.ClusterFacts(
    kubeadm_kubelet="kind: KubeletConfiguration\ncgroupDriver: systemd\n"
)
SIZING = "".join(
    f"{name}={{}}\n"
    for name in ("NODE_SIZING_ENABLED", "SYSTEM_RESERVED_MEMORY", "SYSTEM_RESERVED_CPU",
                 "SYSTEM_RESERVED_ES")
)  # fmt: skip
COMPLETE = """\
apiVersion: kubelet.config.k8s.io/v1beta1
authentication:
  anonymous:
    enabled: false
  webhook:
    cacheTTL: 0s
  x509:
    clientCAFile: /etc/kubernetes/kubelet-ca.crt
authorization:
  webhook:
    cacheAuthorizedTTL: 0s
    cacheUnauthorizedTTL: 0s
cgroupDriver: systemd
cgroupRoot: /
clusterDNS:
- 10.0.0.10
clusterDomain: cluster.local
containerLogMaxSize: 50Mi
containerRuntimeEndpoint: ""
cpuManagerReconcilePeriod: 0s
crashLoopBackOff: {}
enforceNodeAllocatable:
- pods
- system-reserved-compressible
evictionPressureTransitionPeriod: 0s
failSwapOn: false
fileCheckFrequency: 0s
httpCheckFrequency: 0s
imageMaximumGCAge: 0s
imageMinimumGCAge: 0s
kind: KubeletConfiguration
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: "0"
    text:
      infoBufferSize: "0"
  verbosity: 0
maxPods: 500
memorySwap:
  swapBehavior: NoSwap
nodeStatusReportFrequency: 0s
nodeStatusUpdateFrequency: 10s
podPidsLimit: 4096
protectKernelDefaults: true
runtimeRequestTimeout: 0s
serializeImagePulls: false
shutdownGracePeriod: 0s
shutdownGracePeriodCriticalPods: 0s
streamingConnectionIdleTimeout: 0s
syncFrequency: 0s
systemCgroups: /system.slice
systemReservedCgroup: /system.slice
volumeStatsAggPeriod: 0s
"""


def generate(
    spec: Json, base: str | None = BASE, facts: sources.ClusterFacts = sources.EMPTY_FACTS
) -> dict[str, str]:
    """Generate the files of a spec that is valid on workers."""
    source = build_source(**spec)
    kubelet.check_kubelet_config(source, is_control_plane=False)
    files = kubelet.generate_kubelet_files(source, base, facts)
    return {file.path: file.contents for file in files}


def load(text: str) -> Json:
    return load_document(text, where="kubelet.conf")


def test_generated_file_has_all_fields_of_go() -> None:
    assert generate({"kubeletConfig": {"maxPods": 500}}) == {kubelet.KUBELET_CONF: COMPLETE}


def test_object_without_changes_keeps_a_complete_base() -> None:
    assert generate({}, COMPLETE) == {kubelet.KUBELET_CONF: COMPLETE}


CHANGES: list[tuple[Json, Json]] = [
    # An empty value replaces none of the base.
    ({"maxPods": 0, "podPidsLimit": 0, "cgroupRoot": ""}, {"maxPods": 250, "podPidsLimit": 4096}),
    ({"authentication": {"anonymous": {"enabled": True}}},
     {"authentication": {"anonymous": {"enabled": True}, "webhook": {"cacheTTL": "0s"},
                         "x509": {"clientCAFile": "/etc/kubernetes/kubelet-ca.crt"}}}),
    ({"nodeStatusUpdateFrequency": "0s"}, {"nodeStatusUpdateFrequency": "10s"}),
    ({"serializeImagePulls": True}, {"serializeImagePulls": True}),
    ({"protectKernelDefaults": False}, {"protectKernelDefaults": ABSENT}),
    # A pointer is written when it is set; null is as an absent field.
    ({"cpuCFSQuota": False, "kubeAPIQPS": 0}, {"cpuCFSQuota": False, "kubeAPIQPS": 0}),
    ({"maxPods": None, "cpuCFSQuota": None}, {"maxPods": 250, "cpuCFSQuota": ABSENT}),
    ({"tracing": {}}, {"tracing": {}}),
    ({"port": 0, "runOnce": False, "address": ""}, {"port": ABSENT, "runOnce": ABSENT}),
    # Lists replace, maps merge.
    ({"allowedUnsafeSysctls": ["a", "b"]}, {"allowedUnsafeSysctls": ["a", "b"]}),
    ({"registerWithTaints": [{"key": "a", "timeAdded": "2026-01-31T12:00:00Z"}]},
     {"registerWithTaints": [{"key": "a", "effect": "", "timeAdded": "2026-01-31T12:00:00Z"}]}),
    ({"shutdownGracePeriodByPodPriority": [{"priority": 5}]},
     {"shutdownGracePeriodByPodPriority": [{"priority": 5, "shutdownGracePeriodSeconds": 0}]}),
    ({"logging": {"vmodule": [{"filePattern": "a"}], "flushFrequency": "0s"}},
     {"logging": {"vmodule": [{"filePattern": "a", "verbosity": 0}], "flushFrequency": "0s",
                  "verbosity": 0, "options": {"json": {"infoBufferSize": "0"},
                                              "text": {"infoBufferSize": "0"}}}}),
    ({"logging": {"options": {"json": {"infoBufferSize": "1Mi", "splitStream": True}}}},
     {"logging": {"flushFrequency": 0, "verbosity": 0, "options": {
         "json": {"infoBufferSize": "0", "splitStream": True},
         "text": {"infoBufferSize": "0"}}}}),
    # Go has no canonical form for the texts of these maps.
    ({"evictionHard": {"memory.available": "1024Mi", "nodefs.available": "10%"}},
     {"evictionHard": {"memory.available": "1024Mi", "nodefs.available": "10%"}}),
    ({"evictionSoftGracePeriod": {"memory.available": "90s"}},
     {"evictionSoftGracePeriod": {"memory.available": "90s"}}),
    ({"kubeReserved": {"cpu": "1"}}, {"kubeReserved": {"cpu": "1"}}),
    # The unit reserves what it can.
    ({"systemReserved": {"memory": "2Gi", "pid": "100"}}, {"systemReserved": {"pid": "100"}}),
    # The cgroup needs a key that enforces it, and no reserved CPUs.
    ({"enforceNodeAllocatable": ["pods"]}, {"systemReservedCgroup": ABSENT}),
    ({"enforceNodeAllocatable": ["pods", "system-reserved"]},
     {"systemReservedCgroup": "/system.slice"}),
    ({"enforceNodeAllocatable": ["pods"], "systemReservedCgroup": "/system.slice"},
     {"systemReservedCgroup": "/system.slice"}),
    ({"reservedSystemCPUs": "0-1"},
     {"systemReservedCgroup": ABSENT, "enforceNodeAllocatable": ["pods"]}),
    ({"reservedSystemCPUs": "0", "enforceNodeAllocatable": ["system-reserved", "kube-reserved"]},
     {"enforceNodeAllocatable": ["pods", "kube-reserved"]}),
    # Fields of another Kubernetes are not the base's to lose.
    ({"kind": "KubeletConfiguration", "featureGates": {}, "clusterDNS": []},
     {"kind": "KubeletConfiguration", "clusterDNS": ["10.0.0.10"], "newerField": {"a": 1}}),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), CHANGES)
def test_changes_are_merged_as_by_the_mco(changes: Json, expected: Json) -> None:
    text = generate({"kubeletConfig": changes}, BASE + "newerField: {a: 1}\n")[kubelet.KUBELET_CONF]
    config = load(text)
    assert {name: config.get(name, ABSENT) for name in expected} == expected


def test_long_line_is_broken_as_by_go() -> None:
    text = generate({"kubeletConfig": {"providerID": "word " * 20 + "end"}})[kubelet.KUBELET_CONF]
    assert f"\nproviderID: {'word ' * 13}word\n  {'word ' * 6}end\n" in text


CANONICAL: list[tuple[str, Any, str]] = [
    ("duration", "0", "0s"),
    ("duration", "-0s", "0s"),
    ("duration", "90s", "1m30s"),
    ("duration", "1.5h", "1h30m0s"),
    ("duration", "+25h0.5s", "25h0m0.5s"),
    ("duration", "1500us", "1.5ms"),
    ("duration", "1500µs20ns", "1.50002ms"),
    ("duration", "7ns", "7ns"),
    ("duration", "1500ns", "1.5µs"),
    ("duration", "-61s", "-1m1s"),
    ("duration", ".5s", "500ms"),
    ("period", "90s", "90s"),
    ("quantity", "1024Mi", "1Gi"),
    ("quantity", "1.5Gi", "1536Mi"),
    ("quantity", "12345Mi", "12345Mi"),
    ("quantity", "0.5Ki", "512"),
    ("quantity", "1000", "1k"),
    ("quantity", 1500, "1500"),
    ("quantity", "0Ki", "0"),
    ("size", "1024Mi", "1024Mi"),
]


@pytest.mark.parametrize(("kind", "value", "expected"), CANONICAL)
def test_value_has_the_form_that_go_writes(kind: str, value: Any, expected: str) -> None:
    field = {
        "duration": {"syncFrequency": value},
        "period": {"evictionSoftGracePeriod": {"a": value}},
        "quantity": {"reservedMemory": [{"limits": {"memory": value}}]},
        "size": {"kubeReserved": {"memory": value}},
    }[kind]
    read = kubelet_fields.read_struct(kubelet_fields.CONFIGURATION, field)
    assert expected in str(read).split("'")


SIZINGS: list[tuple[Json, str]] = [
    ({"autoSizingReserved": True}, SIZING.format("true", "1Gi", "500m", "1Gi")),
    ({"autoSizingReserved": False}, SIZING.format("false", "1Gi", "500m", "1Gi")),
    ({"kubeletConfig": {"systemReserved": {"memory": "3Gi"}}},
     SIZING.format("false", "3Gi", "500m", "1Gi")),
    ({"autoSizingReserved": False, "kubeletConfig": {"systemReserved":
      {"cpu": "1", "ephemeral-storage": "2Gi", "memory": ""}}},
     SIZING.format("false", "1Gi", "1", "2Gi")),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "expected"), SIZINGS)
def test_reservation_becomes_the_environment_of_the_unit(spec: Json, expected: str) -> None:
    files = generate(spec)
    assert [*files] == [kubelet.SIZING_PATH, kubelet.KUBELET_CONF]
    assert files[kubelet.SIZING_PATH] == expected


def test_log_level_becomes_a_drop_in_after_the_sizes() -> None:
    files = generate({"logLevel": 0, "autoSizingReserved": True})
    assert [*files] == [kubelet.SIZING_PATH, kubelet.LOG_LEVEL_PATH, kubelet.KUBELET_CONF]
    assert files[kubelet.LOG_LEVEL_PATH] == '[Service]\nEnvironment="KUBELET_LOG_LEVEL=0"\n'


GCM = [f"TLS_ECDHE_{key}_WITH_{name}"
       for name in ("AES_128_GCM_SHA256", "AES_256_GCM_SHA384", "CHACHA20_POLY1305_SHA256")
       for key in ("ECDSA", "RSA")]  # fmt: skip
TLS13 = ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"]
OLD = [
    *TLS13,
    *GCM,
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_RSA_WITH_AES_128_CBC_SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
]
CUSTOM = {
    "minTLSVersion": "VersionTLS11",
    "ciphers": ["ECDHE-RSA-DES-CBC3-SHA", "AES256-SHA256", "DHE-RSA-AES128-GCM-SHA256"],
}
PROFILES: list[tuple[Json, str, list[str]]] = [
    ({"type": "Old"}, "VersionTLS10", OLD),
    ({"type": "Intermediate"}, "VersionTLS12", [*TLS13, *GCM]),
    ({}, "VersionTLS12", [*TLS13, *GCM]),
    ({"type": "Custom"}, "VersionTLS12", [*TLS13, *GCM]),
    ({"type": "Modern"}, "VersionTLS13", TLS13),
    ({"type": "Custom", "custom": CUSTOM}, "VersionTLS11", ["TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA"]),
]


@pytest.mark.parametrize(("profile", "version", "ciphers"), PROFILES)
@pytest.mark.parametrize("base", [BASE, None])
def test_tls_profile_becomes_version_and_ciphers(
    profile: Json, version: str, ciphers: list[str], base: str | None
) -> None:
    *_, text = generate({"tlsSecurityProfile": profile}, base, KUBEADM).values()
    config = load(text)
    assert (config["tlsMinVersion"], config["tlsCipherSuites"]) == (version, ciphers)


def test_fields_of_the_user_win_over_the_tls_profile() -> None:
    spec = {
        "tlsSecurityProfile": {"type": "Old"},
        "kubeletConfig": {"tlsMinVersion": "VersionTLS12"},
    }
    config = load(generate(spec)[kubelet.KUBELET_CONF])
    assert (config["tlsMinVersion"], config["tlsCipherSuites"]) == ("VersionTLS12", OLD)


def test_node_of_kubeadm_gets_a_drop_in_with_the_fields_of_the_user() -> None:
    changes = {"maxPods": 50, "cpuCFSQuota": False, "systemReserved": {"memory": "1024Mi"}}
    files = generate({"kubeletConfig": changes, "logLevel": 4, "autoSizingReserved": False},
                     None, KUBEADM)  # fmt: skip
    assert files == {
        kubelet.CONFIG_DIR_PATH: '[Service]\nEnvironment="KUBELET_CONFIG_ARGS='
        '--config=/var/lib/kubelet/config.yaml --config-dir=/etc/kubernetes/kubelet.conf.d"\n',
        kubelet.DROP_IN_PATH: "apiVersion: kubelet.config.k8s.io/v1beta1\ncpuCFSQuota: false\n"
        "kind: KubeletConfiguration\nlogging:\n  verbosity: 4\nmaxPods: 50\n"
        "systemReserved:\n  memory: 1024Mi\n",
    }


def test_verbosity_of_the_user_wins_over_the_log_level_in_a_drop_in() -> None:
    spec = {"logLevel": 4, "kubeletConfig": {"logging": {"verbosity": 2, "format": "json"}}}
    config = load(generate(spec, None, KUBEADM)[kubelet.DROP_IN_PATH])
    assert config["logging"] == {"verbosity": 2, "format": "json"}


PATH = "spec.kubeletConfig"
REMOVE = "remove spec.kubeletConfig."
CORRECT = ""
PROBLEMS: list[tuple[Json, str, str]] = [
    ({"kubeletconfig": {}}, "spec.kubeletconfig: unknown field", "did you mean kubeletConfig?"),
    ({"logLevel": 11}, "spec.logLevel: expected an integer from 0 to 10, found 11", CORRECT),
    ({"logLevel": -1}, "spec.logLevel: expected an integer from 0 to 10, found -1", CORRECT),
    ({"autoSizingReserved": "yes"},
     "spec.autoSizingReserved: expected true or false, found a string", CORRECT),
    ({"kubeletConfig": []}, "spec.kubeletConfig: expected an object, found a list", CORRECT),
    ({"tlsSecurityProfile": {"type": "Hard"}},
     "spec.tlsSecurityProfile.type: unknown value 'Hard'",
     "use one of: Old, Intermediate, Modern, Custom"),
    ({"tlsSecurityProfile": {"type": "Custom", "custom": {"minTLSVersion": "1.2"}}},
     "spec.tlsSecurityProfile.custom.minTLSVersion: unknown value '1.2'",
     "use one of: VersionTLS10, VersionTLS11, VersionTLS12, VersionTLS13"),
    ({"autoSizingReserved": True, "kubeletConfig": {"systemReserved": {"pid": "1"}}},
     (f'{PATH}.systemReserved: expected no value, found {{"pid": "1"}}: autoSizingReserved '
     "computes it"), REMOVE + "systemReserved"),
]  # fmt: skip
FIELD_PROBLEMS: list[tuple[Json, str, str]] = [
    ({"maxpods": 1}, ".maxpods: unknown field", "did you mean maxPods?"),
    ({"logging": {"verbose": 1}}, ".logging.verbose: unknown field", "did you mean verbosity?"),
    ({"maxPods": "50"}, ".maxPods: expected an integer, found a string", CORRECT),
    ({"maxPods": 1.0}, ".maxPods: expected an integer, found 1.0", CORRECT),
    ({"maxPods": 2**31},
     ".maxPods: expected an integer from -2147483648 to 2147483647, found 2147483648", CORRECT),
    ({"runOnce": 1}, ".runOnce: expected true or false, found 1", CORRECT),
    ({"allowedUnsafeSysctls": ["a", 1]},
     ".allowedUnsafeSysctls[1]: expected a string, found 1", CORRECT),
    ({"kubeReserved": {"cpu": 1}}, ".kubeReserved.cpu: expected a string, found 1", CORRECT),
    ({"kubeReserved": {"memory": "1gb"}},
     ".kubeReserved.memory: expected a quantity such as 500m or 1Gi, found '1gb'", CORRECT),
    ({"systemReserved": {"memory": "10%"}},
     ".systemReserved.memory: expected a quantity such as 500m or 1Gi, found '10%'", CORRECT),
    ({"evictionHard": {"memory.available": "ten%"}}, ('.evictionHard["memory.available"]: expected '
     "a quantity such as 500m or 1Gi, found 'ten%'"), CORRECT),
    ({"containerLogMaxSize": "50 Mi"},
     ".containerLogMaxSize: expected a quantity such as 500m or 1Gi, found '50 Mi'", CORRECT),
    ({"reservedMemory": [{"limits": {"memory": "1.5"}}]}, (".reservedMemory[0].limits.memory: "
     "expected a whole number of bytes such as 1Gi, found '1.5'"), CORRECT),
    ({"reservedMemory": [{"limits": {"memory": "-1Gi"}}]}, (".reservedMemory[0].limits.memory: "
     "expected a whole number of bytes such as 1Gi, found '-1Gi'"), CORRECT),
    ({"syncFrequency": 60}, ".syncFrequency: expected a string, found 60", CORRECT),
    *(({"syncFrequency": text},
       f".syncFrequency: expected a duration such as 30s or 1m30s, found '{text}'", CORRECT)
      for text in ("", "60", "1 min", "s", "1d", "--1s", "3000000h")),
    ({"evictionSoftGracePeriod": {"a": "1"}}, (".evictionSoftGracePeriod.a: expected a duration "
     "such as 30s or 1m30s, found '1'"), CORRECT),
    *(({"registerWithTaints": [{"timeAdded": text}]}, (".registerWithTaints[0].timeAdded: "
       f"expected a time such as 2026-01-31T12:00:00Z, found '{text}'"), CORRECT)
      for text in ("now", "2026-02-30T12:00:00Z", "2026-01-31")),
    ({"cgroupDriver": "cgroupfs"}, ('.cgroupDriver: expected no value, found "cgroupfs": it must '
     "be that of the container runtime"), REMOVE + "cgroupDriver"),
    ({"clusterDNS": ["10.0.0.1"]}, ('.clusterDNS: expected no value, found ["10.0.0.1"]: it must '
     "be the DNS of the cluster"), REMOVE + "clusterDNS"),
    ({"clusterDomain": "a"}, ('.clusterDomain: expected no value, found "a": it must be the '
     "domain of the cluster"), REMOVE + "clusterDomain"),
    ({"featureGates": {"A": True}}, ('.featureGates: expected no value, found {"A": true}: they '
     "are those of the FeatureGate cluster"), REMOVE + "featureGates"),
    ({"failSwapOn": False}, ".failSwapOn: expected no value, found false: swap is not supported",
     REMOVE + "failSwapOn"),
    ({"memorySwap": {"swapBehavior": "LimitedSwap"}}, (".memorySwap.swapBehavior: expected no "
     'value, found "LimitedSwap": swap is not supported'), REMOVE + "memorySwap.swapBehavior"),
    ({"systemReservedCgroup": "/a", "systemCgroups": "/b"}, ('.systemReservedCgroup: expected "/b",'
     ' found "/a": systemCgroups must have the same value'), REMOVE + "systemReservedCgroup"),
    ({"staticPodPath": "/a"}, ('.staticPodPath: expected an empty string, found "/a": static pods '
     "run on control plane nodes, which have a path of their own"), REMOVE + "staticPodPath"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "problem", "remedy"),
    [*PROBLEMS, *(({"kubeletConfig": fields}, PATH + problem, remedy)
                  for fields, problem, remedy in FIELD_PROBLEMS)],
)  # fmt: skip
def test_wrong_field_is_refused_with_place_and_remedy(
    spec: Json, problem: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        kubelet.check_kubelet_config(build_source(**spec), is_control_plane=False)
    assert (str(caught.value), caught.value.remedy) == (problem, remedy)


@pytest.mark.parametrize("path", ["/a", "", None])
def test_static_pod_path_of_the_control_plane_is_refused(path: str | None) -> None:
    source = build_source(kubeletConfig={"staticPodPath": path})
    with pytest.raises(ConfigError, match="staticPodPath: expected no value, found"):
        kubelet.check_kubelet_config(source, is_control_plane=True)


def test_empty_static_pod_path_is_allowed_on_workers() -> None:
    kubelet.check_kubelet_config(
        build_source(kubeletConfig={"staticPodPath": ""}), is_control_plane=False
    )


REFUSED_CONTENTS: list[tuple[Json, str | None, sources.ClusterFacts, str]] = [
    ({}, None, sources.EMPTY_FACTS, f"no MachineConfig of the pool has {kubelet.KUBELET_CONF}"),
    ({"autoSizingReserved": True}, None, KUBEADM, "spec.autoSizingReserved: expected false"),
    ({"kubeletConfig": {"reservedSystemCPUs": "0"}}, None,
     sources.ClusterFacts(kubeadm_kubelet="kubeReservedCgroup: /a"),
     "spec.kubeletConfig.reservedSystemCPUs: expected no value"),
    ({}, None, sources.ClusterFacts(kubeadm_kubelet="maxPods: a"),
     "ConfigMap kube-system/kubelet-config.maxPods: expected an integer"),
    ({}, "maxPods: a", KUBEADM, "/etc/kubernetes/kubelet.conf.maxPods: expected an integer"),
    ({}, "a: b: c", KUBEADM, "/etc/kubernetes/kubelet.conf, line 1"),
    ({"kubeletConfig": {"systemCgroups": "/other"}}, BASE, KUBEADM,
     'spec.kubeletConfig.systemReservedCgroup: expected "/other"'),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "base", "facts", "problem"), REFUSED_CONTENTS)
def test_contents_that_no_kubelet_can_use_are_refused(
    spec: Json, base: str | None, facts: sources.ClusterFacts, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        generate(spec, base, facts)
    assert problem in str(caught.value)
    assert caught.value.remedy or "line 1" in problem


def test_generated_file_is_its_own_base() -> None:
    for seed in range(20):
        base = yaml11.dump_yaml(make_base(seed), line_width=80)
        try:
            text = generate(make_spec(seed), base)[kubelet.KUBELET_CONF]
        except ConfigError:
            continue
        assert generate({}, text)[kubelet.KUBELET_CONF] == text
