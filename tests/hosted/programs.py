"""Programs of HyperShift and of Cluster API (CAPI), which variables name.

``TREENAIL_TEST_HYPERSHIFT`` is a directory of programs around HyperShift's packages:

- ``inplace`` runs ``inplaceupgrader.Setup`` and ``drainer.Setup`` as the hosted cluster config
  operator does: its Manager is of the hosted cluster, with the cache and the client that enforce
  the label ``hypershift.openshift.io/managed``, its CPCluster of the management cluster. The
  release provider returns one image of the machine-config-operator. No leader election. Options:
  ``--management-kubeconfig``, ``--guest-kubeconfig``, ``--namespace`` and ``--hcp-name`` of the
  HostedControlPlane, ``--qps`` of both clients. It sends and reads JSON, and logs to stdout.
- ``hash`` reads one request a line, in JSON: ``hostedCluster``, ``nodePool``, ``configMaps`` (of
  all namespaces), ``releaseVersion``, ``haproxy`` (the rendered config, or empty) and
  ``controlPlaneNamespace``. It answers one line: ``hash``, ``hashWithoutVersion`` and ``config``
  of ``nodepool.NewConfigGenerator`` with a fake client, or ``error``.

``TREENAIL_TEST_CAPI_MANAGER`` is the program of the module sigs.k8s.io/cluster-api.
"""

from pathlib import Path

import pytest

from tests.mco.programs import Variable

HYPERSHIFT = Variable(
    "TREENAIL_TEST_HYPERSHIFT", "a directory of programs around HyperShift's packages"
)
TREE = Variable("TREENAIL_TEST_HYPERSHIFT_TREE", "a checkout of HyperShift, with its CRDs")
CAPI_MANAGER = Variable("TREENAIL_TEST_CAPI_MANAGER", "the program manager of Cluster API")


def find_program(name: str) -> Path:
    """Return a program of HyperShift; skip the test without it."""
    path = HYPERSHIFT.read() / name
    if not path.exists():
        pytest.skip(f"{HYPERSHIFT.name}: the directory has no {name}")
    return path
