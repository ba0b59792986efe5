"""The controllers behind the API: Jobs, scheduling, budgets, kubelets, certificates.

They run before the next request is read, so that clients see the effects of their requests.
"""

import asyncio

from treenail_lab.apiserver.access.certificates import CertificateAuthority
from treenail_lab.apiserver.controllers.certificate_signer import CertificateSigner
from treenail_lab.apiserver.controllers.garbage_collector import GarbageCollector
from treenail_lab.apiserver.controllers.jobs import JobController
from treenail_lab.apiserver.controllers.kubelets import KubeletEmulator
from treenail_lab.apiserver.controllers.scheduler import Scheduler
from treenail_lab.apiserver.registry.disruption_budgets import DisruptionController
from treenail_lab.apiserver.registry.registry import ObjectRegistry
from treenail_lab.apiserver.schema.kinds import StorageKey
from treenail_lab.apiserver.storage.store import StoreEvent


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
        wait_s = min((each for each in waits_s if each is not None), default=None)
        if wait_s is not None:
            self._timer = self._loop.call_later(wait_s, self.schedule_run)
