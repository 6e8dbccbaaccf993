"""The errors of this package: who is at fault decides the class, the message says what to do.

Every message names what happened, to which file or option, the rule that was broken and the way
out. The command line maps `ConfigError` to exit code 2, every other `RayCkptError` to exit code 1.
"""

from __future__ import annotations

from typing import Any, Protocol


class Place(Protocol):
    """A file as it is named to people: a path, or the address of an object."""

    @property
    def name(self) -> str: ...

    def __str__(self) -> str: ...


class RayCkptError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(RayCkptError, ValueError):
    """A mistake in options, configuration or arguments; nothing has been changed on disk."""


class StorageError(RayCkptError):
    """Storage answered with an error that is not "not found".

    An error is not an absence: code that catches this must not go on as if the file did not exist.
    """


class CopyError(StorageError):
    """A copy of a file did not come through whole, and nothing of it is kept."""


class CutOffError(CopyError):
    """A copy broke off on its way, which says nothing about what it was a copy of."""


class HolderGoneError(StorageError):
    """The process that holds a node's copies is gone, or does not answer; what it holds may be there."""


class DamagedCopyError(RayCkptError):
    """A copy of a file has other bytes than its manifest says: storage answered, and what it gave is not it.

    Attributes:
        where: the copy, in words.
        path: the file, relative to its checkpoint.
        fault: what differs, in words.
    """

    def __init__(self, where: str, path: str, fault: str) -> None:
        super().__init__(where, path, fault)
        self.where, self.path, self.fault = where, path, fault

    def __str__(self) -> str:
        return f"{self.where}: {self.fault}. This copy is not used; take another one (ray-ckpt verify RUN)."


class ManifestError(RayCkptError):
    """A checkpoint's manifest is missing, damaged or contradicts its folder.

    Attributes:
        path: the manifest file.
        fault: what is wrong with it, in words; exactly "missing" when there is none.
    """

    def __init__(self, path: Place, fault: str) -> None:
        super().__init__(path, fault)
        self.path = path
        self.fault = fault

    def __str__(self) -> str:
        if self.fault == "missing":
            return (
                f"{self.path}: missing, so this checkpoint was never committed. Only committed "
                "checkpoints are read; use another one (ray-ckpt ls RUN)."
            )
        return (
            f"{self.path}: {self.fault}. A checkpoint is used only with an intact manifest; "
            "use another one (ray-ckpt ls RUN)."
        )


class SignatureError(ManifestError):
    """A manifest is not signed with one of the keys in use: perhaps forged, perhaps the key is a wrong one."""

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.fault}. With RAY_CKPT_KEY set only manifests signed with it are used. If the key is a "
            "wrong one, set the right one, or add the old one after it and a comma."
        )


class UnsaneStateError(RayCkptError):
    """The guard does not let a state be committed.

    Attributes:
        findings: what is wrong, as in :class:`ray_ckpt.checkpoint.guard.Finding`.
    """

    def __init__(self, reason: str, findings: list[dict[str, Any]]) -> None:
        super().__init__(reason, findings)
        self.reason = reason
        self.findings = findings

    def __str__(self) -> str:
        return self.reason


class NonfiniteError(RayCkptError):
    """The run is no longer finite, and goes no further."""


class RollbackError(RayCkptError):
    """The run is no longer finite: the attempt ends, and the next one begins at a checkpoint from before."""


class LeavingError(RayCkptError):
    """The attempt ends as somebody planned: a node or a worker will be taken away, and what was done is safe."""


class RestoreError(RayCkptError):
    """No checkpoint could be restored although there are some, or a restored state is wrong."""


class StaleGenerationError(RayCkptError):
    """A writer of an earlier attempt tried to commit, delete or promote after it was replaced."""


class StateError(RayCkptError, TypeError):
    """A part of the training state cannot be saved, or is not what it is given as."""


class OutOfStepError(RayCkptError, RuntimeError):
    """Ranks that must make the same calls in the same order did not: one waited for others in vain."""


class WeightsError(RayCkptError):
    """A file of weights is damaged, or does not fit the model."""


class MemoryShortError(RayCkptError):
    """A node has less memory than saving takes."""
