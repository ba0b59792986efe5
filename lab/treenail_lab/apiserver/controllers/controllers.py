"""The controllers behind the API: Jobs, scheduling, budgets, kubelets, certificates.

They run before the next request is read, so that clients see the effects of their requests. The
signer of kubelets' client certificates, as kube-controller-manager has it, signs approved requests
and approves none.
"""

import asyncio
import base64
import datetime as dt
from functools import partial

from cryptography import x509
from cryptography.x509.oid import NameOID

from treenail_lab.apiserver.access.authentication import MASTERS, NODE_PREFIX, NODES, ApiUser
from treenail_lab.apiserver.access.certificates import CertificateAuthority
from treenail_lab.apiserver.controllers.garbage_collector import GarbageCollector
from treenail_lab.apiserver.controllers.jobs import JobController
from treenail_lab.apiserver.controllers.pods import KubeletEmulator, Scheduler
from treenail_lab.apiserver.objects import Json, ObjectKey, read_key
from treenail_lab.apiserver.registry.disruption_budgets import DisruptionController
from treenail_lab.apiserver.registry.registry import ObjectRegistry, WriteContext
from treenail_lab.apiserver.schema.kinds import StorageKey
from treenail_lab.apiserver.store import StoreEvent

REQUESTS: StorageKey = ("certificates.k8s.io", "certificatesigningrequests")
KUBELET_SIGNER = "kubernetes.io/kube-apiserver-client-kubelet"
_LIFETIME = dt.timedelta(days=365)
_WRITE = WriteContext(
    ApiUser("system:serviceaccount:kube-system:certificate-controller", (MASTERS,)),
    "kube-controller-manager",
)


class CertificateSigner:
    """Signs requests: `note_event` records changes, `sync` acts on them."""

    def __init__(self, registry: ObjectRegistry, authority: CertificateAuthority) -> None:
        self._registry = registry
        self._authority = authority
        self._approved: dict[ObjectKey, None] = {}

    def note_event(self, storage: StorageKey, event: StoreEvent) -> bool:
        """Record approved requests; return whether there are any."""
        if storage != REQUESTS or event.type == "DELETED" or not _needs_certificate(event.object):
            return False
        self._approved[read_key(event.object)] = None
        return True

    def reload(self) -> None:
        """Record all approved requests, after the store was loaded."""
        requests = self._registry.store.list_objects(REQUESTS)
        self._approved = {
            read_key(request): None for request in requests if _needs_certificate(request)
        }

    def sync(self) -> None:
        """Sign the recorded requests."""
        kind = self._registry.kinds.find_kind(REQUESTS[0], "v1", REQUESTS[1])
        for where in list(self._approved):
            del self._approved[where]
            request = self._registry.store.find_object(REQUESTS, where)
            if request is None or not _needs_certificate(request):
                continue
            change = self._sign_request(request)
            self._registry.update_object(
                kind, "", where[1], partial(_merge, change), _WRITE, "status"
            )

    def _sign_request(self, request: Json) -> Json:
        status = request.get("status") or {}
        try:
            content = base64.b64decode(request["spec"]["request"])
            _check_kubelet_request(content)
            signed = self._authority.sign_client_request(content, _LIFETIME)
        except (TypeError, ValueError) as error:
            failed = {"type": "Failed", "status": "True", "reason": "SignerValidationFailure",
                      "message": str(error)}  # fmt: skip
            return {"status": status | {"conditions": [*status["conditions"], failed]}}
        return {"status": status | {"certificate": base64.b64encode(signed).decode()}}


def _check_kubelet_request(content: bytes) -> None:
    """Raise `ValueError` for a request that is not a kubelet's (ValidateKubeletClientCSR)."""
    parsed = x509.load_pem_x509_csr(content)
    find = parsed.subject.get_attributes_for_oid
    if [organization.value for organization in find(NameOID.ORGANIZATION_NAME)] != [NODES]:
        raise ValueError("subject organization is not system:nodes")
    if not all(str(name.value).startswith(NODE_PREFIX) for name in find(NameOID.COMMON_NAME)):
        raise ValueError("subject common name does not begin with system:node:")
    if x509.SubjectAlternativeName.oid in [extension.oid for extension in parsed.extensions]:
        raise ValueError("DNS subjectAltNames are not allowed")


def _merge(change: Json, old: Json) -> Json:
    return old | change


def _needs_certificate(request: Json) -> bool:
    status = request.get("status") or {}
    types = {
        condition["type"]
        for condition in status.get("conditions") or []
        if condition["status"] == "True"
    }
    return (
        request["spec"]["signerName"] == KUBELET_SIGNER
        and "Approved" in types
        and not types & {"Denied", "Failed"}
        and not status.get("certificate")
    )


class ControllerLoop:
    """Records every change; runs the controllers while it is attached to an event loop."""

    def __init__(self, registry: ObjectRegistry, authority: CertificateAuthority) -> None:
        self.kubelets = KubeletEmulator(registry)
        self.jobs = JobController(registry)
        self._collector = GarbageCollector(registry)
        self._disruption = DisruptionController(registry)
        self._scheduler = Scheduler(registry)
        self._signer = CertificateSigner(registry, authority)
        self._controllers = (
            self._collector,
            self.jobs,
            self._scheduler,
            self.kubelets,
            self._disruption,
            self._signer,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._run_handle: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        registry.store.add_listener(self._note_event)

    def attach_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the controllers from now on, beginning with the changes recorded before."""
        self._loop = loop
        self.schedule_run()

    def detach_loop(self) -> None:
        """Stop running the controllers until the next `attach_loop`."""
        for handle in (self._run_handle, self._timer):
            if handle is not None:
                handle.cancel()
        self._loop = self._run_handle = self._timer = None

    def schedule_run(self) -> None:
        """Run the controllers soon, because time has passed or a kubelet was started."""
        if self._loop is not None and self._run_handle is None:
            self._run_handle = self._loop.call_soon(self._run_controllers)

    def reload(self) -> None:
        """Process all objects, after the store was loaded."""
        for controller in self._controllers:
            controller.reload()
        self.schedule_run()

    def _note_event(self, storage: StorageKey, event: StoreEvent) -> None:
        for controller in self._controllers:
            if controller.note_event(storage, event):
                self.schedule_run()

    def _run_controllers(self) -> None:
        if self._loop is None:
            return
        self._run_handle = None
        self._collector.sync()
        waits_s = [self.jobs.sync()]
        self._scheduler.sync()
        waits_s.append(self.kubelets.sync())
        self._disruption.sync()
        self._signer.sync()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wait_s = min((pause_s for pause_s in waits_s if pause_s is not None), default=None)
        if wait_s is not None:
            self._timer = self._loop.call_later(wait_s, self.schedule_run)
