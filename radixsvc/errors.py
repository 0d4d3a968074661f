"""What a caller can be told: one class per outcome, each with its HTTP status.

Inside, broken ownership of pages raises `tiers.page.InvariantError`, which is never shown to a
caller as an answer: it ends the process. These here are for people and their programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ServiceError(Exception):
    """An outcome with an HTTP status; `message` says what is wrong and what to do about it, and
    `headers` what the answer has to say beside its body."""

    status = 500
    type = "server_error"
    code: str | None = None
    headers: Mapping[str, str] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Takes what a class does not share with its parent: `class A(B, status=404): ...`"""
        for name, value in kwargs.items():
            setattr(cls, name, value)

    def __init__(
        self, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = headers or self.headers

    def to_dict(self) -> dict[str, str | None]:
        """OpenAI's error object."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}


class InvalidRequest(ServiceError, status=400, type="invalid_request_error"): ...


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """The prompt and its answer can never fit the model's context or the device's pages."""


class AuthenticationFailed(
    ServiceError,
    status=401,
    type="authentication_error",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
): ...


class PermissionDenied(ServiceError, status=403, type="permission_error"): ...


class NotFound(InvalidRequest, status=404, code="not_found"): ...


class MethodNotAllowed(InvalidRequest, status=405): ...


class NotAcceptable(InvalidRequest, status=406): ...


class RequestTooSlow(InvalidRequest, status=408): ...


class BodyTooLarge(InvalidRequest, status=413): ...


class UnsupportedMediaType(InvalidRequest, status=415): ...


class QueueFull(
    ServiceError,
    status=429,
    type="rate_limit_error",
    code="queue_full",
    headers={"retry-after": "1"},
):
    """Too much is waiting; come back later."""


class SlowReader(ServiceError, status=408, code="slow_reader"):
    """The client did not read its stream within the deadline, so its request was ended."""


class DeadlineExceeded(ServiceError, status=504, code="deadline_exceeded"): ...


class Draining(ServiceError, status=503, code="draining", headers={"retry-after": "5"}):
    """The service is shutting down and takes no new requests."""


class NotReady(ServiceError, status=503, code="not_ready", headers={"retry-after": "2"}):
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
