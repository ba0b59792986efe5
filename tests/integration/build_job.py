"""A Job that builds an image with the builder program, as the build controller creates it."""

import json

from tests.waiting import wait_until
from treenail.kube.api_client import Json
from treenail.kube.resources import CONFIGMAPS, JOBS, PODS, SECRETS
from treenail_lab.cluster import Lab
from treenail_lab.image_builds import LabRegistry, build_login_secret

NAMESPACE = "default"
_INPUTS = ("Containerfile", "build.json", "ca.pem")
_CONTEXT = "hello"


class BuildJob:
    """One build of a Containerfile on the base image of the lab's registry."""

    def __init__(
        self, lab: Lab, registry: LabRegistry, name: str, text: str, base: str = ""
    ) -> None:
        self._lab, self._registry, self._name = lab, registry, name
        self._containerfile = f"FROM {base or registry.installed.pull_spec}\n{text}"

    def create(self) -> None:
        """Create the inputs, the logins and the Job."""
        facts = {"pushSpec": f"{self._registry.host}/os/built:{self._name}", "userLine": 2}
        data: Json = {
            "Containerfile": self._containerfile,
            "build.json": json.dumps(facts),
            "ca.pem": self._registry.ca_pem,
            _CONTEXT: "hello\n",
        }
        inputs: Json = {"metadata": {"name": f"inputs-{self._name}"}, "data": data}
        client = self._lab.client
        client.create(CONFIGMAPS, inputs, namespace=NAMESPACE)
        for kind, login in (
            ("pull", self._registry.pull_login),
            ("push", self._registry.push_login),
        ):
            secret = build_login_secret(f"{kind}-{self._name}", NAMESPACE, login)
            client.create(SECRETS, secret, namespace=NAMESPACE)
        client.create(JOBS, self._make_manifest(), namespace=NAMESPACE)

    def wait_end(self, limit_s: float = 60.0) -> dict[str, str]:
        """Reason of each condition of the Job, after its end."""

        def read() -> dict[str, str]:
            job = self._lab.client.get(JOBS, self._name, namespace=NAMESPACE)
            status = job["status"]
            assert isinstance(status, dict)
            return {each["type"]: each["reason"] for each in status.get("conditions", [])}

        wait_until(lambda: read().keys() & {"Complete", "Failed"}, limit_s=limit_s)
        return read()

    def read_results(self) -> dict[str, Json]:
        """Result by phase, from the termination messages of the last pod."""
        selector = {"labelSelector": f"job-name={self._name}"}
        pod = self._lab.client.list(PODS, namespace=NAMESPACE, params=selector).items[-1]
        status = pod["status"]
        assert isinstance(status, dict)
        found = {}
        for each in (*status["initContainerStatuses"], *status["containerStatuses"]):
            if ended := each["state"].get("terminated"):
                found[each["name"]] = json.loads(ended["message"])
        return found

    def _make_manifest(self) -> Json:
        items = [{"key": name, "path": name} for name in _INPUTS]
        items.append({"key": _CONTEXT, "path": f"context/{_CONTEXT}"})
        volumes: list[Json] = [
            {"name": "work", "emptyDir": {}},
            {"name": "inputs", "configMap": {"name": f"inputs-{self._name}", "items": items}},
        ]
        for kind in ("pull", "push"):
            files = [{"key": ".dockerconfigjson", "path": "config.json"}]
            secret = {"secretName": f"{kind}-{self._name}", "items": files, "defaultMode": 0o440}
            volumes.append({"name": kind, "secret": secret})
        rules = [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [64]}}]
        pod: Json = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "initContainers": [_make_container("fetch", "pull"), _make_container("build")],
            "containers": [_make_container("push", "push")],
            "volumes": volumes,
        }
        spec: Json = {"podFailurePolicy": {"rules": rules}, "template": {"spec": pod}}
        return {"metadata": {"name": self._name}, "spec": spec}


def _make_container(phase: str, login: str = "") -> Json:
    arguments = [phase, "--inputs", "/inputs", "--work", "/work-dir"]
    arguments += ["--result", "/dev/termination-log"]
    mounts: list[Json] = [
        {"name": "work", "mountPath": "/work-dir"},
        {"name": "inputs", "mountPath": "/inputs", "readOnly": True},
    ]
    if login:
        place = f"/secrets/{login}"
        mounts.append({"name": login, "mountPath": place, "readOnly": True})
        arguments += [f"--{login}-secret", f"{place}/config.json", "--ca", "/inputs/ca.pem"]
    return {
        "name": phase,
        "image": "localhost/builder",
        "command": ["python3", "-m", "treenail.builder"],
        "args": arguments,
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "runAsUser": 0},
    }
