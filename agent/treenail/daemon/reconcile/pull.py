"""Pulls an image with the newest login, and with the one before when that is refused."""

import logging
from collections.abc import Callable

from treenail.daemon.reconcile.interfaces import Credentials
from treenail.errors import PreflightError, TransactionError
from treenail.host.container.registry import refuses_login
from treenail.log import MessageId
from treenail.update.checks.preflight import Reason

log = logging.getLogger(__name__)


def pull(credentials: Credentials, image: str, attempt: Callable[[], bool]) -> None:
    """Attempt to pull the pull spec, twice at most; ``attempt`` says whether it was pulled.

    Raises whatever the last attempt raised.
    """
    credentials.refresh()
    if not image:
        attempt()
        return
    try:
        pulled = attempt()
    except (PreflightError, TransactionError) as error:
        if not _refused(error) or not credentials.refused(image):
            raise
        log.warning(
            "the newest login was refused, going on with the one before: %s",
            error,
            extra={"message_id": MessageId.CREDENTIALS_BROKEN},
        )
        pulled = _again(credentials, image, attempt)
    if pulled:
        credentials.proven(image)


def _again(credentials: Credentials, image: str, attempt: Callable[[], bool]) -> bool:
    try:
        return attempt()
    except (PreflightError, TransactionError) as error:
        if _refused(error):
            credentials.refused(image)
        raise


def _refused(error: PreflightError | TransactionError) -> bool:
    if isinstance(error, PreflightError):
        return Reason.REGISTRY_UNAUTHORIZED in error.reasons
    return refuses_login(str(error))
