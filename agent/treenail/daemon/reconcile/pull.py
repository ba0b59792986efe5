"""Pulls an image with the newest login, and with the one before when that is refused."""

import logging
from collections.abc import Callable

from treenail.daemon.reconcile.interfaces import RegistryCredentials
from treenail.errors import PreflightError, TransactionError
from treenail.host.container.registry import is_unauthorized
from treenail.log import MessageId
from treenail.update.checks.preflight import PreflightReason

log = logging.getLogger(__name__)


def pull_image(credentials: RegistryCredentials, image: str, attempt: Callable[[], bool]) -> None:
    """Attempt to pull the pull spec, twice at most; ``attempt`` says whether it was pulled.

    Raises whatever the last attempt raised.
    """
    credentials.install_secrets()
    if not image:
        attempt()
        return
    try:
        pulled = attempt()
    except (PreflightError, TransactionError) as error:
        if not _is_login_refused(error) or not credentials.handle_rejected_login(image):
            raise
        log.warning(
            "the newest login was refused, going on with the one before: %s",
            error,
            extra={"message_id": MessageId.CREDENTIALS_INVALID},
        )
        pulled = _retry_pull(credentials, image, attempt)
    if pulled:
        credentials.confirm_login(image)


def _retry_pull(credentials: RegistryCredentials, image: str, attempt: Callable[[], bool]) -> bool:
    try:
        return attempt()
    except (PreflightError, TransactionError) as error:
        if _is_login_refused(error):
            credentials.handle_rejected_login(image)
        raise


def _is_login_refused(error: PreflightError | TransactionError) -> bool:
    if isinstance(error, PreflightError):
        return PreflightReason.REGISTRY_UNAUTHORIZED in error.reasons
    return is_unauthorized(str(error))
