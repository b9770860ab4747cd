"""Octavo's exceptions: one tree, each message one sentence with value, limit and remedy."""


class OctavoError(Exception):
    """Root of every error Octavo raises on purpose."""


class CheckpointError(OctavoError):
    """A checkpoint is missing, damaged or of a kind that cannot be read."""


class UnsupportedModelError(OctavoError):
    """A model's architecture, attention or an operator cannot be expressed in a paged graph."""


class BuildError(OctavoError):
    """An engine could not be built or published."""


class BundleError(OctavoError):
    """An engine bundle is missing, damaged, tampered with or of another format version."""


class IncompatibleEngineError(BundleError):
    """A sound engine bundle that this machine or these library versions cannot run."""


class BackendError(OctavoError):
    """A backend's library is missing or failed while loading or running an engine."""


class CapacityError(OctavoError):
    """A memory budget or an engine limit is too small for what was asked."""


class QueueFullError(CapacityError):
    """As many requests wait as may: the request was not queued, a later try may succeed."""


class RequestError(OctavoError, ValueError):
    """A prompt or a sampling parameter that the engine refuses."""


class ContextLengthError(RequestError):
    """A prompt that leaves no room for a token in the engine's context."""


class EngineDeadError(OctavoError):
    """The engine that ran a request has died: sent again, the request may succeed."""


class EngineClosedError(OctavoError):
    """The engine takes no requests any more, or was shut down while it ran one."""
