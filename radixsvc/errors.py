"""What a caller can be told: one class per outcome, each with its HTTP status.

Inside, broken ownership of pages raises `tiers.page.InvariantError`, which is never shown to a
caller as an answer: it ends the process. These here are for people and their programs.
"""

from __future__ import annotations

from collections.abc import Sequence


class ServiceError(Exception):
    """An outcome with an HTTP status; `message` says what is wrong and what to do about it."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init_subclass__(
        cls, status: int | None = None, type: str | None = None, code: str | None = None
    ) -> None:
        cls.status, cls.type, cls.code = status or cls.status, type or cls.type, code or cls.code

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def to_dict(self) -> dict[str, str | None]:
        """OpenAI's error object."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    @property
    def headers(self) -> dict[str, str]:
        """What the answer has to say beside its body."""
        return {} if self.retry_after is None else {"retry-after": f"{self.retry_after:.0f}"}


class InvalidRequest(ServiceError, status=400, type="invalid_request_error"): ...


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """The prompt and its answer can never fit the model's context or the device's pages."""


class AuthenticationFailed(
    ServiceError, status=401, type="authentication_error", code="invalid_api_key"
):
    @property
    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class PermissionDenied(ServiceError, status=403, type="permission_error"): ...


class NotFound(InvalidRequest, status=404, code="not_found"): ...


class MethodNotAllowed(InvalidRequest, status=405):
    """There is such a path, for the methods `allowed`."""

    def __init__(self, allowed: Sequence[str]) -> None:
        super().__init__(f"this path is for {' and '.join(allowed)}")
        self.allowed = allowed

    @property
    def headers(self) -> dict[str, str]:
        return {"Allow": ", ".join(self.allowed)}


class NotAcceptable(InvalidRequest, status=406): ...


class RequestTooSlow(InvalidRequest, status=408): ...


class BodyTooLarge(InvalidRequest, status=413): ...


class UnsupportedMediaType(InvalidRequest, status=415): ...


class QueueFull(ServiceError, status=429, type="rate_limit_error", code="queue_full"):
    """Too much is waiting; come back after `retry_after` seconds."""


class SlowReader(ServiceError, status=408, code="slow_reader"):
    """The client did not read its stream within the deadline, so its request was ended."""


class DeadlineExceeded(ServiceError, status=504, code="deadline_exceeded"): ...


class Draining(ServiceError, status=503, code="draining"):
    """The service is shutting down and takes no new requests."""


class NotReady(ServiceError, status=503, code="not_ready"):
    """The model is still being loaded."""


class EngineFailed(ServiceError, code="engine_failed"):
    """The step that held this request failed; the request was ended, others were not."""


class SetupError(Exception):
    """The service can't start as asked. The message names the cause and the remedy.

    `exit_code` follows sysexits: 78 for configuration and models, 69 for what is unavailable.
    """

    def __init__(self, message: str, exit_code: int = 78) -> None:
        super().__init__(message)
        self.exit_code = exit_code
