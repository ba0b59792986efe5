"""Fields of KubeletConfiguration v1beta1 of Kubernetes 1.36, and how Go reads, merges, writes it.

The Machine Config Operator (MCO) decodes kubelet.conf and the user's fields into a Go struct,
merges them with mergo (WithOverride) and encodes every field:

- An empty value (false, 0, "", an empty list) of the user never replaces a value of the base,
  also where Go has a pointer. ``serializeImagePulls: false`` over true stays true.
- A pointer (``*``) is written whenever it is set. Other empty values are omitted, except
  durations, objects and the kinds with ``!``.
- Durations and quantities have their canonical form: ``90s`` becomes ``1m30s``.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial

from treenail.encoding import json_values, quantities, yaml11
from treenail.encoding.json_values import Json, Mismatch

CONFIGURATION = "KubeletConfiguration"

_KINDS = {
    "Spec": """*bool: autoSizingReserved level: logLevel any: machineConfigPoolSelector
KubeletConfiguration: kubeletConfig TlsProfile: tlsSecurityProfile""",
    "TlsProfile": "text: type TlsCustom: custom any: old intermediate modern",
    "TlsCustom": "text: minTLSVersion []text: ciphers groups",
    CONFIGURATION: """
text: kind apiVersion staticPodPath podLogsDir staticPodURL address tlsCertFile tlsPrivateKeyFile
tlsMinVersion imagePullCredentialsVerificationPolicy healthzBindAddress clusterDomain
kubeletCgroups systemCgroups cgroupRoot cgroupDriver cpuManagerPolicy memoryManagerPolicy
topologyManagerPolicy topologyManagerScope hairpinMode podCIDR contentType
configMapAndSecretChangeDetectionStrategy reservedSystemCPUs showHiddenMetricsForVersion
systemReservedCgroup kubeReservedCgroup volumePluginDir providerID memoryReservationPolicy
imageServiceEndpoint text!: containerRuntimeEndpoint *text: resolvConf size: containerLogMaxSize
bool: rotateCertificates serverTLSBootstrap enableContentionProfiling runOnce
protectKernelDefaults kernelMemcgNotification
*bool: enableServer enableDebuggingHandlers cgroupsPerQOS singleProcessOOMKill cpuCFSQuota
serializeImagePulls mergeDefaultEvictionSettings enableControllerAttachDetach
makeIPTablesUtilChains failSwapOn enableSystemLogHandler enableSystemLogQuery
enableProfilingHandler enableDebugFlagsHandler seccompDefault registerNode
localStorageCapacityIsolation failCgroupV1
int32: port readOnlyPort registryBurst eventBurst nodeLeaseDurationSeconds maxPods kubeAPIBurst
evictionMaxPodGracePeriod podsPerCore
*int32: registryPullQPS eventRecordQPS healthzPort oomScoreAdj imageGCHighThresholdPercent
imageGCLowThresholdPercent nodeStatusMaxImages kubeAPIQPS maxParallelImagePulls
iptablesMasqueradeBit iptablesDropBit containerLogMaxFiles containerLogMaxWorkers
int64: maxOpenFiles *int64: podPidsLimit *float: memoryThrottlingFactor
duration: syncFrequency fileCheckFrequency httpCheckFrequency streamingConnectionIdleTimeout
nodeStatusUpdateFrequency nodeStatusReportFrequency imageMinimumGCAge imageMaximumGCAge
volumeStatsAggPeriod cpuManagerReconcilePeriod runtimeRequestTimeout
evictionPressureTransitionPeriod shutdownGracePeriod shutdownGracePeriodCriticalPods
*duration: cpuCFSQuotaPeriod containerLogMonitorInterval
[]text: tlsCipherSuites preloadedImagesVerificationAllowlist clusterDNS enforceNodeAllocatable
allowedUnsafeSysctls []int32: tlsCurvePreferences {}[]text: staticPodURLHeader
{}text: cpuManagerPolicyOptions topologyManagerPolicyOptions {}bool: featureGates
{}threshold: evictionHard evictionSoft evictionMinimumReclaim qosReserved
{}period: evictionSoftGracePeriod {}size: systemReserved kubeReserved
Authentication: authentication Authorization: authorization MemorySwap: memorySwap
Logging: logging CrashLoopBackOff: crashLoopBackOff *Tracing: tracing
*UserNamespaces: userNamespaces []PodShutdown: shutdownGracePeriodByPodPriority
[]MemoryReservation: reservedMemory []Taint: registerWithTaints""",
    "Authentication": "X509: x509 WebhookAuthentication: webhook Anonymous: anonymous",
    "X509": "text: clientCAFile",
    "WebhookAuthentication": "*bool: enabled duration: cacheTTL",
    "Anonymous": "*bool: enabled",
    "Authorization": "text: mode WebhookAuthorization: webhook",
    "WebhookAuthorization": "duration: cacheAuthorizedTTL cacheUnauthorizedTTL",
    "MemorySwap": "text: swapBehavior",
    "Logging": """text: format flush!: flushFrequency uint32!: verbosity []Verbosity: vmodule
LogOptions: options""",
    "Verbosity": "text!: filePattern uint32!: verbosity",
    "LogOptions": "LogOutput: text json",
    "LogOutput": "bool: splitStream buffer: infoBufferSize",
    "CrashLoopBackOff": "*duration: maxContainerRestartPeriod",
    "Tracing": "*text: endpoint *int32: samplingRatePerMillion",
    "UserNamespaces": "*int64: idsPerPod",
    "PodShutdown": "int32!: priority int64!: shutdownGracePeriodSeconds",
    "MemoryReservation": "int32!: numaNode {}quantity!: limits",
    "Taint": "text!: key effect text: value *time: timeAdded",
}
FIELDS = {
    struct: {
        name: kind
        for kind, names in re.findall(r"(\S+):((?:\s+\w+\b(?!!?:))+)", kinds)
        for name in names.split()
    }
    for struct, kinds in _KINDS.items()
}
"""The kind of each field, by the name of the object that has it."""
_ZEROS: dict[str, object] = dict.fromkeys(["int32!", "int64!", "uint32!", "flush!"], 0)
_ZEROS |= {"duration": "0s", "buffer": "0", "text!": "", "{}quantity!": None}
"""The kinds that Go always writes, with the value of an absent field."""

_UNITS_NS = {"ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9}
_UNITS_NS |= {"m": 60 * 10**9, "h": 3600 * 10**9}
_NUMBER = r"(\d+\.?\d*|\.\d+)"
_DURATION = re.compile(rf"{_NUMBER}(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_DURATIONS = re.compile(rf"[+-]?(0|({_DURATION.pattern})+)", re.ASCII)
_PERCENT = re.compile(r"\d+(\.\d+)?%", re.ASCII)


def read_struct(struct: str, document: object, *, can_have_unknown: bool = False) -> Json:
    """Return the fields that are set, in canonical form; raise `Mismatch`.

    Unknown fields that ``can_have_unknown`` allows stay as they are: a newer kubelet has them.
    """
    values = json_values.read_present_keys(document)
    if not can_have_unknown:
        json_values.refuse_unknown_keys(FIELDS[struct], values)
    for name, kind in FIELDS[struct].items():
        if name in values:
            read = partial(_read_value, kind=kind.strip("*!"), can_have_unknown=can_have_unknown)
            values[name] = json_values.read_at(name, read, values[name])
    return values


def merge_struct(struct: str, base: Json, changes: Json) -> Json:
    """Return the base with the user's fields, as mergo merges them."""
    merged = dict(base)
    for name, value in changes.items():
        kind, present = FIELDS[struct][name].strip("*!"), merged.get(name)
        if kind in FIELDS or kind.startswith("{}"):
            inner, change = map(json_values.read_object, (present or {}, value))
            merged[name] = merge_struct(kind, inner, change) if kind in FIELDS else inner | change
        # mergo cannot see the number inside of a quantity: the user's has no effect.
        elif kind != "buffer" and (not present or (value and value != "0s")):
            merged[name] = value
    return merged


def complete_struct(struct: str, values: Json) -> Json:
    """Return the fields that Go writes."""
    complete = dict(values)
    for name, kind in FIELDS[struct].items():
        value = values.get(name)
        if kind in FIELDS:
            complete[name] = complete_struct(kind, json_values.read_object(value or {}))
        elif kind in _ZEROS:
            complete.setdefault(name, _ZEROS[kind])
        elif not value and not kind.startswith("*"):
            complete.pop(name, None)
    return complete


def _read_value(value: object, *, kind: str, can_have_unknown: bool) -> object:
    if kind in FIELDS:
        return read_struct(kind, value, can_have_unknown=can_have_unknown)
    if kind[0] not in "[{":
        return _READERS[kind](value)
    inner = kind[2:]
    read = partial(_read_value, kind=inner, can_have_unknown=can_have_unknown)
    if kind[0] == "{":
        entries = json_values.read_object(value).items()
        return {key: json_values.read_at(key, read, item) for key, item in entries}
    pairs = enumerate(json_values.read_list(value))
    items = [json_values.read_at(index, read, item) for index, item in pairs]
    if inner not in FIELDS:
        return items
    # A list of the user replaces that of the base, so that its objects are complete here.
    return [complete_struct(inner, json_values.read_object(item)) for item in items]


def _make_mismatch(expected: str, text: str) -> Mismatch:
    return Mismatch(problem=f"expected {expected}, found {text!r:.60}")


def _read_bounded(low: int, high: int, value: object) -> int:
    number = json_values.read_any_integer(value)
    if not low <= number <= high:
        raise Mismatch(f"an integer from {low} to {high}", value)
    return number


def _read_duration(value: object, *, is_text: bool = False) -> str:
    """Return a duration as Go formats it (``1h0m0s``); it stays as it is where Go has a string."""
    text = json_values.read_text(value)
    parts = _DURATION.findall(text) if _DURATIONS.fullmatch(text) else []
    total_ns = sum(int(Fraction(number) * _UNITS_NS[unit]) for number, unit in parts)
    if total_ns >= 2**63 or not (parts or text.strip("+-") == "0"):
        raise _make_mismatch("a duration such as 30s or 1m30s", text)
    minutes, rest_ns = divmod(total_ns, _UNITS_NS["m"])
    units = ("s", "ms", "µs", "ns") if rest_ns and not minutes else ("s",)
    unit = next((unit for unit in units if rest_ns >= _UNITS_NS[unit]), "s")
    canonical = f"{(Decimal(rest_ns) / _UNITS_NS[unit]).normalize():f}{unit}"
    if minutes:
        hours, minutes = divmod(minutes, 60)
        canonical = (f"{hours}h" if hours else "") + f"{minutes}m{canonical}"
    sign = "-" if text[0] == "-" and total_ns else ""
    return text if is_text else sign + canonical


def _read_size(value: object, *, can_be_percent: bool = False) -> str:
    """Return a quantity of a field that is a string in Go: it stays as it is."""
    text = json_values.read_text(value)
    is_percent = can_be_percent and _PERCENT.fullmatch(text)
    if text and not is_percent and quantities.parse_quantity(text) is None:
        raise _make_mismatch("a quantity such as 500m or 1Gi", text)
    return text


def _read_quantity(value: object) -> str:
    """Return a number of bytes or pages in canonical form: ``1024Mi`` is ``1Gi``."""
    text = str(value) if type(value) is int else json_values.read_text(value)
    quantity = quantities.parse_quantity(text)
    if quantity is None or not 0 <= quantity.number < 2**63 or quantity.number.denominator != 1:
        raise _make_mismatch("a whole number of bytes such as 1Gi", text)
    return quantity.text


def _read_time(value: object) -> str:
    text = json_values.read_text(value)
    if len(text) != len("2026-01-31T12:00:00Z") or not yaml11.is_timestamp(text):
        raise _make_mismatch("a time such as 2026-01-31T12:00:00Z", text)
    return text


_READERS: dict[str, Callable[[object], object]] = {
    "any": json_values.read_any,
    "text": json_values.read_text,
    "bool": json_values.read_bool,
    "level": partial(_read_bounded, 0, 10),
    "int32": partial(_read_bounded, -(2**31), 2**31 - 1),
    "int64": json_values.read_integer,
    "uint32": partial(_read_bounded, 0, 2**32 - 1),
    "float": json_values.read_number,
    "duration": _read_duration,
    "flush": lambda value: (_read_duration if isinstance(value, str) else json_values.read_integer)(
        value
    ),
    "period": partial(_read_duration, is_text=True),
    "size": _read_size,
    "threshold": partial(_read_size, can_be_percent=True),
    "quantity": _read_quantity,
    "buffer": _read_size,
    "time": _read_time,
}
