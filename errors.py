"""Every error that a user can meet: one line that says what, where, found, expected and the next step."""

from __future__ import annotations


class LlmcError(Exception):
    """Base of all errors raised on purpose; the command line prints its text and exits with `exit_code`."""

    exit_code = 2


class UsageError(LlmcError):
    """A wrong argument: an unknown name, a value out of range, flags that exclude each other."""


class MissingExtraError(LlmcError):
    """A feature needs an optional install; the text names the pip command."""


class CheckpointError(LlmcError):
    """The model's files are absent, damaged or contradict each other."""


class UnsupportedModelError(LlmcError):
    """The model is intact, but uses an architecture, option or operator that llmc does not compile."""


class PassError(LlmcError):
    """A graph pass cannot do what it was asked to do."""


class TargetError(LlmcError):
    """An unknown target, or a scheme that the device cannot run."""


class ToolchainError(LlmcError):
    """No usable compiler, or the compiler refused generated code."""


class BundleError(LlmcError):
    """A bundle that must not be loaded: damaged, incomplete, hostile, or made for another machine or version."""


class RequestError(LlmcError):
    """A generation request that cannot be served: empty prompt, bad sampling parameter, too long."""


class CapacityError(LlmcError):
    """A request larger than the memory it would need."""


class QualityError(LlmcError):
    """A limit on quality or memory that no choice of formats keeps to (exit code 1); the text gives the nearest figures."""

    exit_code = 1


class VerificationError(LlmcError):
    """A check ran and failed (exit code 1): a pass changed the numbers, a hash differs."""

    exit_code = 1
