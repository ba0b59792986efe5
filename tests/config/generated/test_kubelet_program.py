"""The kubelet accepts what is generated, as kubelet.conf and as a file of ``--config-dir``.

TREENAIL_TEST_KUBELET names the program (Kubernetes 1.30 or newer). It has no option to check a
config alone: it runs without a kubeconfig, and stops where it would read one, after the checks.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.config.generated.kubelet_objects import BASE
from tests.config.generated.test_kubelet import generate
from tests.mco import programs
from treenail.config.generated import kubelet, sources

pytestmark = pytest.mark.process

Json = dict[str, Any]

KUBELET = programs.Variable("TREENAIL_TEST_KUBELET", "the program kubelet")
KUBEADM = """\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication:
  anonymous: {enabled: false}
  webhook: {cacheTTL: 0s, enabled: true}
authorization:
  mode: Webhook
  webhook: {cacheAuthorizedTTL: 0s, cacheUnauthorizedTTL: 0s}
cgroupDriver: systemd
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
healthzBindAddress: 127.0.0.1
healthzPort: 10248
logging: {flushFrequency: 0, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}},
  verbosity: 0}
memorySwap: {}
rotateCertificates: true
staticPodPath: /etc/kubernetes/manifests
"""
"""What kubeadm writes, and has in its ConfigMap."""
SPECS: dict[str, Json] = {
    "nothing": {},
    "pods": {"kubeletConfig": {"maxPods": 500, "podsPerCore": 10, "podPidsLimit": 2048}},
    "level": {"logLevel": 5},
    "old tls": {"tlsSecurityProfile": {"type": "Old"}},
    "modern tls": {"tlsSecurityProfile": {"type": "Modern"}},
    "custom tls": {"tlsSecurityProfile": {"type": "Custom", "custom": {
        "minTLSVersion": "VersionTLS12", "ciphers": ["ECDHE-RSA-DES-CBC3-SHA"]}}},
    "eviction": {"kubeletConfig": {
        "evictionHard": {"memory.available": "500Mi", "nodefs.available": "10%"},
        "evictionSoft": {"memory.available": "1Gi"},
        "evictionSoftGracePeriod": {"memory.available": "90s"},
        "evictionMinimumReclaim": {"nodefs.available": "2%"},
        "evictionPressureTransitionPeriod": "0s",
        "evictionMaxPodGracePeriod": 60}},
    "images": {"kubeletConfig": {
        "imageMinimumGCAge": "5m", "imageMaximumGCAge": "24h", "imageGCHighThresholdPercent": 80,
        "imageGCLowThresholdPercent": 75, "serializeImagePulls": False,
        "maxParallelImagePulls": 4, "registryPullQPS": 0}},
    "reserved": {"kubeletConfig": {
        "systemReserved": {"memory": "2Gi", "cpu": "750m", "ephemeral-storage": "3Gi"},
        "kubeReserved": {"memory": "1Gi"}, "enforceNodeAllocatable": ["pods"]}},
    "pinned": {"kubeletConfig": {
        "cpuManagerPolicy": "static", "cpuManagerReconcilePeriod": "5s",
        "cpuManagerPolicyOptions": {"full-pcpus-only": "true"}, "reservedSystemCPUs": "0-1",
        "topologyManagerPolicy": "single-numa-node", "topologyManagerScope": "pod"}},
    "shutdown": {"kubeletConfig": {
        "shutdownGracePeriod": "90s", "shutdownGracePeriodCriticalPods": "30s"}},
    "logs": {"kubeletConfig": {
        "containerLogMaxSize": "100Mi", "containerLogMaxFiles": 7,
        "logging": {"format": "json", "verbosity": 3, "flushFrequency": "5s"}}},
    "taints": {"kubeletConfig": {
        "registerWithTaints": [{"key": "a.example/b", "effect": "NoSchedule"}],
        "allowedUnsafeSysctls": ["net.core.somaxconn", "kernel.msg*"]}},
    "events": {"kubeletConfig": {
        "eventRecordQPS": 0, "kubeAPIQPS": 100, "kubeAPIBurst": 200, "cpuCFSQuota": False,
        "nodeStatusUpdateFrequency": "20s", "streamingConnectionIdleTimeout": "5m"}},
}  # fmt: skip
BOTH = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def run_kubelet(directory: Path, *options: str) -> str:
    """Run the kubelet until it lacks its kubeconfig; return its log."""
    command = [
        *("unshare", "--net", "--mount"),
        # Kubernetes 1.35 and newer refuse hosts with cgroup v1.
        *("sh", "-c", 'mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec "$@"', "sh"),
        str(KUBELET.read()),
        f"--root-dir={directory / 'root'}",
        f"--cert-dir={directory / 'pki'}",
        f"--kubeconfig={directory / 'absent'}",
        f"--bootstrap-kubeconfig={directory / 'absent-too'}",
        *options,
    ]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    return done.stderr


def has_accepted(log: str) -> bool:
    """Return whether the kubelet has read and checked its config."""
    return "unable to load bootstrap kubeconfig" in log


def write(directory: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        place = directory / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, "utf-8")
    return directory


@BOTH
def test_kubelet_accepts_kubelet_conf(spec: Json, tmp_path: Path) -> None:
    base = f"{BASE}containerRuntimeEndpoint: unix:///run/crio.sock\n"
    root = write(tmp_path, generate(spec, base))
    log = run_kubelet(tmp_path, f"--config={root}{kubelet.KUBELET_CONF}")
    assert has_accepted(log), log


@BOTH
def test_kubelet_accepts_drop_in_over_the_config_of_kubeadm(spec: Json, tmp_path: Path) -> None:
    facts = sources.ClusterFacts(kubeadm_kubelet=KUBEADM)
    main = "/var/lib/kubelet/config.yaml"
    root = write(tmp_path, {**generate(spec, None, facts), main: KUBEADM})
    options = (f"--config={root}{main}", f"--config-dir={root}{kubelet.CONFIG_DIR}")
    log = run_kubelet(tmp_path, *options)
    assert has_accepted(log), log


def test_kubelet_reads_the_drop_in_and_refuses_a_wrong_one(tmp_path: Path) -> None:
    text = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: -1\n"
    main = "/var/lib/kubelet/config.yaml"
    root = write(tmp_path, {kubelet.DROP_IN_PATH: text, main: KUBEADM})
    options = (f"--config={root}{main}", f"--config-dir={root}{kubelet.CONFIG_DIR}")
    log = run_kubelet(tmp_path, *options)
    assert not has_accepted(log)
    assert "maxPods" in log
